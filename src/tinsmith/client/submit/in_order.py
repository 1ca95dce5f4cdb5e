"""One model's operations, sent in the order in which they were called.

A call is split into requests, encoded and numbered in the caller's thread, so that the order of numbers is the order of
calls. Each request is sent when all lower numbers have been sent. The server runs a model's requests strictly in the
order of their numbers and waits for a missing one, so a number whose request was never sent is a gap that would block
the model: gaps are filled with forward passes that change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinsmith.client.connection.connection import JSON_TYPE, PROTOBUF_TYPE
from tinsmith.client.connection.operations import Operations
from tinsmith.client.losses import custom_loss
from tinsmith.client.losses.custom_loss import SURROGATE
from tinsmith.client.runtime.futures import Future
from tinsmith.client.runtime.sequence import Numbers, Turns
from tinsmith.client.submit.body_buffers import BodyBuffers, RequestBody
from tinsmith.errors import APIStatusError, InvalidInputError, NotFoundError, TinkerError
from tinsmith.wire.codecs import json_codec, proto_training, zstd
from tinsmith.wire.codecs.protobuf import MessageWriter
from tinsmith.wire.losses import LIST_DTYPES, LossFnType
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.futures import UntypedAPIFuture
from tinsmith.wire.messages.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinsmith.wire.routes.table import FORWARD, FORWARD_BACKWARD, Route
from tinsmith.wire.rules.split_join import ChunkLimits, binary_bytes, combine, json_bytes, split
from tinsmith.wire.values.inputs import Datum, ModelInput

logger = logging.getLogger(__name__)

FORMAT_STATUSES = frozenset({400, 415, 422})
"""The statuses with which servers that only read JSON reject a binary body."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One request of a call: its number, its body, and the message, in case it must be encoded in another format."""

    number: int
    request: ForwardBackwardRequest
    body: RequestBody
    content_type: str
    called: float


@dataclass(frozen=True, slots=True)
class _Chunking:
    """How data is split into requests."""

    limits: ChunkLimits
    size_of: Callable[[Datum], int]

    def split(self, data: Sequence[Datum]) -> list[list[Datum]]:
        return split(data, self.limits, self.size_of)


class OrderedOperations:
    """The operations of one model."""

    def __init__(self, holder: Operations, model_id: str) -> None:
        self._holder = holder
        self._model_id = model_id
        self._numbers = Numbers()
        self._turns = Turns()
        self._gaps: list[int] = []
        self._buffers = BodyBuffers()

    def submit(
        self, name: str, route: Route, request: Any, finish: Callable[[Any], Any] = lambda answer: answer
    ) -> Future[Any]:
        """Encode and number a request in the caller's thread, and send it when its turn comes."""
        unnumbered = json_codec.encode(request)
        number = self._numbers.take()
        body = _numbered(unnumbered, number + 1)
        work = self._run_one(name, route, number, body, finish, time.monotonic())
        return self._holder.submit(name, work, cancellable=False, limit=self._holder.limit(name, self._model_id))

    async def _run_one(
        self, name: str, route: Route, number: int, body: bytes, finish: Callable[[Any], Any], called: float
    ) -> Any:
        started = called
        try:
            await self._turns.reach(number)
            started = time.monotonic()
            await self._fill_gaps(number, called)
            promise = await self._holder.promise(route, body, policy=self._holder.connection.policy(called))
        except BaseException as error:
            if not _is_refusal(error):
                self._gaps.append(number)
            raise
        finally:
            self._turns.done(number)
        what = f"{name} of {self._model_id}"
        return finish(await self._holder.result(route, promise, what=what, submit_s=time.monotonic() - started))

    def submit_pass(
        self,
        name: str,
        data: list[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        parts = self._prepare(data, loss_fn, config, forward_only=forward_only)
        limit = self._holder.limit(name, self._model_id)
        return self._holder.submit(name, self._run_parts(name, parts), cancellable=False, limit=limit)

    def _prepare(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
        first: int | None = None,
        chunking: _Chunking | None = None,
        spare: int = 0,
    ) -> list[_Part]:
        """Split, encode and number a call in the caller's thread. Invalid data raises before a number is taken.

        Numbers start at `first`; without it the next ones are taken, and `spare` more after them.
        """
        for i, datum in enumerate(data):
            if not isinstance(datum, Datum):
                raise InvalidInputError(f"data[{i}]: expected a Datum, got {type(datum).__name__}", field=f"data[{i}]")
            _check_finite(datum, i)
        connection = self._holder.connection
        content_type = PROTOBUF_TYPE if connection.speaks_protobuf else JSON_TYPE
        requests = [
            ForwardBackwardRequest(
                forward_backward_input=ForwardBackwardInput(
                    data=chunk, loss_fn=loss_fn, loss_fn_config=dict(config) if config is not None else NOT_GIVEN
                ),
                model_id=self._model_id,
                forward_only=True if forward_only else NOT_GIVEN,
            )
            for chunk in (chunking or self._chunking()).split(data)
        ]
        encode = proto_training.request_message if connection.speaks_protobuf else _json_body
        bodies = [encode(request) for request in requests]
        number = self._numbers.take(len(requests) + spare) if first is None else first
        return [
            _Part(number + i, request, self._numbered(body, number + i + 1), content_type, time.monotonic())
            for i, (request, body) in enumerate(zip(requests, bodies, strict=True))
        ]

    def _chunking(self) -> _Chunking:
        """Return how data is split for this server, as far as is known now."""
        connection = self._holder.connection
        return _Chunking(ChunkLimits.of(connection.server), binary_bytes if connection.speaks_protobuf else json_bytes)

    def _numbered(self, unnumbered: bytes | MessageWriter, seq_id: int) -> RequestBody:
        """Return the body of a request with its number, which is only taken once the rest has been encoded."""
        if isinstance(unnumbered, bytes):
            return RequestBody(_numbered(unnumbered, seq_id))
        proto_training.add_seq_id(unnumbered, seq_id)
        return self._buffers.write(unnumbered)

    async def _run_parts(self, name: str, parts: list[_Part]) -> ForwardBackwardOutput:
        what = f"{name} of {self._model_id}"
        if len(parts) == 1:
            return await self._run_part(parts[0], what)
        unsent = {part.number for part in parts}
        polls: dict[int, asyncio.Task[Any]] = {}

        async def send(part: _Part) -> None:
            unsent.discard(part.number)
            polls[part.number] = self._holder.connection.runner.spawn(await self._submit(part, what))

        try:
            await self._turns.reach(parts[0].number)
            await self._fill_gaps(parts[0].number, parts[0].called)
            # Where requests may overlap, the first is sent last: the server then has the rest and runs all in one go.
            is_parallel = self._holder.connection.server.parallel_fwdbwd_chunks
            failed: list[BaseException | None] = []
            for group in (parts[1:], parts[:1]) if is_parallel else ([part] for part in parts):
                failed += await asyncio.gather(*(send(part) for part in group), return_exceptions=True)
            for error in failed[-1:] + failed[:-1] if is_parallel else failed:
                if error is not None:
                    raise error
            return combine(await asyncio.gather(*(polls[part.number] for part in parts)))
        finally:
            self._give_up(sorted(unsent))
            for poll in polls.values():
                poll.cancel()

    async def _run_part(self, part: _Part, what: str) -> ForwardBackwardOutput:
        """Run a call that is a single request, as most are; it needs no further tasks."""
        try:
            await self._turns.reach(part.number)
            await self._fill_gaps(part.number, part.called)
        except BaseException:
            self._give_up([part.number])
            raise
        return combine([await (await self._submit(part, what))])

    async def _submit(self, part: _Part, what: str) -> Coroutine[Any, Any, Any]:
        """Submit one part and return a coroutine that waits for its result."""
        started = time.monotonic()
        budget, size = self._holder.connection.limits.train_bytes, len(part.body.content)
        try:
            await budget.acquire(size)
            try:
                route, promise = await self._submit_part(part)
            finally:
                budget.release(size)
                self._buffers.give_back(part.body)
        except BaseException as error:
            if not _is_refusal(error):
                self._gaps.append(part.number)
            raise
        finally:
            self._turns.done(part.number)
        return self._holder.result(
            FORWARD if part.request.forward_only else route, promise, what=what, submit_s=time.monotonic() - started
        )

    async def _submit_part(self, part: _Part) -> tuple[Route, UntypedAPIFuture]:
        connection = self._holder.connection
        if part.request.forward_only and connection.prefers_forward_route:
            try:
                return await self._submit_json(part)
            except NotFoundError:
                connection.prefers_forward_route = False
        if part.content_type == JSON_TYPE or not connection.speaks_protobuf:
            return await self._submit_json(part)
        body, headers = part.body.content, None
        if connection.server.proto_compress_fwdbwd:
            body, headers = await asyncio.to_thread(zstd.compress, body), {"content-encoding": "zstd"}
        try:
            promise = await self._holder.promise(
                FORWARD_BACKWARD,
                body,
                content_type=PROTOBUF_TYPE,
                headers=headers,
                policy=connection.policy(part.called),
            )
            connection.has_taken_protobuf = True
            return FORWARD_BACKWARD, promise
        except APIStatusError as error:
            if error.status_code not in FORMAT_STATUSES or connection.has_taken_protobuf:
                raise
            try:
                submitted_as_json = await self._submit_json(part)
            except APIStatusError:
                raise error from None
            connection.speaks_protobuf = False
            logger.info("this server does not accept protobuf; sending JSON from now on")
            return submitted_as_json

    async def _submit_json(self, part: _Part) -> tuple[Route, UntypedAPIFuture]:
        route = FORWARD if part.request.forward_only else FORWARD_BACKWARD
        body = part.body.content
        if part.content_type != JSON_TYPE:
            body = _numbered(_json_body(part.request), part.number + 1)
        return route, await self._holder.promise(route, body, policy=self._holder.connection.policy(part.called))

    async def _fill_gaps(self, before: int, called: float) -> None:
        """Fill the gaps below `before`: numbers that were not used, or whose operations failed without reaching the
        server, which would wait for them forever. Each is filled with a forward pass that changes nothing; a server
        that did receive the original request recognises the number and returns that one's promise."""
        nothing = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        while (number := min(self._gaps, default=before)) < before:
            for part in self._prepare([nothing], SURROGATE, None, forward_only=True, first=number):
                try:
                    await self._submit_part(replace(part, called=called))
                except APIStatusError as error:
                    if not _is_refusal(error):
                        raise
            self._gaps.remove(number)

    def _give_up(self, numbers: Iterable[int]) -> None:
        """Mark numbers as not sent: later ones may proceed, and the gaps are filled before the next operation."""
        for number in numbers:
            if number not in self._gaps:
                self._gaps.append(number)
            self._turns.done(number)

    async def _close_numbers(self, like: list[_Part], numbers: Iterable[int]) -> None:
        """Fill numbers that will not be used, at once: the server would wait for them forever."""
        smallest = min((datum for part in like for datum in part.request.forward_backward_input.data), key=binary_bytes)
        for number in numbers:
            filler = self._prepare([smallest], SURROGATE, None, forward_only=True, first=number)
            await self._run_parts("forward", filler)

    def submit_custom(self, data: list[Datum], loss_fn: custom_loss.LossFn) -> Future[ForwardBackwardOutput]:
        """Run a pass with the caller's own loss, taking the numbers of its forward and its backward pass at once.

        The size of the backward pass is only known once the loss has been computed. Numbers are taken for the largest
        possible one, and it is split by the limits known now, even if the server changes them meanwhile, so that the
        numbers always suffice.
        """
        chunking = self._chunking()
        most = len(chunking.split(custom_loss.largest_backward_data(data)))
        forward = custom_loss.forward_data(data)
        first = self._prepare(forward, SURROGATE, None, forward_only=True, chunking=chunking, spare=most)
        spare = range(first[-1].number + 1, first[-1].number + 1 + most)
        work = self._run_custom(data, loss_fn, first, spare, chunking)
        name = "forward_backward_custom"
        return self._holder.submit(name, work, cancellable=False, limit=self._holder.limit(name, self._model_id))

    async def _run_custom(
        self, data: list[Datum], loss_fn: custom_loss.LossFn, first: list[_Part], spare: range, chunking: _Chunking
    ) -> ForwardBackwardOutput:
        """Run the forward pass, the caller's loss in this process, and the backward pass. The numbers of the backward
        pass are already taken, so that the caller's next operations come after it; if the loss fails, they are
        filled."""
        try:
            forward = await self._run_parts("forward", first)
            custom = await asyncio.to_thread(custom_loss.gradients, loss_fn, data, forward.loss_fn_outputs)
            weighted = custom_loss.backward_data(data, custom.gradients)
            parts = self._prepare(weighted, SURROGATE, None, forward_only=False, first=spare.start, chunking=chunking)
            assert len(parts) <= len(spare), "a number for each request"
        except Exception:
            try:
                await self._close_numbers(first, spare)
            except TinkerError:  # the next operation fills them; the error to raise is the first one
                self._give_up(spare)
            raise
        except BaseException:  # cancelled by its deadline: the next operation fills them
            self._give_up(spare)
            raise
        self._give_up(spare[len(parts) :])
        server = await self._run_parts("forward_backward", parts)
        return custom_loss.result_metrics(server, custom)


def _is_refusal(error: BaseException) -> bool:
    """Whether the server rejected a request, which uses up its number there."""
    return isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code not in (408, 409, 429)


def _check_finite(datum: Datum, index: int) -> None:
    """Raise InvalidInputError for NaN or infinity, which would spoil the whole model."""
    for key, tensor in datum.loss_fn_inputs.items():
        if tensor.dtype == "float32" and key in LIST_DTYPES and not np.isfinite(tensor.array).all():
            place = tuple(int(i) for i in np.argwhere(~np.isfinite(tensor.array))[0])
            where = f"data[{index}].loss_fn_inputs[{key!r}]" + "".join(f"[{i}]" for i in place)
            raise InvalidInputError(f"{where}: must be finite, got {tensor.array[place]}", field=where)


def _json_body(request: ForwardBackwardRequest) -> bytes:
    work, model_id = request.forward_backward_input, request.model_id
    if request.forward_only:
        return json_codec.encode(ForwardRequest(forward_input=work, model_id=model_id))
    return json_codec.encode(ForwardBackwardRequest(forward_backward_input=work, model_id=model_id))


def _numbered(unnumbered: bytes, seq_id: int) -> bytes:
    return unnumbered[:-1] + b',"seq_id":%d}' % seq_id

"""Training one model: forward and backward passes, optimizer steps, saving and loading, in the caller's order.

Owns: numbering in the caller's thread, splitting, encoding, and joining results. Does not know: sessions' lives, HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from tinsmith.client.connection import JSON_TYPE, PROTOBUF_TYPE
from tinsmith.client.futures import Future, awaited, blocking, submitted
from tinsmith.client.loss_graph import LossHandle
from tinsmith.client.operations import Operations
from tinsmith.client.retry_config import RetryConfig
from tinsmith.client.sampling import SamplingClient
from tinsmith.client.sequence import Sequence, Turns
from tinsmith.client.tokenizing import tokenizer_of
from tinsmith.errors import (
    APIStatusError,
    InvalidInputError,
    MissingArgumentError,
    NotFoundError,
    TinkerError,
)
from tinsmith.transport.base import Purpose
from tinsmith.wire import json_codec, proto_training, zstd
from tinsmith.wire.chunking import ChunkLimits, binary_bytes, json_bytes, split
from tinsmith.wire.combining import combine
from tinsmith.wire.futures import UntypedAPIFuture
from tinsmith.wire.inputs import LIST_DTYPES, Datum, ModelInput
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.protobuf import Message as ProtobufMessage
from tinsmith.wire.routes import (
    FORWARD,
    FORWARD_BACKWARD,
    GET_INFO,
    LOAD_WEIGHTS,
    OPTIM_STEP,
    SAVE_WEIGHTS,
    SAVE_WEIGHTS_EXTERNAL,
    SAVE_WEIGHTS_FOR_SAMPLER,
    Route,
)
from tinsmith.wire.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LossFnType,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
)
from tinsmith.wire.weights import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
    with_console,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

CustomLossFn = Callable[[list[Datum], "list[torch.Tensor]"], "tuple[torch.Tensor, Mapping[str, Any]]"]
FORMAT_STATUSES = frozenset({400, 415, 422})
"""How servers that read JSON only refuse a binary body."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One request of a call: its number, its body, and the request itself, should it have to be encoded otherwise."""

    number: int
    request: ForwardBackwardRequest
    body: bytes
    content_type: str
    called: float


class TrainingClient:
    """Trains one model. Made by `ServiceClient.create_lora_training_client` and its siblings."""

    def __init__(self, holder: Operations, model_seq_id: int, model_id: str, *, _first_number: int = 0) -> None:
        self.holder = holder
        self.model_seq_id = model_seq_id
        self.model_id = model_id
        self._numbers = Sequence(_first_number)
        self._turns = Turns(_first_number)
        self._gaps: list[int] = []

    def forward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and its outputs without gradients; leaves no trace in the model."""
        return self._pass("forward", data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submitted(forward)

    def forward_backward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and add its gradients to those that the next `optim_step` applies."""
        return self._pass("forward_backward", data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLossFn | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Train with a loss of your own: a callable over logprobs (its gradients are taken here, with torch), or an
        uploaded loss from `ServiceClient.create_custom_loss`."""
        if loss_type_input not in (None, "logprobs"):
            raise InvalidInputError(f"loss_type_input: only 'logprobs' is known, got {loss_type_input!r}")
        from tinsmith.client import custom_loss

        if isinstance(loss_fn, LossHandle):
            custom_loss.check_inputs(loss_fn, data)
            if loss_fn.loss_id is not None:
                return self._pass("forward_backward", data, "custom", {"loss_id": loss_fn.loss_id}, forward_only=False)
            loss_fn = custom_loss.loss_of_handle(loss_fn)  # the server does not run losses: its graph runs here
        first = self._prepare(custom_loss.forward_data(data), "cross_entropy", None, forward_only=True)
        spare = self._numbers.take(len(first))
        return self.holder.submit(
            "forward_backward_custom", self._run_custom(data, loss_fn, first, spare), cancellable=False
        )

    forward_backward_custom_async = submitted(forward_backward_custom)

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Apply the gathered gradients and clear them."""
        params = optim_params if optim_params is not None else adam_params
        if params is None:
            raise MissingArgumentError("optim_step needs its parameters, for example AdamParams(learning_rate=1e-4)")
        return self._ordered(
            "optim_step",
            OPTIM_STEP,
            OptimStepRequest(model_id=self.model_id, optim_params=params),
        )

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to go on from later."""
        return self._ordered(
            "save_state",
            SAVE_WEIGHTS,
            SaveWeightsRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                overwrite=overwrite,
                user_metadata=_given(user_metadata),
            ),
            lambda answer: with_console(answer, self.holder.console),
        )

    save_state_async = submitted(save_state)

    def load_state(self, path: str, weights_access_token: str | None = None) -> Future[LoadWeightsResponse]:
        """Load weights only. Prefer `ServiceClient.create_training_client_from_state`."""
        return self._load(path, weights_access_token, optimizer=False)

    load_state_async = submitted(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Load weights and optimizer state."""
        return self._load(path, weights_access_token, optimizer=True)

    load_state_with_optimizer_async = submitted(load_state_with_optimizer)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save a copy of the weights to sample from."""
        return self._ordered(
            "save_weights_for_sampler",
            SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                user_metadata=_given(user_metadata),
            ),
            lambda answer: with_console(SaveWeightsForSamplerResponse(path=answer.path), self.holder.console),
        )

    save_weights_for_sampler_async = submitted(save_weights_for_sampler)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> Future[SaveWeightsExternalResponse]:
        """Export the weights as files to download, encrypted for the recipients if any are given."""
        return self._ordered(
            "save_weights_external",
            SAVE_WEIGHTS_EXTERNAL,
            SaveWeightsExternalRequest(
                model_id=self.model_id,
                path=name,
                ttl_seconds=_given(ttl_seconds),
                age_encryption_recipients=_given(age_encryption_recipients),
            ),
            lambda answer: SaveWeightsExternalResponse(path=answer.path),
        )

    save_weights_external_async = submitted(save_weights_external)

    def _create_sampler(
        self, name: str | None = None, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """Freeze the current weights and return a client that samples from them."""
        if name is not None:
            logger.warning(
                "save_weights_and_get_sampling_client ignores its name; use save_weights_for_sampler to keep one"
            )
        sampler_number = self.holder.session.samplers.take()
        saved = self._ordered(
            "save_weights_for_sampler",
            SAVE_WEIGHTS_FOR_SAMPLER,
            SaveWeightsForSamplerRequest(model_id=self.model_id, sampling_session_seq_id=sampler_number),
        )
        return self.holder.submit(
            "create_sampling_client", self._sampler_of(saved, retry_config, record_stability_info)
        )

    save_weights_and_get_sampling_client = blocking(_create_sampler)
    save_weights_and_get_sampling_client_async = awaited(_create_sampler)

    def _create_sampling_client(
        self, model_path: str, retry_config: RetryConfig | None = None, record_stability_info: bool = False
    ) -> Future[SamplingClient]:
        """A client that samples from saved weights."""
        return SamplingClient.create(
            self.holder, model_path=model_path, retry_config=retry_config, record_stability_info=record_stability_info
        )

    create_sampling_client = blocking(_create_sampling_client)
    create_sampling_client_async = awaited(_create_sampling_client)

    def _get_info(self) -> Future[GetInfoResponse]:
        """What the server knows about this model."""
        call = self.holder.connection.call(GET_INFO, GetInfoRequest(model_id=self.model_id), purpose=Purpose.TRAIN)
        return self.holder.submit("get_info", call)

    get_info = blocking(_get_info)
    get_info_async = awaited(_get_info)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: from the server where it serves one, else from a directory or the hub."""
        info = self.get_info()
        return tokenizer_of(self.holder, info.model_data.model_name or info.model_name, info.model_data.tokenizer_id)

    def get_console_url(self) -> str:
        """Where this run can be looked at."""
        return f"{self.holder.console}/training_runs/{self.model_id}"

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def _load(self, path: str, token: str | None, *, optimizer: bool) -> Future[LoadWeightsResponse]:
        return self._ordered(
            "load_state",
            LOAD_WEIGHTS,
            LoadWeightsRequest(
                model_id=self.model_id,
                path=path,
                optimizer=optimizer,
                weights_access_token=_given(token),
            ),
        )

    def _ordered(
        self, name: str, route: Route, request: Any, finish: Callable[[Any], Any] = lambda answer: answer
    ) -> Future[Any]:
        """Encode a request, number it here, in the caller's thread, and send it when its turn comes."""
        unnumbered = json_codec.encode(request)
        number = self._numbers.take()
        body = _numbered(unnumbered, number + 1)
        work = self._run_one(name, route, number, body, finish, time.monotonic())
        return self.holder.submit(name, work, cancellable=False)

    async def _run_one(
        self, name: str, route: Route, number: int, body: bytes, finish: Callable[[Any], Any], called: float
    ) -> Any:
        await self._turns.reach(number)
        started = time.monotonic()
        try:
            await self._fill_gaps(called)
            promise = await self.holder.promise(route, body, policy=self.holder.connection.policy(called))
        except BaseException as error:
            if not _is_refusal(error):
                self._gaps.append(number)
            raise
        finally:
            self._turns.done(number)
        what = f"{name} of {self.model_id}"
        return finish(await self.holder.result(route, promise, what=what, submit_s=time.monotonic() - started))

    async def _sampler_of(
        self, saved: Future[Any], retry_config: RetryConfig | None, record_stability_info: bool
    ) -> SamplingClient:
        answer = await saved
        if answer.sampling_session_id is None:
            return await SamplingClient.create(self.holder, model_path=answer.path, retry_config=retry_config)
        return SamplingClient(
            self.holder,
            sampling_session_id=answer.sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def _pass(
        self,
        name: str,
        data: list[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        parts = self._prepare(data, loss_fn, config, forward_only=forward_only)
        return self.holder.submit(name, self._run_parts(name, parts), cancellable=False)

    def _prepare(
        self,
        data: SequenceOf[Datum],
        loss_fn: LossFnType,
        config: Mapping[str, float | str] | None,
        *,
        forward_only: bool,
        first: int | None = None,
    ) -> list[_Part]:
        """Split, encode and number a call, all in the caller's thread; bad data takes no number."""
        for i, datum in enumerate(data):
            if not isinstance(datum, Datum):
                raise InvalidInputError(f"data[{i}]: expected a Datum, got {type(datum).__name__}", field=f"data[{i}]")
            _check_finite(datum, i)
        connection = self.holder.connection
        content_type = PROTOBUF_TYPE if connection.speaks_protobuf else JSON_TYPE
        size_of = binary_bytes if connection.speaks_protobuf else json_bytes
        requests = [
            ForwardBackwardRequest(
                forward_backward_input=ForwardBackwardInput(
                    data=chunk, loss_fn=loss_fn, loss_fn_config=dict(config) if config is not None else NOT_GIVEN
                ),
                model_id=self.model_id,
                forward_only=True if forward_only else NOT_GIVEN,
            )
            for chunk in split(data, ChunkLimits.of(connection.server), size_of)
        ]
        encode = proto_training.request_message if connection.speaks_protobuf else _json_body
        bodies = [encode(request) for request in requests]
        number = self._numbers.take(len(requests)) if first is None else first
        return [
            _Part(number + i, request, _numbered(body, number + i + 1), content_type, time.monotonic())
            for i, (request, body) in enumerate(zip(requests, bodies, strict=True))
        ]

    async def _run_parts(self, name: str, parts: list[_Part]) -> ForwardBackwardOutput:
        await self._turns.reach(parts[0].number)
        try:
            await self._fill_gaps(parts[0].called)
        except BaseException:
            self._give_up(part.number for part in parts)
            raise
        what = f"{name} of {self.model_id}"
        polls: list[Any]
        if self.holder.connection.server.parallel_fwdbwd_chunks:
            # The first goes last: by then the server holds the rest, and works on in one go.
            polls = await asyncio.gather(*(self._submit(part, what) for part in parts[1:]), return_exceptions=True)
            polls += await asyncio.gather(self._submit(parts[0], what), return_exceptions=True)
            polls = [polls[-1], *polls[:-1]]
        else:
            polls = [(await asyncio.gather(self._submit(part, what), return_exceptions=True))[0] for part in parts]
        tasks = [poll for poll in polls if isinstance(poll, asyncio.Task)]
        try:
            for poll in polls:
                if isinstance(poll, BaseException):
                    raise poll
            return combine(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _submit(self, part: _Part, what: str) -> asyncio.Task[Any]:
        """Submit one part; its result is polled on its own."""
        started = time.monotonic()
        try:
            async with self.holder.connection.limits.train_bytes.hold(len(part.body)):
                route, promise = await self._submit_part(part)
        except BaseException as error:
            if not _is_refusal(error):
                self._gaps.append(part.number)
            raise
        finally:
            self._turns.done(part.number)
        polled = self.holder.result(
            FORWARD if part.request.forward_only else route, promise, what=what, submit_s=time.monotonic() - started
        )
        return self.holder.connection.runner.spawn(polled)

    async def _submit_part(self, part: _Part) -> tuple[Route, UntypedAPIFuture]:
        connection = self.holder.connection
        if part.request.forward_only and connection.prefers_forward_route:
            try:
                return await self._submit_json(part)
            except NotFoundError:
                connection.prefers_forward_route = False
        if part.content_type == JSON_TYPE or not connection.speaks_protobuf:
            return await self._submit_json(part)
        body, headers = part.body, None
        if connection.server.proto_compress_fwdbwd:
            body, headers = await asyncio.to_thread(zstd.compress, part.body), {"content-encoding": "zstd"}
        try:
            promise = await self.holder.promise(
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
            logger.info("this server takes no protobuf; sending JSON from now on")
            return submitted_as_json

    async def _submit_json(self, part: _Part) -> tuple[Route, UntypedAPIFuture]:
        route = FORWARD if part.request.forward_only else FORWARD_BACKWARD
        body = part.body
        if part.content_type != JSON_TYPE:
            body = _numbered(_json_body(part.request), part.number + 1)
        return route, await self.holder.promise(route, body, policy=self.holder.connection.policy(part.called))

    async def _run_custom(
        self, data: list[Datum], loss_fn: CustomLossFn, first: list[_Part], spare: int
    ) -> ForwardBackwardOutput:
        """Forward, the caller's loss here, backward. The numbers of the backward are taken already, so that what the
        caller does next comes after it; if the loss fails they are closed by forward passes that change nothing."""
        from tinsmith.client import custom_loss

        try:
            forward = await self._run_parts("forward", first)
            custom = await asyncio.to_thread(custom_loss.gradients, loss_fn, data, forward.loss_fn_outputs)
            weighted = custom_loss.backward_data(data, custom.gradients)
            parts = self._prepare(weighted, "cross_entropy", None, forward_only=False, first=spare)
        except BaseException:
            try:
                await self._close_numbers(first, spare)
            except TinkerError:  # it is written down which ones are open; the error that matters is the first
                self._give_up(range(spare, spare + len(first)))
            raise
        for number in range(spare + len(parts), spare + len(first)):
            self._turns.done(number)
        server = await self._run_parts("forward_backward", parts)
        return custom_loss.result_metrics(server, custom)

    async def _fill_gaps(self, called: float) -> None:
        """Spend the numbers of operations that never reached the server and were reported as failed: the server would
        wait for them for ever. A pass that changes nothing takes each place; a server that did get the original
        answers for that one."""
        nothing = Datum(ModelInput.from_ints([0]), {"target_tokens": [0], "weights": [0.0]})
        while self._gaps:
            number = self._gaps[0]
            for part in self._prepare([nothing], "cross_entropy", None, forward_only=True, first=number):
                try:
                    await self._submit_part(replace(part, called=called))
                except APIStatusError as error:
                    if not _is_refusal(error):
                        raise
            self._gaps.remove(number)

    def _give_up(self, numbers: Iterable[int]) -> None:
        """Numbers that were not sent: the order goes on, and they are spent before the next operation."""
        for number in numbers:
            if number not in self._gaps:
                self._gaps.append(number)
            self._turns.done(number)

    async def _close_numbers(self, like: list[_Part], first: int) -> None:
        """Spend numbers that will not be used: a server that runs in order would wait for them for ever."""
        smallest = min((datum for part in like for datum in part.request.forward_backward_input.data), key=binary_bytes)
        for number in range(first, first + len(like)):
            filler = self._prepare([smallest], "cross_entropy", None, forward_only=True, first=number)
            await self._run_parts("forward", filler)


def _is_refusal(error: BaseException) -> bool:
    """Whether the server looked at a request and said no, which closes its number there."""
    return isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code not in (408, 409, 429)


def _check_finite(datum: Datum, index: int) -> None:
    """A weight that is not a number would spoil the whole model."""
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


def _numbered(unnumbered: bytes | ProtobufMessage, seq_id: int) -> bytes:
    """The body of a request, JSON or protobuf, with its number, which is known only after the rest has proved right."""
    if isinstance(unnumbered, bytes):
        return unnumbered[:-1] + b',"seq_id":%d}' % seq_id
    proto_training.add_seq_id(unnumbered, seq_id)
    return unnumbered.encode()


def _given(value: T | None) -> Any:
    """None as an argument means not given, as in the official client."""
    return NOT_GIVEN if value is None else value

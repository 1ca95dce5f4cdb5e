"""Sampling from a base model or from saved weights.

A `SamplingClient` numbers its samples, submits them within the limits of the server, retries them, and can be pickled
(without its key) so that other processes sample from the same sampler.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinsmith.client.connection.connection import Connection
from tinsmith.client.connection.local_engine import client_config
from tinsmith.client.connection.official_options import RetryConfig
from tinsmith.client.connection.operations import Operations, cancel_sample
from tinsmith.client.connection.outage import Affected, ProgressWatch
from tinsmith.client.connection.polling import wait_for_result
from tinsmith.client.connection.session import Session
from tinsmith.client.find_tokenizer import tokenizer_of
from tinsmith.client.runtime.deadlines import Limit, left_s
from tinsmith.client.runtime.futures import Future, awaited, blocking
from tinsmith.client.runtime.sequence import Numbers
from tinsmith.client.submit.poll_together import PollOutcome, SamplingSessionPoller
from tinsmith.client.submit.samples_together import SampleSubmits
from tinsmith.client.submit.stream import SampledTokens, stream_sample
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    BillingError,
    InvalidInputError,
    NotFoundError,
    RateLimitError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.base import Purpose
from tinsmith.transport.retry import NO_RETRY, Retries, RetryPolicy, RetryWait, retrying
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.sampling import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tinsmith.wire.messages.weights import PATH_PREFIX
from tinsmith.wire.routes.table import (
    ASAMPLE,
    CREATE_SAMPLING_SESSION,
    GET_SAMPLER,
    JOIN_SAMPLING_SESSION,
)
from tinsmith.wire.rules.sample_rules import check_options
from tinsmith.wire.values.chunks import EncodedTextChunk
from tinsmith.wire.values.inputs import ModelInput
from tinsmith.wire.values.tensors import TensorData

logger = logging.getLogger(__name__)

CLONE_BLOCK = 10**9
"""Each clone numbers its requests in its own block."""
SMALL_PROMPT_BYTES = 128 * 1024
PROMPT_BYTES_PER_TOKEN = 10
PORTABLE_RETRY = (
    "max_connections",
    "progress_timeout",
    "retry_delay_base",
    "retry_delay_max",
    "jitter_factor",
    "enable_retry_logic",
    "enable_stuck_detection",
)
"""The retry settings that a pickled sampler keeps; exception classes are left out."""


class SamplerState(msgspec.Struct, frozen=True):
    """What another process needs to sample from the same sampler. It contains no credential."""

    base_url: str
    session_id: str | None
    sampling_session_id: str
    record_stability_info: bool
    retry: dict[str, Any]


class SamplingClient:
    """Samples from frozen weights. Safe to use from many threads and tasks; can be pickled for other processes."""

    def __init__(
        self,
        holder: Operations,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self.holder = holder
        self.sampling_session_id = sampling_session_id
        self._retry = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._is_clone = shadow
        self._numbers: Numbers | None = None if shadow else Numbers()
        self._clone = 0
        self._poller: SamplingSessionPoller | None = None
        self._submits = SampleSubmits(holder)
        self._joining: asyncio.Lock | None = None
        self._progress = ProgressWatch(self._retry.progress_timeout, holder.connection.runner)
        self._base_model: str | None = None

    @staticmethod
    def create(
        holder: Operations,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Future[SamplingClient]:
        """Create a sampler of saved weights (a `tinker://` path) or of a base model.

        With both, the weights are sampled and `base_model` must be theirs. Only the path is sent then: servers may
        refuse a request that has both.
        """
        if model_path is None and base_model is None and sampling_session_id is None:
            raise InvalidInputError("create_sampling_client needs model_path or base_model", field="model_path")
        if model_path is not None and not model_path.startswith(PATH_PREFIX):
            raise InvalidInputError(f"model_path: {model_path!r} must begin with {PATH_PREFIX}", field="model_path")
        number = holder.session.samplers.take()

        async def run() -> SamplingClient:
            session_id = sampling_session_id
            if session_id is None:
                if model_path is not None and base_model is not None:
                    await _check_base_model(holder, model_path, base_model)
                request = CreateSamplingSessionRequest(
                    session_id=await holder.session.id(),
                    sampling_session_seq_id=number,
                    base_model=NOT_GIVEN if base_model is None or model_path is not None else base_model,
                    model_path=NOT_GIVEN if model_path is None else model_path,
                )
                answer = await holder.connection.call(CREATE_SAMPLING_SESSION, request, purpose=Purpose.SESSION)
                session_id = answer.sampling_session_id
            return SamplingClient(
                holder,
                sampling_session_id=session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return holder.submit("create_sampling_client", run())

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Future[SampleResponse]:
        """Draw `num_samples` continuations of a prompt."""
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )
        return self.holder.submit("sample", self._sample(request), limit=self._limit("sample"))

    sample_async = awaited(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Future[list[float | None]]:
        """Return the logprob of each prompt token given those before it; None for the first."""
        request = self._request(prompt, 1, SamplingParams(max_tokens=1), True, 0, 0, None, 0, prompt_logprobs_last_n)
        return self.holder.submit(
            "compute_logprobs", self._prompt_logprobs(request), limit=self._limit("compute_logprobs")
        )

    compute_logprobs_async = awaited(compute_logprobs)

    def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        topk_sample_logprobs: int = 0,
    ) -> AsyncIterator[SampledTokens]:
        """Yield tokens as they are drawn, for `async for`. Raises TinkerError if the server does not stream."""
        request = self._request(prompt, num_samples, sampling_params, False, 0, topk_sample_logprobs, None, 0, None)
        return stream_sample(self.holder, request, self._take_number, self._limit("sample_stream"))

    def _get_base_model(self) -> Future[str]:
        """Return the name of the base model that this sampler uses."""

        async def run() -> str:
            if self._base_model is None:
                answer = await self.holder.connection.call(GET_SAMPLER, path={"sampler_id": self.sampling_session_id})
                self._base_model = answer.base_model
            return self._base_model or ""

        return self.holder.submit("get_sampler", run())

    get_base_model = blocking(_get_base_model)
    get_base_model_async = awaited(_get_base_model)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer: the server's if it has one, else from a directory or the Hugging Face hub."""
        return tokenizer_of(self.holder, self.get_base_model(), None)

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def get_sampler_handle(self) -> str:
        """Return a string from which other processes create a client of the same sampler. It contains no credential."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self._state())).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Create a client from a sampler handle, with this process's credentials or the given key."""
        try:
            state = msgspec.json.decode(base64.urlsafe_b64decode(handle), type=SamplerState)
        except (ValueError, TypeError, AttributeError, binascii.Error, msgspec.MsgspecError):
            raise InvalidInputError(
                "handle: not a valid sampler handle; pass what get_sampler_handle() returned", field="handle"
            ) from None
        return _rebuild(state, api_key)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._state(),)

    def _limit(self, name: str) -> Limit | None:
        return self.holder.limit(name, self.sampling_session_id)

    def _state(self) -> SamplerState:
        retry = {name: getattr(self._retry, name) for name in PORTABLE_RETRY}
        return SamplerState(
            base_url=self.holder.connection.config.base_url,
            session_id=self.holder.session.known_id,
            sampling_session_id=self.sampling_session_id,
            record_stability_info=self._record_stability_info,
            retry=retry,
        )

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: Any,
        include_prompt_logprobs: bool,
        topk_prompt: int,
        topk_sample: int,
        target: TensorData | None,
        alternatives: int,
        last_n: int | None,
    ) -> SampleRequest:
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InvalidInputError(f"sampling_params: expected SamplingParams, got {kind}", field="sampling_params")
        request = SampleRequest(
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=params,
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt,
            topk_sample_logprobs=topk_sample,
            target_prompt_logprobs=NOT_GIVEN if target is None else target,
            prompt_alt_tokens_k=alternatives,
            prompt_logprobs_last_n=NOT_GIVEN if last_n is None else last_n,
            record_stability_info=self._record_stability_info,
        )
        check_options(request)
        return request

    async def _prompt_logprobs(self, request: SampleRequest) -> list[float | None]:
        response = await self._sample(request)
        if response.prompt_logprobs is None:
            raise TinkerError("the server returned no prompt logprobs, although the request asked for them")
        return response.prompt_logprobs

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        """Sample, with retries: after a lost promise or connection the sample is submitted again under a new number."""
        is_watched = self._retry.enable_stuck_detection and self.holder.connection.server.sample_enable_stuck_detection
        if is_watched:
            self._progress.enter()
        try:
            return await self._sample_until_done(request)
        except asyncio.CancelledError:
            if is_watched and self._progress.gave_up():
                silent = self._retry.progress_timeout
                text = (
                    f"no sample of {self.sampling_session_id} has made progress for {silent:.0f} s (progress_timeout)"
                )
                raise APIConnectionError(None, text) from None
            raise
        finally:
            if is_watched:
                self._progress.leave()

    async def _sample_until_done(self, request: SampleRequest) -> SampleResponse:
        trouble = Affected(self.holder.outage)

        def log(wait: RetryWait) -> None:
            if trouble.begin():
                logger.warning("sampling failed (%s); trying again", wait.error)

        try:
            return await retrying(lambda _: self._sample_once(request, trouble), self._policy, on_wait=log)
        finally:
            trouble.over()

    def _policy(self) -> RetryPolicy:
        """Return the retry policy that the caller's RetryConfig and the server's flags amount to now.

        A lost promise is submitted again however old the sample is: the server has answered, it only forgot.
        """
        retry, connection = self._retry, self.holder.connection
        if not retry.enable_retry_logic or connection.server.sample_no_retries:
            return NO_RETRY
        return RetryPolicy(
            deadline_s=connection.config.retry_deadline_s,
            first_delay_s=retry.retry_delay_base,
            max_delay_s=retry.retry_delay_max,
            jitter=(1 - retry.jitter_factor, 1 + retry.jitter_factor),
            retry_on=(*retry.retryable_exceptions, APIStatusError),
            no_deadline_for=(RetryableException,),
            caller_left_s=left_s,
        )

    async def _sample_once(self, request: SampleRequest, trouble: Affected) -> SampleResponse:
        holder, connection = self.holder, self.holder.connection
        await connection.ready()
        number = self._numbers.take() if self._numbers is not None else await self._take_number()
        body = json_codec.encode(request)[:-1] + b',"seq_id":%d}' % number
        size = _prompt_bytes(request.prompt)
        started = time.monotonic()
        promise = await self._submit(body, size)
        trouble.over()
        holder.pending_samples.add(promise.request_id)
        try:
            what = f"sample of {self.sampling_session_id}"
            observer = holder.queue_observer(what) if holder.queue_observer is not None else None
            submitted = time.monotonic()
            outcome = await self._wait_with_others(promise.request_id)
            response: SampleResponse = await wait_for_result(
                connection,
                ASAMPLE,
                promise.request_id,
                what=what,
                outage=holder.outage,
                observer=observer,
                metadata_first=not outcome.is_done,
                submit_s=submitted - started,
                answer=outcome.answer,
            )
            if self._poller is not None and outcome.answer is None:
                self._poller.fetched(promise.request_id)
        except asyncio.CancelledError:
            if connection.dynamic.sample_cancel_enabled and not connection.runner.is_closed:
                connection.runner.spawn(cancel_sample(connection, promise.request_id))
            raise
        finally:
            holder.pending_samples.discard(promise.request_id)
        self._progress.made()
        _check_response(request, response)
        return _with_ids(response, promise.sample_sequence_ids)

    async def _wait_with_others(self, request_id: str) -> PollOutcome:
        """Wait for a sample through the poll shared by all samples of this sampler, if the server has one."""
        connection = self.holder.connection
        if not connection.server.sample_use_retrieve_futures:
            return PollOutcome(False)
        if self._poller is None:
            self._poller = SamplingSessionPoller(connection, self.sampling_session_id, self._clone, self.holder.outage)
        return await self._poller.wait(request_id)

    async def _submit(self, body: bytes, size: int) -> Any:
        """Submit a sample. After a 429 or 402 all samplers of this server and key pause, then the same number is sent
        again."""
        limits = self.holder.connection.limits
        retries = Retries()
        while True:
            await limits.wait_for_pause()
            if not limits.sample_count.acquire_now(1):
                await limits.sample_count.acquire(1)
            try:
                if not limits.sample_bytes.acquire_now(size):
                    await limits.sample_bytes.acquire(size)
                try:
                    return await self._submits.promise(body)
                finally:
                    limits.sample_bytes.release(size)
            except (RateLimitError, BillingError) as error:
                wait = retries.after(error, self._pause_policy(size))
                if wait is None:
                    raise
                if limits.pause(wait.delay_s):
                    logger.warning("%s; all sampling on this server pauses for %.1f s at a time", error, wait.delay_s)
            finally:
                limits.sample_count.release(1)

    def _pause_policy(self, size: int) -> RetryPolicy:
        """Return how long samplers pause when the server has too much to do: a full server is waited for without a
        deadline, an account without credit for as long as the server's configuration says. A server that names a later
        time is waited for in neither case."""
        pause_s = 1.0 if size <= SMALL_PROMPT_BYTES else 5.0
        return RetryPolicy(
            deadline_s=self.holder.connection.server.billing_exception_max_pause_duration_sec,
            no_deadline_for=(RateLimitError,),
            first_delay_s=pause_s,
            max_delay_s=pause_s,
            billing_delay_s=pause_s,
            jitter=(1.0, 1.0),
            caller_left_s=left_s,
        )

    async def _take_number(self) -> int:
        if self._numbers is None:
            if self._joining is None:
                self._joining = asyncio.Lock()
            async with self._joining:
                if self._numbers is None:
                    if self.holder.session.known_id is not None:
                        await self.holder.session.id()  # a clone sends heartbeats for the session, too
                    self._clone = await self._clone_number()
                    self._numbers = Numbers(self._clone * CLONE_BLOCK)
        return self._numbers.take()

    async def _clone_number(self) -> int:
        connection = self.holder.connection
        if connection.server.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
            answer = await connection.call(JOIN_SAMPLING_SESSION, request, purpose=Purpose.SESSION)
            return int(answer.client_counter)
        return int.from_bytes(os.urandom(8), "big") % (CLONE_BLOCK - 1) + 1


async def _check_base_model(holder: Operations, model_path: str, base_model: str) -> None:
    """Raise InvalidInputError if a checkpoint does not belong to the base model that the caller named."""
    try:
        actual = (await holder.weights_info(model_path)).base_model
    except NotFoundError:
        return  # no such checkpoint, which creating the sampler reports, or a server from before weights_info
    if actual != base_model:
        raise InvalidInputError(
            f"base_model: {base_model!r} is not the base model of {model_path}, which is {actual!r}; "
            "leave base_model out to sample the checkpoint",
            field="base_model",
        )


def _prompt_bytes(prompt: ModelInput) -> int:
    return sum(
        chunk.length * PROMPT_BYTES_PER_TOKEN if isinstance(chunk, EncodedTextChunk) else chunk.estimated_bytes
        for chunk in prompt.chunks
    )


def _check_response(request: SampleRequest, response: SampleResponse) -> None:
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise TinkerError("the server returned no alternative prompt tokens, although the request asked for them")


def _with_ids(response: SampleResponse, ids: list[str] | None) -> SampleResponse:
    """Return the response with the sequence ids from the submit response; servers before 0.26 send none."""
    if not ids:
        return response
    if len(ids) != len(response.sequences):
        raise TinkerError(f"the server promised {len(ids)} samples and returned {len(response.sequences)}")
    sequences = [
        SampledSequence(s.stop_reason, name, s.tokens_np, s.logprobs_np, s.topk_logprobs_np)
        for s, name in zip(response.sequences, ids, strict=True)
    ]
    return response.replace(sequences=sequences)


def _rebuild(state: SamplerState, api_key: str | None = None) -> SamplingClient:
    """Recreate a client in another process: own connection and credentials, same sampler."""
    connection = Connection(client_config(base_url=state.base_url, api_key=api_key), is_joining=True)
    holder = Operations(connection, Session(connection, joined_id=state.session_id))
    return SamplingClient(
        holder,
        sampling_session_id=state.sampling_session_id,
        shadow=True,
        retry_config=RetryConfig(**state.retry),
        record_stability_info=state.record_stability_info,
    )

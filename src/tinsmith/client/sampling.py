"""Sampling from a model or from saved weights.

Owns: a sampler's numbers, its retries, its pickled form (which holds no key). Does not know: sessions' lives, HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from tinsmith.client.connection import Connection
from tinsmith.client.deadlines import Limit
from tinsmith.client.embedded import client_config
from tinsmith.client.futures import Future, awaited, blocking
from tinsmith.client.operations import Operations, cancel_sample
from tinsmith.client.outage import Affected
from tinsmith.client.polling import wait_for_result
from tinsmith.client.progress import ProgressWatch
from tinsmith.client.retry_config import RetryConfig
from tinsmith.client.sample_batches import SampleSubmits
from tinsmith.client.sample_results import SamplingSessionPoller, Told
from tinsmith.client.sequence import Sequence
from tinsmith.client.session import Session
from tinsmith.client.streaming import SampledTokens, stream_sample
from tinsmith.client.tokenizing import tokenizer_of
from tinsmith.errors import (
    APIConnectionError,
    APIStatusError,
    BillingError,
    InvalidInputError,
    RateLimitError,
    RetryableException,
    TinkerError,
)
from tinsmith.transport.base import Purpose
from tinsmith.transport.retry import next_delay_s
from tinsmith.wire import json_codec
from tinsmith.wire.chunks import EncodedTextChunk
from tinsmith.wire.inputs import ModelInput
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.routes import (
    ASAMPLE,
    CREATE_SAMPLING_SESSION,
    GET_SAMPLER,
    JOIN_SAMPLING_SESSION,
)
from tinsmith.wire.sampling import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.weights import PATH_PREFIX

logger = logging.getLogger(__name__)

CLONE_BLOCK = 10**9
"""A clone numbers its requests in a block of its own."""
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
"""The retry settings that go along with a sampler; exception classes stay behind."""


class SamplerState(msgspec.Struct, frozen=True):
    """What another process needs to sample from the same sampler; no credential."""

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
        self._numbers: Sequence | None = None if shadow else Sequence()
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
        """A sampler of saved weights (`tinker://` path) or of a base model."""
        if model_path is None and base_model is None and sampling_session_id is None:
            raise InvalidInputError("a sampling client needs model_path or base_model")
        if model_path is not None and not model_path.startswith(PATH_PREFIX):
            raise InvalidInputError(f"model_path: {model_path!r} must begin with {PATH_PREFIX}", field="model_path")
        number = holder.session.samplers.take()

        async def run() -> SamplingClient:
            session_id = sampling_session_id
            if session_id is None:
                request = CreateSamplingSessionRequest(
                    session_id=await holder.session.id(),
                    sampling_session_seq_id=number,
                    base_model=NOT_GIVEN if base_model is None else base_model,
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
        """The logprob of each prompt token given those before it; None for the first."""
        request = self._request(prompt, 1, SamplingParams(max_tokens=1), True, 0, 0, None, 0, prompt_logprobs_last_n)
        return self.holder.submit(
            "compute_logprobs", self._prompt_logprobs(request), limit=self._limit("compute_logprobs")
        )

    compute_logprobs_async = awaited(compute_logprobs)

    def sample_stream(
        self, prompt: ModelInput, sampling_params: SamplingParams, num_samples: int = 1
    ) -> AsyncIterator[SampledTokens]:
        """Tokens as they are drawn; to be iterated with `async for`. Servers without streaming refuse it at once."""
        request = self._request(prompt, num_samples, sampling_params, False, 0, 0, None, 0, None)
        return stream_sample(self.holder, request, self._take_number, self._limit("sample_stream"))

    def _get_base_model(self) -> Future[str]:
        """The name of the base model behind this sampler."""

        async def run() -> str:
            if self._base_model is None:
                answer = await self.holder.connection.call(GET_SAMPLER, path={"sampler_id": self.sampling_session_id})
                self._base_model = answer.base_model
            return self._base_model or ""

        return self.holder.submit("get_sampler", run())

    get_base_model = blocking(_get_base_model)
    get_base_model_async = awaited(_get_base_model)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer: from the server where it serves one, else from a directory or the hub."""
        return tokenizer_of(self.holder, self.get_base_model(), None)

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def get_sampler_handle(self) -> str:
        """A text that other processes turn into a client of the same sampler; it holds no credential."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self._state())).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client for the sampler behind a handle, with this process's credentials or the given key."""
        try:
            state = msgspec.json.decode(base64.urlsafe_b64decode(handle), type=SamplerState)
        except (ValueError, TypeError, AttributeError, binascii.Error, msgspec.MsgspecError):
            raise InvalidInputError("handle: not a sampler handle", field="handle") from None
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
        if last_n is not None and not (include_prompt_logprobs or topk_prompt or target is not None or alternatives):
            raise InvalidInputError("prompt_logprobs_last_n: nothing about the prompt is asked for")
        return SampleRequest(
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

    async def _prompt_logprobs(self, request: SampleRequest) -> list[float | None]:
        response = await self._sample(request)
        if response.prompt_logprobs is None:
            raise TinkerError("the server returned no prompt logprobs although they were asked for")
        return response.prompt_logprobs

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        """Try until it is done: a lost promise or connection means a new submission under a new number."""
        started = time.monotonic()
        is_watched = self._retry.enable_stuck_detection and self.holder.connection.server.sample_enable_stuck_detection
        if is_watched:
            self._progress.enter()
        try:
            return await self._sample_until_done(request, started)
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

    async def _sample_until_done(self, request: SampleRequest, started: float) -> SampleResponse:
        attempt = 0
        trouble = Affected(self.holder.outage)
        try:
            while True:
                try:
                    return await self._sample_once(request, trouble)
                except Exception as error:
                    if not self._goes_on_after(error, time.monotonic() - started):
                        raise
                    attempt += 1
                    if trouble.begin():
                        logger.warning("sampling failed (%s); trying again", error)
                await asyncio.sleep(self._delay(attempt))
        finally:
            trouble.over()

    def _goes_on_after(self, error: Exception, elapsed_s: float) -> bool:
        if not isinstance(error, (*self._retry.retryable_exceptions, APIStatusError)):
            return False
        if not self._may_retry(error) or self.holder.connection.server.sample_no_retries:
            return False
        is_lost = isinstance(error, RetryableException)
        return is_lost or elapsed_s <= self.holder.connection.config.retry_deadline_s

    def _may_retry(self, error: BaseException) -> bool:
        if not self._retry.enable_retry_logic:
            return False
        return bool(getattr(error, "retryable", True))

    def _delay(self, attempt: int) -> float:
        delay = float(min(self._retry.retry_delay_base * 2 ** (attempt - 1), self._retry.retry_delay_max))
        spread = 1 + self._retry.jitter_factor * (2 * random.random() - 1)
        return max(0.05, min(delay * spread, self._retry.retry_delay_max))

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
            told = await self._wait_with_others(promise.request_id)
            response: SampleResponse = await wait_for_result(
                connection,
                ASAMPLE,
                promise.request_id,
                what=what,
                outage=holder.outage,
                observer=observer,
                metadata_first=not told.is_done,
                submit_s=submitted - started,
                answer=told.answer,
            )
            if self._poller is not None and told.answer is None:
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

    async def _wait_with_others(self, request_id: str) -> Told:
        """Wait for a sample by the poll that all of this sampler share, where the server has it."""
        connection = self.holder.connection
        if not connection.server.sample_use_retrieve_futures:
            return Told(False)
        if self._poller is None:
            self._poller = SamplingSessionPoller(connection, self.sampling_session_id, self._clone, self.holder.outage)
        return await self._poller.wait(request_id)

    async def _submit(self, body: bytes, size: int) -> Any:
        """Submit; "too many" makes all samplers of this server and key pause, then the same number goes again."""
        connection, limits = self.holder.connection, self.holder.connection.limits
        waited_since = time.monotonic()
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
                waited = time.monotonic() - waited_since
                limit = connection.server.billing_exception_max_pause_duration_sec
                if isinstance(error, BillingError) and waited > limit:
                    raise
                wished = next_delay_s(connection.policy(), error, 1, 0.0, lambda: 1.0)
                default = 1.0 if size <= SMALL_PROMPT_BYTES else 5.0
                has_wish = any(name.lower().startswith("retry-after") for name in error.response.headers)
                pause = wished if has_wish and wished is not None else default
                if limits.pause(pause):
                    logger.warning("%s; all sampling on this server pauses for %.1f s at a time", error, pause)
            finally:
                limits.sample_count.release(1)

    async def _take_number(self) -> int:
        if self._numbers is None:
            if self._joining is None:
                self._joining = asyncio.Lock()
            async with self._joining:
                if self._numbers is None:
                    if self.holder.session.known_id is not None:
                        await self.holder.session.id()  # a clone keeps the session alive, too
                    self._clone = await self._clone_number()
                    self._numbers = Sequence(self._clone * CLONE_BLOCK)
        return self._numbers.take()

    async def _clone_number(self) -> int:
        connection = self.holder.connection
        if connection.server.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
            answer = await connection.call(JOIN_SAMPLING_SESSION, request, purpose=Purpose.SESSION)
            return int(answer.client_counter)
        return int.from_bytes(os.urandom(8), "big") % (CLONE_BLOCK - 1) + 1


def _prompt_bytes(prompt: ModelInput) -> int:
    return sum(
        chunk.length * PROMPT_BYTES_PER_TOKEN if isinstance(chunk, EncodedTextChunk) else chunk.estimated_bytes
        for chunk in prompt.chunks
    )


def _check_response(request: SampleRequest, response: SampleResponse) -> None:
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise TinkerError("the server returned no alternative prompt tokens although they were asked for")


def _with_ids(response: SampleResponse, ids: list[str] | None) -> SampleResponse:
    """The sequences with the ids that the submit answer promised; servers before 0.26 give none."""
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
    """A client in another process: own connection, own credentials, same sampler; it ends when it is dropped."""
    connection = Connection(client_config(base_url=state.base_url, api_key=api_key))
    holder = Operations(connection, Session(connection, joined_id=state.session_id))
    return SamplingClient(
        holder,
        sampling_session_id=state.sampling_session_id,
        shadow=True,
        retry_config=RetryConfig(**state.retry),
        record_stability_info=state.record_stability_info,
    )

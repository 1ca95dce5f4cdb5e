"""Runs sample jobs on the torch sampler: decodes requests, waits for adapters, encodes responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine import ipc
from tinsmith.engine.protocol import Done, Sample, TokenEvent, Usage
from tinsmith.engine.sampling import sampler
from tinsmith.engine.sampling.adapters import Name, SamplerAdapters
from tinsmith.engine.sampling.plan import SampleJob
from tinsmith.engine.sampling.sampled_model import SamplerLimits
from tinsmith.engine.sampling.sampler import Sampler
from tinsmith.engine.worker.executor import SampleEvent, SamplerStep, TorchOptions, as_job_failures, failure
from tinsmith.engine.worker.memory import MemoryCaps
from tinsmith.engine.worker.served_model import ServedModel
from tinsmith.text.token_bytes import read_special_tokens, read_token_bytes
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_sampling import encode_response
from tinsmith.wire.messages.sampling import SampleRequest, SampleResponse


@dataclass(eq=False, slots=True)
class _Running:
    job: Sample
    request: SampleRequest
    is_streamed: bool
    adapter: Name | None = None
    device_s: float = 0.0


class TorchSamples:
    """The running samples, and those that wait because all adapters of their tenant are in use."""

    def __init__(self, model: ServedModel, caps: MemoryCaps, options: TorchOptions) -> None:
        tokenizer = model.tokenizer_dir / "tokenizer.json"
        limits = SamplerLimits(
            cache_bytes=caps.cache_bytes, max_sequences=options.max_sequences, prefill_tokens=options.prefill_tokens
        )
        self._sampler = Sampler(
            model.sampled(limits),
            read_token_bytes(tokenizer),
            limits,
            Path(options.cache_dir),
            read_special_tokens(tokenizer),
        )
        self.adapters = SamplerAdapters(self._sampler, model.layout, caps.sampler_adapter_bytes)
        self._running: dict[str, _Running] = {}
        self._waiting: dict[str, dict[str, _Running]] = {}
        """By tenant, then by job, in order of arrival."""
        self._has_new_room = False
        """Whether an adapter was released since the waiting samples were last checked."""

    def add(self, job: Sample, stream: bool) -> None:
        sample = _Running(job, json_codec.decode(job.body, SampleRequest), stream)
        if not self._begin(sample):
            self._waiting.setdefault(job.tenant, {})[job.job_id] = sample

    def cancel(self, job_id: str) -> None:
        self._sampler.cancel(job_id)
        if job_id in self._running:
            self._end(job_id)
            return
        for tenant, line in list(self._waiting.items()):
            line.pop(job_id, None)
            if not line:
                del self._waiting[tenant]

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        events = self._begin_waiting()
        began_at = time.perf_counter()
        report = self._sampler.step(tenants)
        self._charge(report.tokens_by_job, time.perf_counter() - began_at)
        for event in report.events:
            if event.job_id in self._running:
                try:
                    events += self._frames_of(event)
                except Exception as error:  # a response that cannot be encoded fails only its own job
                    self.cancel(event.job_id)
                    events.append(failure(event.job_id, error))
        return SamplerStep(events, report.tokens_by_tenant)

    def _begin(self, sample: _Running) -> bool:
        """Hand a sample to the sampler; return False if there is no room for its adapter."""
        job = sample.job
        if job.directory is not None:
            sample.adapter = self.adapters.take(job)
            if sample.adapter is None:
                return False
        try:
            self._sampler.add(
                SampleJob(
                    id=job.job_id, request=sample.request, seed=job.seed, adapter=sample.adapter, tenant=job.tenant
                )
            )
        except BaseException:
            if sample.adapter is not None:
                self.adapters.give_back(sample.adapter)
            raise
        self._running[job.job_id] = sample
        return True

    def _begin_waiting(self) -> list[SampleEvent]:
        """Start waiting samples, those of the tenant that holds least memory first."""
        events: list[SampleEvent] = []
        if not self._has_new_room or not self._waiting:
            return events
        self._has_new_room = False
        for tenant in sorted(self._waiting, key=self.adapters.held_by):
            line = self._waiting[tenant]
            for job_id, sample in list(line.items()):
                try:
                    with as_job_failures():
                        if not self._begin(sample):
                            break
                except Exception as error:
                    events.append(failure(job_id, error))
                del line[job_id]
            if not line:
                del self._waiting[tenant]
        return events

    def _end(self, job_id: str) -> _Running:
        sample = self._running.pop(job_id)
        if sample.adapter is not None:
            self.adapters.give_back(sample.adapter)
            self._has_new_room = True
        return sample

    def _charge(self, tokens: Mapping[str, int], seconds: float) -> None:
        """Divide a step's time between the jobs that took part, by their tokens."""
        total = sum(tokens.values())
        for job_id, count in tokens.items():
            self._running[job_id].device_s += seconds * count / total

    def _frames_of(self, event: sampler.Event) -> list[SampleEvent]:
        sample = self._running[event.job_id]
        if isinstance(event, sampler.NewToken):
            if not sample.is_streamed:
                return []
            return [ipc.StreamedTokens(event.job_id, _token_event(event))]
        self._end(event.job_id)
        if isinstance(event, sampler.FailedEvent):
            with as_job_failures():
                raise event.error
        ends = _ends(event.job_id, event.response) if sample.is_streamed else []
        return [*ends, ipc.Finished(event.job_id, _done(event.response, sample))]


def _token_event(event: sampler.NewToken) -> TokenEvent:
    listed_K, logprobs_K = ((), ()) if event.topk is None else (part_K.tolist() for part_K in event.topk)
    return TokenEvent(
        sample=event.index,
        tokens=(event.token,),
        logprobs=(event.logprob,),
        topk_tokens=tuple(listed_K),
        topk_logprobs=tuple(logprobs_K),
    )


def _ends(job_id: str, response: SampleResponse) -> list[ipc.StreamedTokens]:
    """Return an event with the stop reason of each streamed sample; the sampler reports it once all are finished."""
    return [
        ipc.StreamedTokens(job_id, TokenEvent(sample=i, tokens=(), logprobs=(), stop_reason=sequence.stop_reason))
        for i, sequence in enumerate(response.sequences)
    ]


def _done(response: SampleResponse, sample: _Running) -> Done:
    cached = response.prompt_cache_hit_tokens
    sampled = sum(0 if row.tokens_np is None else row.tokens_np.size for row in response.sequences)
    usage = Usage(prefill=sample.request.prompt.length - cached, prefill_cached=cached, sampled=sampled)
    return Done(body=encode_response(response), encoding="protobuf", usage=usage, device_s=sample.device_s)

"""The samples of one request of another service's client: read, accepted like any others, and waited for.

The same for all dialects. What differs is the form of a request, which a reader process knows, and that of the answer.
A client that leaves takes its samples with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import msgspec

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.questions import HeadQuestion, HeadReading, PromptQuestion, PromptReading
from tinsmith.server.call import Call, StreamAnswer
from tinsmith.server.dialects.targets import SampleTarget, find_target, sampler_of, template_of
from tinsmith.server.dialects.vocabulary import Vocabulary
from tinsmith.server.jobs.accept_sample import submit_sample
from tinsmith.server.jobs.pending_results import Outcome
from tinsmith.server.jobs.streams import Event, Followed, SampleEnd, SampleGrowth, follow
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.refusals import RefusedError
from tinsmith.server.services import Services
from tinsmith.wire.codecs import proto_sampling
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.routes.own import REQUEST_ID_HEADER

RequestKind: TypeAlias = Literal["completions", "chat", "messages"]


PART_BYTES = 64 * 1024
"""What a stream makes before other tasks may run; about a millisecond."""
PIECE_BYTES = 64
"""What a piece counts besides its bytes: making an empty one takes time, too."""

SHORT_TOKENS = 16
"""What an answer says of so many tokens, each with its twenty likeliest, is less than a part."""


class SampleFailedError(RefusedError):
    """The engine could not draw a sample. The message says why."""

    code = "sample_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSamples:
    """What a request asked for, and the samples that are drawn for it."""

    target: SampleTarget
    vocabulary: Vocabulary
    reading: PromptReading
    samples: Sequence[Followed]

    @property
    def request_id(self) -> str:
        return self.samples[0].promise.request_id


async def target_of(services: Services, call: Call) -> SampleTarget:
    """Return what a request samples."""
    head = await services.readers.ask(call.caller.org_id, HeadQuestion(), call.body)
    return await find_target(services, call.caller, cast(HeadReading, head).model)


async def begin_samples(services: Services, call: Call, kind: RequestKind) -> RunningSamples:
    """Read a request, and accept its samples."""
    target = await target_of(services, call)
    vocabulary = await services.vocabularies.of(target.card)
    reading = await _read(services, call, kind, target)
    session_id = await services.caller_sessions.of(call.caller)
    sampler_id = await sampler_of(services, call.caller, session_id, target)
    samples = await _submit(services, call.caller, sampler_id, reading)
    return RunningSamples(target=target, vocabulary=vocabulary, reading=reading, samples=samples)


async def _read(services: Services, call: Call, kind: RequestKind, target: SampleTarget) -> PromptReading:
    question = PromptQuestion(
        kind=kind,
        card=target.card,
        max_samples=services.config.max_samples,
        chat_template=template_of(services, target),
    )
    reading = await services.readers.ask(call.caller.org_id, question, call.body)
    return cast(PromptReading, reading)


async def _submit(services: Services, caller: Caller, sampler_id: str, reading: PromptReading) -> list[Followed]:
    """Accept the sample of every prompt; if one is refused, those before it are cancelled."""
    samples: list[Followed] = []
    try:
        for number, sample in enumerate(reading.samples):
            if number:  # the first was counted with the request
                services.admission.check_rate(caller)
            log = TokenLog(reading.n) if reading.is_stream else None
            asked = msgspec.structs.replace(sample.reading, sampling_session_id=sampler_id)
            request_id = await submit_sample(services, caller, sample.body, asked, log)
            promise = services.broker.pending(request_id)
            if promise is None:
                recent = services.broker.recent(request_id)
                assert recent is not None, "a request that was just accepted is pending or has ended"
                promise = recent[0]
            samples.append(Followed(promise=promise, log=log, seen=[0] * reading.n))
    except BaseException:
        for followed in samples:
            services.samples.cancel(followed.promise.request_id)
        raise
    return samples


async def results(services: Services, call: Call, samples: Sequence[Followed]) -> list[SampleResponse]:
    """Wait for all results; a client that leaves cancels them."""
    outcomes: dict[int, Outcome | None] = {}
    leaving = asyncio.ensure_future(call.gone())

    async def gather() -> None:
        async with contextlib.aclosing(follow(services, samples)) as events:
            async for news in events:
                outcomes.update({event.sample: event.outcome for event in news if isinstance(event, SampleEnd)})

    gathering = asyncio.ensure_future(gather())
    try:
        await asyncio.wait({leaving, gathering}, return_when=asyncio.FIRST_COMPLETED)
        if not gathering.done():
            raise WireError("the client disconnected before the answer was complete")
        await gathering
    finally:
        for task in (leaving, gathering):
            task.cancel()
        await asyncio.gather(leaving, gathering, return_exceptions=True)
    return [response_of(outcomes[number]) for number in range(len(samples))]


def response_of(outcome: Outcome | None) -> SampleResponse:
    """Return what a sample drew; raise what it failed with."""
    if outcome is None:
        raise SampleFailedError("the sample did not finish within a day")
    if outcome.is_error:
        failure = msgspec.json.decode(outcome.body)
        kind = InvalidInputError if failure["category"] == "user" else SampleFailedError
        raise kind(failure["error"])
    return proto_sampling.decode_response(outcome.body)


def event_stream(pieces: AsyncGenerator[bytes, None], request_id: str, header: str = REQUEST_ID_HEADER) -> StreamAnswer:
    """Return server-sent events as an answer, with the request's id in a header."""
    headers = {"cache-control": "no-store", header: request_id}
    return StreamAnswer(pieces=pieces, content_type="text/event-stream; charset=utf-8", headers=headers)


def short_growth(news: Sequence[Event]) -> SampleGrowth | None:
    """Return the growth if news are a few tokens of one sample, as nearly always: nothing needs to be made in parts."""
    only = news[0] if len(news) == 1 else None
    return only if isinstance(only, SampleGrowth) and len(only.new.tokens) <= SHORT_TOKENS else None


async def in_parts(pieces: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield pieces joined, and let other tasks run between two parts: a request may have a thousand choices."""
    part: list[bytes] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += len(piece) + PIECE_BYTES
        if size >= PART_BYTES:
            yield b"".join(part)
            part, size = [], 0
            await asyncio.sleep(0)
    if any(part):
        yield b"".join(part)

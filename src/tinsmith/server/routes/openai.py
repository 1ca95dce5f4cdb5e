"""The OpenAI-compatible endpoints: completions, chat completions, and the models to ask for.

A request becomes samples (`bodies/read_openai`), which are accepted like any others, and their tokens become the answer
(`dialects`). A client that leaves takes its samples with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import cast

import msgspec

from tinsmith.errors import InvalidInputError, TinkerError, WireError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.questions import HeadQuestion, HeadReading, PromptQuestion, PromptReading
from tinsmith.server.call import Answer, AnyAnswer, Call, Handlers, StreamAnswer, reply
from tinsmith.server.dialects.openai_answer import DONE, AnswerForm, ChunkedChoice, Kind, usage_chunk, whole_answer
from tinsmith.server.dialects.targets import SampleTarget, described, find_target, list_models, sampler_of, template_of
from tinsmith.server.http import errors
from tinsmith.server.jobs.accept_sample import submit_sample
from tinsmith.server.jobs.follow import Followed, SampleEnd, follow
from tinsmith.server.jobs.pending_results import Outcome
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.refusals import RefusedError
from tinsmith.server.services import Services
from tinsmith.wire.codecs import proto_sampling
from tinsmith.wire.messages.openai import ModelList
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.routes.openai import PREFIXES
from tinsmith.wire.routes.own import REQUEST_ID_HEADER

KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients skip."""


class SampleFailedError(RefusedError):
    """The engine could not draw a sample. The message says why."""

    code = "sample_failed"


async def models(services: Services, call: Call) -> Answer:
    """The models that the caller can sample."""
    return reply(ModelList(data=await list_models(services, call.caller)))


async def model(services: Services, call: Call) -> Answer:
    """One of them."""
    return reply(described(await find_target(services, call.caller, call.params["model"])))


async def completions(services: Services, call: Call) -> AnyAnswer:
    """Texts that continue prompts."""
    return await _sampled(services, call, "completions")


async def chat(services: Services, call: Call) -> AnyAnswer:
    """The next message of a conversation."""
    return await _sampled(services, call, "chat")


async def embeddings(services: Services, call: Call) -> Answer:
    """Refuse: the models here generate text."""
    raise InvalidInputError("embeddings: this server generates text and computes no embeddings", field="model")


async def _sampled(services: Services, call: Call, kind: Kind) -> AnyAnswer:
    caller = call.caller
    head = await services.readers.ask(caller.org_id, HeadQuestion(), call.body)
    target = await find_target(services, caller, cast(HeadReading, head).model)
    vocabulary = await services.vocabularies.of(target.card)
    reading = await _read(services, call, kind, target)
    session_id = await services.caller_sessions.of(caller)
    sampler_id = await sampler_of(services, caller, session_id, target)
    samples = await _submit(services, caller, sampler_id, reading)
    form = AnswerForm(
        kind=kind,
        reading=reading,
        vocabulary=vocabulary,
        request_id=samples[0].promise.request_id,
        created=int(services.clock()),
        model=target.name,
    )
    if reading.is_stream:
        headers = {"cache-control": "no-store", REQUEST_ID_HEADER: form.request_id}
        pieces = _stream(services, form, samples)
        return StreamAnswer(pieces=pieces, content_type="text/event-stream; charset=utf-8", headers=headers)
    responses = await _results(services, call, samples)
    return Answer(await asyncio.to_thread(whole_answer, form, responses))


async def _read(services: Services, call: Call, kind: Kind, target: SampleTarget) -> PromptReading:
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


async def _results(services: Services, call: Call, samples: Sequence[Followed]) -> list[SampleResponse]:
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
    return [_response(outcomes[number]) for number in range(len(samples))]


def _response(outcome: Outcome | None) -> SampleResponse:
    if outcome is None:
        raise SampleFailedError("the sample did not finish within a day")
    if outcome.is_error:
        failure = msgspec.json.decode(outcome.body)
        kind = InvalidInputError if failure["category"] == "user" else SampleFailedError
        raise kind(failure["error"])
    return proto_sampling.decode_response(outcome.body)


async def _stream(services: Services, form: AnswerForm, samples: Sequence[Followed]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until every choice has ended, then the usage and the end of the stream."""
    count = form.reading.n
    choices = [ChunkedChoice(form, index, index // count) for index in range(count * len(samples))]
    responses: dict[int, SampleResponse] = {}
    async with contextlib.aclosing(follow(services, samples)) as events:
        yield b"".join([choice.begin() for choice in choices])
        try:
            async for news in events:
                pieces = []
                for event in news:
                    if isinstance(event, SampleEnd):
                        responses[event.sample] = response = _response(event.outcome)
                        first = event.sample * count
                        pieces += _last(choices[first : first + count], response, samples[event.sample].seen)
                    else:
                        new = event.new
                        pieces.append(
                            choices[event.sample * count + new.index].push(new.tokens, new.logprobs, new.topk)
                        )
                yield b"".join(pieces) or KEEP_ALIVE
        except TinkerError as error:
            yield b"data: %s\n\n" % errors.body_of(error, "openai")
            return
    if form.reading.has_usage:
        yield usage_chunk(form, [responses[number] for number in range(len(samples))])
    yield DONE


def _last(choices: Sequence[ChunkedChoice], response: SampleResponse, seen: Sequence[int]) -> list[bytes]:
    """Return the chunks of what was not seen yet of a sample, and of its end."""
    pieces = []
    for choice, sequence, begin in zip(choices, response.sequences, seen, strict=True):
        tokens, logprobs = sequence.tokens, list(sequence.logprobs or ())
        if begin < len(tokens):
            rows = sequence.topk_logprobs
            pieces.append(choice.push(tokens[begin:], logprobs[begin:], rows[begin:] if rows is not None else None))
        pieces.append(choice.finish(sequence.stop_reason))
    return pieces


HANDLERS: Handlers = {
    f"{prefix}_{name}": handler
    for prefix in PREFIXES
    for name, handler in {
        "models": models,
        "model": model,
        "completions": completions,
        "chat": chat,
        "embeddings": embeddings,
    }.items()
}

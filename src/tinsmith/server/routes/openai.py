"""The OpenAI-compatible endpoints: completions, chat completions, and the models to ask for.

A request becomes samples (`bodies/read_openai`), which are accepted like any others, and their tokens become the answer
(`dialects`). A client that leaves takes its samples with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.call import Answer, AnyAnswer, Call, Handlers, reply
from tinsmith.server.dialects.openai_answer import DONE, AnswerForm, ChunkedChoice, Kind, usage_chunk, whole_answer
from tinsmith.server.dialects.running_samples import (
    begin_samples,
    event_stream,
    in_parts,
    response_of,
    results,
    short_growth,
)
from tinsmith.server.dialects.targets import described, find_target, list_models
from tinsmith.server.http import errors
from tinsmith.server.jobs.streams import Event, Followed, SampleEnd, SampleGrowth, follow
from tinsmith.server.services import Services
from tinsmith.wire.messages.openai import ModelList
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.routes.openai import PREFIXES

KEEP_ALIVE = b": waiting\n\n"
"""A comment, which clients skip."""


async def models(services: Services, call: Call) -> Answer:
    """The models that the caller can sample."""
    return reply(ModelList(data=await list_models(services, call.caller)))


async def model(services: Services, call: Call) -> Answer:
    """One of them."""
    return reply(described(services, await find_target(services, call.caller, call.params["model"])))


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
    running = await begin_samples(services, call, kind)
    form = AnswerForm(
        kind=kind,
        reading=running.reading,
        vocabulary=running.vocabulary,
        request_id=running.request_id,
        created=int(services.clock()),
        model=running.target.name,
    )
    if running.reading.is_stream:
        return event_stream(_stream(services, form, running.samples), form.request_id)
    responses = await results(services, call, running.samples)
    return Answer(await asyncio.to_thread(whole_answer, form, responses))


async def _stream(services: Services, form: AnswerForm, samples: Sequence[Followed]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until every choice has ended, then the usage and the end of the stream."""
    choices: list[ChunkedChoice] = []
    responses: dict[int, SampleResponse] = {}
    echoes = await asyncio.to_thread(form.echoes) if form.reading.echo else [""] * len(samples)
    async with contextlib.aclosing(follow(services, samples)) as events:
        async for part in in_parts(_begun(form, echoes, choices)):
            yield part
        try:
            async for news in events:
                growth = short_growth(news)
                if growth is not None:
                    yield _grown(form, choices, growth) or KEEP_ALIVE
                    continue
                is_silent = True
                async for part in in_parts(_told(form, samples, choices, responses, news)):
                    yield part
                    is_silent = False
                if is_silent:
                    yield KEEP_ALIVE
        except TinkerError as error:
            yield b"data: %s\n\n" % errors.body_of(error, "openai")
            return
    if form.reading.has_usage:
        yield usage_chunk(form, [responses[number] for number in range(len(samples))])
    yield DONE


def _begun(form: AnswerForm, echoes: Sequence[str], choices: list[ChunkedChoice]) -> Iterator[bytes]:
    """Make the choices, and yield the first chunk of each."""
    for echo in echoes:
        for _ in range(form.reading.n):
            choices.append(ChunkedChoice(form, len(choices), echo))
            yield choices[-1].begin()


def _told(
    form: AnswerForm,
    samples: Sequence[Followed],
    choices: Sequence[ChunkedChoice],
    responses: dict[int, SampleResponse],
    news: Iterable[Event],
) -> Iterator[bytes]:
    """Yield the chunks of new tokens and of samples that have ended, whose responses are kept."""
    count = form.reading.n
    for event in news:
        if isinstance(event, SampleEnd):
            first = event.sample * count
            responses[event.sample] = response = response_of(event.outcome)
            yield from _last(choices[first : first + count], response, samples[event.sample].seen)
        else:
            yield _grown(form, choices, event)


def _grown(form: AnswerForm, choices: Sequence[ChunkedChoice], growth: SampleGrowth) -> bytes:
    new = growth.new
    return choices[growth.sample * form.reading.n + new.index].push(new.tokens, new.logprobs, new.topk)


def _last(choices: Sequence[ChunkedChoice], response: SampleResponse, seen: Sequence[int]) -> Iterator[bytes]:
    """Yield the chunks of what was not seen yet of a sample, and of its end."""
    for choice, sequence, begin in zip(choices, response.sequences, seen, strict=True):
        tokens, logprobs = sequence.tokens, list(sequence.logprobs or ())
        if begin < len(tokens):
            rows = sequence.topk_logprobs
            yield choice.push(tokens[begin:], logprobs[begin:], rows[begin:] if rows is not None else None)
        yield choice.finish(sequence.stop_reason)


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

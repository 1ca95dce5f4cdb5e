"""The Anthropic-compatible endpoints: the next message of a conversation, and how many tokens one has.

A request becomes a sample (`bodies/read_anthropic`), which is accepted like any other, and its tokens become the answer
(`dialects`). A client that leaves takes its sample with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import cast

from tinsmith.errors import TinkerError
from tinsmith.server.bodies.questions import CountQuestion, CountReading
from tinsmith.server.call import Answer, AnyAnswer, Call, Handlers, reply
from tinsmith.server.dialects.anthropic_answer import PING, MessageEvents, MessageForm, whole_message
from tinsmith.server.dialects.running_samples import begin_samples, event_stream, response_of, results, target_of
from tinsmith.server.dialects.targets import template_of
from tinsmith.server.http import errors
from tinsmith.server.jobs.streams import Followed, SampleEnd, follow
from tinsmith.server.services import Services
from tinsmith.wire.messages.anthropic import TokenCount
from tinsmith.wire.routes.anthropic import ANTHROPIC_PREFIXES

ID_HEADER = "request-id"
"""Where Anthropic's clients look for the id of a request."""


async def messages(services: Services, call: Call) -> AnyAnswer:
    """The next message of a conversation."""
    running = await begin_samples(services, call, "messages")
    form = MessageForm(
        reading=running.reading,
        vocabulary=running.vocabulary,
        request_id=running.request_id,
        model=running.target.name,
    )
    if running.reading.is_stream:
        return event_stream(_stream(services, form, running.samples), form.request_id, ID_HEADER)
    (response,) = await results(services, call, running.samples)
    return Answer(await asyncio.to_thread(whole_message, form, response), headers={ID_HEADER: form.request_id})


async def count_tokens(services: Services, call: Call) -> Answer:
    """The tokens that a model would read of a conversation."""
    target = await target_of(services, call)
    question = CountQuestion(card=target.card, chat_template=template_of(services, target))
    reading = await services.readers.ask(call.caller.org_id, question, call.body)
    return reply(TokenCount(input_tokens=cast(CountReading, reading).length))


async def _stream(services: Services, form: MessageForm, samples: Sequence[Followed]) -> AsyncGenerator[bytes, None]:
    """Yield server-sent events until the message is complete."""
    message = MessageEvents(form)
    async with contextlib.aclosing(follow(services, samples)) as events:
        yield message.begin()
        try:
            async for news in events:
                pieces = []
                for each in news:
                    if isinstance(each, SampleEnd):
                        response = response_of(each.outcome)
                        sequence = response.sequences[0]
                        pieces.append(message.push(sequence.tokens[samples[0].seen[0] :]))
                        pieces.append(message.finish(sequence, response))
                    else:
                        pieces.append(message.push(each.new.tokens))
                yield b"".join(pieces) or PING
        except TinkerError as error:
            yield b"event: error\ndata: %s\n\n" % errors.body_of(error, "anthropic")


HANDLERS: Handlers = {
    f"{prefix}_{name}": handler
    for prefix in ANTHROPIC_PREFIXES
    for name, handler in {"messages": messages, "count_tokens": count_tokens}.items()
}

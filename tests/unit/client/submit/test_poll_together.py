"""The shared poll of a sampler: whatever happens to it, nobody is left waiting and no result is kept in vain."""

from __future__ import annotations

import asyncio
from typing import Any

from tinsmith.client.connection.outage import Outage
from tinsmith.client.submit.poll_together import REPORTED, SamplingSessionPoller
from tinsmith.config import ClientConfig
from tinsmith.wire.messages.futures import FutureFinished, FuturesRetrieveResponse


class SharedPolls:
    """Answers the shared polls of a sampler from a list; runs tasks in the test's own loop."""

    is_closed = False

    def __init__(self, answers: list[Any]) -> None:
        self.config = ClientConfig(base_url="http://127.0.0.1:1", api_key="tml-a")
        self.extensions: dict[str, Any] = {}
        self.runner = self
        self.tasks: list[asyncio.Task[Any]] = []
        self.reported: list[list[str]] = []
        self._answers = answers

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    async def call(self, _: Any, request: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        self.reported.append(request.retrieved_request_ids)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = [FutureFinished(request_id=name, response_payload_uncompressed_size=1) for name in answer]
        return FuturesRetrieveResponse(completions=ids, cursor=1)


def poller_of(polls: SharedPolls) -> SamplingSessionPoller:
    return SamplingSessionPoller(polls, "s", 0, Outage())  # type: ignore[arg-type]


def test_a_shared_poll_that_breaks_lets_everybody_go() -> None:
    async def scenario() -> None:
        polls = SharedPolls([RuntimeError("a mistake of ours")])
        poller = poller_of(polls)
        waiting = [asyncio.create_task(poller.wait(name)) for name in "ab"]
        told = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert [one.is_done for one in told] == [False, False], "each asks by itself now"
        assert isinstance(polls.tasks[0].exception(), RuntimeError)

    asyncio.run(scenario())


def test_what_was_given_up_is_not_remembered() -> None:
    async def scenario() -> None:
        poller = poller_of(SharedPolls([["a", "b", "c"]]))
        given_up, kept = (asyncio.create_task(poller.wait(name)) for name in "ab")
        await asyncio.sleep(0)
        given_up.cancel()
        assert (await asyncio.wait_for(kept, 5)).is_done
        assert (await poller.wait("c")).is_done, "it was done before anybody waited for it"
        assert (poller._early, poller._given_up, poller._waiting) == ({}, set(), {})

    asyncio.run(scenario())


def test_a_poll_reports_no_more_results_than_a_server_takes() -> None:
    async def scenario() -> None:
        polls = SharedPolls([["a"], ["b"], ["c"]])
        poller = poller_of(polls)
        fetched = [f"request-{number}" for number in range(REPORTED + 3)]
        for name in fetched:
            poller.fetched(name)
        for name in "abc":
            await asyncio.wait_for(poller.wait(name), 5)
        assert polls.reported == [fetched[:REPORTED], fetched[REPORTED:], []]

    asyncio.run(scenario())

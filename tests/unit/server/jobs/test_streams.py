"""Token streams that are resumed: from the start or from where the client was; each token is drawn once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import Answer, Client, Recorder, Server, run, sample, serving, settled, until

from tinsmith.engine.protocol import AnyJob, TokenEvent
from tinsmith.server.jobs import samples as samples_module
from tinsmith.server.jobs import streams, token_log
from tinsmith.server.jobs.token_log import News, TokenLog
from tinsmith.store.base import statement
from tinsmith.wire.codecs.proto_sampling import decode_response

STREAM = "/tinsmith/v1/sample_stream"
Pieces = list[tuple[str, Any]]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "RETRY_S", 0.0)


async def begun(server: Server) -> tuple[Client, str, str]:
    ann = await server.client()
    session = await ann.session()
    return ann, session, await ann.sampler(session)


class Paced(Recorder):
    """Samples draw a token each time they are let."""

    def __init__(self) -> None:
        self.allowed = 0
        self._changed = asyncio.Event()
        super().__init__(pace=self._wait)

    async def _wait(self, _: AnyJob, number: int) -> None:
        while number >= self.allowed:
            self._changed.clear()
            await self._changed.wait()

    def let(self, tokens: int) -> None:
        self.allowed = tokens
        self._changed.set()


async def followed(server: Server, visits: int) -> None:
    """Wait until a sample's stream has been asked for so often, and has sent what there was."""
    samples = server.services.samples
    await until(lambda: any(work.log and work.log.visits == visits for work in samples._under_way.values()))
    await settled()


def pieces(answer: Answer) -> Pieces:
    assert answer.status == 200, answer
    blocks = [block.split("\n") for block in answer.body.decode().split("\n\n") if block]
    return [(name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))) for name, data in blocks]


def tokens_of(found: Pieces, index: int = 0) -> list[int]:
    """One sample's tokens; each piece must begin where the one before it ended, or where the first does."""
    tokens: list[int] = []
    at: int | None = None
    for name, data in found:
        if name == "token" and data["index"] == index:
            assert at is None or data["position"] == at
            at = data["position"] + len(data["tokens"])
            assert len(data["logprobs"]) == len(data["tokens"])
            tokens += data["tokens"]
    return tokens


async def whole_of(server: Server, client: Client, answer: Answer) -> list[list[int]]:
    """What the sample behind a stream came to."""
    result = await client.poll(answer.headers["x-tinsmith-request-id"], accept="application/x-protobuf")
    return [list(sequence.tokens) for sequence in decode_response(result.body).sequences]


def test_a_finished_stream_comes_again_from_the_start_or_from_a_position(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            message = sample(sampler, 1, num_samples=2)
            first = await ann.post(STREAM, message)
            whole = await whole_of(server, ann, first)
            assert [tokens_of(pieces(first), index) for index in range(2)] == whole
            again = await ann.post(STREAM, message)
            assert [tokens_of(pieces(again), index) for index in range(2)] == whole
            assert pieces(again)[-1] == pieces(first)[-1]
            assert pieces(first)[-1][0] == "done"
            assert [end["tokens"] for end in pieces(first)[-1][1]["sequences"]] == [len(row) for row in whole]
            later = pieces(await ann.post(f"{STREAM}?have=3,1", message))
            assert [tokens_of(later, index) for index in range(2)] == [whole[0][3:], whole[1][1:]]
            assert [data["position"] for name, data in later if name == "token"] == [3, 1]
            server.services.broker.forget([sampler])
            assert tokens_of(pieces(await ann.post(STREAM, message))) == whole[0], "from the store"
            assert len(server.backend.submitted) == 1

    run(scenario())


def test_a_stream_that_runs_is_followed_by_many_and_drawn_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Paced()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            message = sample(sampler, 1)
            cut = asyncio.create_task(ann.post(STREAM, message))
            await until(lambda: backend.submitted)
            backend.let(2)
            await settled()
            cut.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cut
            again = asyncio.create_task(ann.post(STREAM, message))
            behind = asyncio.create_task(ann.post(f"{STREAM}?have=2", message))
            await followed(server, 3)
            backend.let(3)
            await settled()
            backend.let(99)
            found = pieces(await again)
            (whole,) = await whole_of(server, ann, await again)
            assert tokens_of(found) == whole
            assert tokens_of(pieces(await behind)) == whole[2:]
            assert found[0][1]["tokens"] == whole[:2], "what it had missed came at once"
            assert len(backend.submitted) == 1

    run(scenario())


def test_tokens_that_a_lost_engine_draws_again_are_not_doubled(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Paced()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            following = asyncio.create_task(ann.post(STREAM, sample(sampler, 1)))
            await until(lambda: backend.submitted)
            backend.let(3)
            await settled()
            backend.lose()
            await until(lambda: len(backend.submitted) == 2)
            backend.let(99)
            answer = await following
            assert [tokens_of(pieces(answer))] == await whole_of(server, ann, answer)

    run(scenario())


def test_a_sample_whose_tokens_nobody_noted_comes_whole_at_its_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Paced()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            message = sample(sampler, 1)
            request_id = (await ann.post("asample", message)).json["request_id"]
            assert server.services.samples.log(request_id) is None, "nobody asked for its tokens then"
            following = asyncio.create_task(ann.post(STREAM, message))
            await settled()
            backend.let(99)
            answer = await following
            assert [tokens_of(pieces(answer))] == await whole_of(server, ann, answer)
            assert pieces(answer)[-1][0] == "done"

    run(scenario())


def test_a_stream_whose_result_was_pruned_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            request_id = (await ann.post(STREAM, sample(sampler, 1))).headers["x-tinsmith-request-id"]
            server.services.broker.forget([sampler])
            await server.store.write(statement("delete_result", name=request_id))
            gone = await ann.post(STREAM, sample(sampler, 1))
            assert (gone.status, gone.json["code"]) == (410, "gone")
            assert f"the result of request {request_id} is no longer stored" in gone.detail
            assert len(server.backend.submitted) == 1

    run(scenario())


def test_a_stream_that_nobody_follows_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "RETURN_S", 0.5)

    async def scenario() -> None:
        backend = Paced()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            for number in (1, None):
                following = asyncio.create_task(ann.post(STREAM, sample(sampler, number)))
                await until(lambda: server.services.broker.count())
                backend.let(2)
                await settled()
                following.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await following
                if number is not None:
                    await settled()
                    assert server.services.broker.count() == 1, "its client may come back"
                await until(lambda: not server.services.broker.count())
            back = pieces(await ann.post(STREAM, sample(sampler, 1)))
            assert back[-1] == (
                "error",
                {"error": "cancelled: no client read its stream for 0.5 s", "category": "user"},
            )

    run(scenario())


def test_a_sample_that_others_wait_for_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RETURN_S", 0.001)

    async def scenario() -> None:
        backend = Paced()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            message = sample(sampler, 1)
            leaves, stays = (asyncio.create_task(ann.post(STREAM, message)) for _ in range(2))
            await followed(server, 2)
            leaves.cancel()
            await asyncio.sleep(0.01)
            backend.let(99)
            assert pieces(await stays)[-1][0] == "done"

    run(scenario())


@pytest.mark.parametrize("have", ["x", "1,2,3", "-1", "1,", "9999999999", "\u0663"])
def test_positions_that_make_no_sense_are_refused(tmp_path: Path, have: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            refused = await ann.post(f"{STREAM}?have={have}", sample(sampler, 1, num_samples=2))
            assert (refused.status, refused.json["field"]) == (400, "have")
            assert server.backend.submitted == []

    run(scenario())


def test_a_log_passes_over_what_it_has() -> None:
    async def scenario() -> None:
        log = TokenLog(2)
        first, second = log.listener(), log.listener()
        first(TokenEvent(sample=0, tokens=(1, 2, 3), logprobs=(-1.0, -2.0, -3.0)))
        first(TokenEvent(sample=1, tokens=(9,), logprobs=(-9.0,)))
        news = News(60.0)
        log.join(news)
        waiting = asyncio.ensure_future(news.wait())
        await asyncio.sleep(0)
        second(TokenEvent(sample=0, tokens=(1, 2), logprobs=(-1.0, -2.0)))
        await asyncio.sleep(0)
        assert not waiting.done(), "that was known"
        second(TokenEvent(sample=0, tokens=(3, 4), logprobs=(-3.0, -4.0)))
        assert await asyncio.wait_for(waiting, 5)
        news.close()
        (new,) = log.after([1, 1])
        assert (new.index, list(new.tokens), list(new.logprobs)) == (0, [2, 3, 4], [-2.0, -3.0, -4.0])
        assert new.topk is None

    run(scenario())


def test_news_wakes_its_follower_and_so_does_silence() -> None:
    async def scenario() -> None:
        news = News(0.01)
        news.announce()
        news.announce()
        assert await news.wait(), "what came before the wait is new"
        for _ in range(3):
            assert not await asyncio.wait_for(news.wait(), 5), "nothing came"
        asyncio.get_running_loop().call_soon(news.announce)
        assert await asyncio.wait_for(news.wait(), 5)
        left = asyncio.ensure_future(news.wait())
        await asyncio.sleep(0)
        left.cancel()
        news.announce()
        news.close()
        assert news._timer is None or news._timer.cancelled()

    run(scenario())


def test_a_log_keeps_the_tables_of_its_tokens() -> None:
    async def scenario() -> None:
        log = TokenLog(1)
        first, second = log.listener(), log.listener()
        rows = [[(10 * place, -0.5 * place), (10 * place + 1, -1.5)] for place in range(3)]

        def event(*places: int) -> TokenEvent:
            flat = [cell for place in places for cell in rows[place]]
            tables = {
                "topk_tokens": tuple(token for token, _ in flat),
                "topk_logprobs": tuple(logprob for _, logprob in flat),
            }
            return TokenEvent(sample=0, tokens=places, logprobs=(-1.0,) * len(places), **tables)

        first(event(0, 1))
        second(event(0))
        second(event(1, 2))
        (new,) = log.after([0])
        assert (list(new.tokens), new.topk) == ([0, 1, 2], rows)
        (new,) = log.after([2])
        assert (list(new.tokens), new.topk) == ([2], rows[2:])

    run(scenario())


def test_large_tables_come_in_pieces() -> None:
    """A client that comes back late gets everything, but no more at a time than the loop can write quickly."""

    async def scenario() -> None:
        log, k, count = TokenLog(1), 1000, 30
        take = log.listener()
        for token in range(count):
            take(
                TokenEvent(sample=0, tokens=(token,), logprobs=(-1.0,), topk_tokens=(7,) * k, topk_logprobs=(-2.0,) * k)
            )
        sent, found = [0], []
        while new := next(iter(log.after(sent)), None):
            assert new.topk is not None
            assert len(new.topk) == len(new.tokens)
            assert sum(map(len, new.topk)) <= token_log.PIECE_CELLS
            sent[0] += len(new.tokens)
            found += list(new.tokens)
        assert found == list(range(count))

    run(scenario())


def test_a_stream_has_the_tables_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_log, "PIECE_CELLS", 4)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            plain = pieces(await ann.post(STREAM, sample(sampler, 1)))
            assert not any("topk" in data for _, data in plain)
            message = sample(sampler, 2, num_samples=2, topk_sample_logprobs=2)
            first = await ann.post(STREAM, message)
            result = await ann.poll(first.headers["x-tinsmith-request-id"], accept="application/x-protobuf")
            rows = [sequence.topk_logprobs for sequence in decode_response(result.body).sequences]
            again = await ann.post(STREAM, message)
            for answer in (first, again):
                for index, expected in enumerate(rows):
                    own = [data for name, data in pieces(answer) if name == "token" and data["index"] == index]
                    assert [[tuple(cell) for cell in row] for data in own for row in data["topk"]] == expected
            later = pieces(await ann.post(f"{STREAM}?have=3,4", message))
            assert [[tuple(cell) for cell in row] for _, data in later[:-1] for row in data["topk"]] == (rows[0] or [])[
                3:
            ]

    run(scenario())

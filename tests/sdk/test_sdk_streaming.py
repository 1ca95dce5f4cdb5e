"""Token streams: in order, however the bytes are split; cancelled when nobody reads; refused where not supported."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.server_arithmetic import sampled_logprob, sampled_tokens
from support.tinker_server import Drop, DropMidBody, Status, TinkerServer

from tinsmith import (
    APIConnectionError,
    InvalidInputError,
    ModelInput,
    PermissionDeniedError,
    RateLimitError,
    RequestFailedError,
    SamplingClient,
    SamplingParams,
    TinkerError,
    WireError,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STREAM = "/tinsmith/v1/sample_stream"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture
def streaming(make_server: Any) -> TinkerServer:
    server: TinkerServer = make_server(flags={"tinsmith": {"sample_stream": True}})
    return server


@pytest.fixture
def streamer(connect: Any, streaming: TinkerServer) -> SamplingClient:
    sampler: SamplingClient = connect(streaming).create_sampling_client(base_model="stub/model")
    return sampler


async def collect(sampler: SamplingClient, num_samples: int = 1) -> list[Any]:
    return [piece async for piece in sampler.sample_stream(PROMPT, PARAMS, num_samples)]


def run(coroutine: Any, timeout_s: float = 12) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(coroutine, timeout_s)

    return asyncio.run(limited())


def test_tokens_arrive_one_by_one_in_order(streamer: SamplingClient, streaming: TinkerServer) -> None:
    pieces = run(collect(streamer))

    assert [token for piece in pieces for token in piece.tokens] == sampled_tokens(PROMPT, 0, 6)
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    assert logprobs == pytest.approx([sampled_logprob(j) for j in range(6)], rel=1e-6)
    assert [piece.stop_reason for piece in pieces] == [None] * 6 + ["length"]
    request = streaming.find(STREAM)[0]
    assert request.key == streaming.key
    assert request.body["seq_id"] == 0
    assert request.body["sampling_params"]["max_tokens"] == 6


def test_tables_come_with_their_tokens(streamer: SamplingClient, streaming: TinkerServer) -> None:
    async def scenario() -> None:
        stream = streamer.sample_stream(PROMPT, PARAMS, topk_sample_logprobs=2)
        pieces = [piece async for piece in stream if piece.tokens]
        assert streaming.find(STREAM)[0].body["topk_sample_logprobs"] == 2
        whole = await streamer.sample_async(PROMPT, 1, PARAMS, topk_sample_logprobs=2)
        assert [row for piece in pieces for row in piece.topk_logprobs or []] == whole.sequences[0].topk_logprobs
        assert all(len(piece.topk_logprobs or []) == len(piece.tokens) for piece in pieces)

    run(scenario())
    assert all(piece.topk_logprobs is None for piece in run(collect(streamer)))


def test_own_options_are_sent_only_if_they_are_set(streamer: SamplingClient, streaming: TinkerServer) -> None:
    """And checked before they are: no request is sent for a value that no server takes."""
    run(collect(streamer))
    assert set(streaming.find(STREAM)[0].body["sampling_params"]) == {"max_tokens", "temperature", "top_k", "top_p"}
    streamer.sample(PROMPT, 1, SamplingParams(max_tokens=2, min_p=0.5, logit_bias={3: 1.0})).result(30)
    sent = streaming.find("/api/v1/asample")[0].body["sampling_params"]
    assert (sent["min_p"], sent["logit_bias"]) == (0.5, {"3": 1.0})
    with pytest.raises(InvalidInputError, match=r"sampling_params\.min_p: 2\.0 is not allowed"):
        streamer.sample(PROMPT, 1, SamplingParams(min_p=2.0))
    assert len(streaming.find("/api/v1/asample")) == 1


@pytest.mark.parametrize("split_bytes", [1, 2, 3, 7])
def test_the_cuts_between_bytes_do_not_matter(
    streamer: SamplingClient, streaming: TinkerServer, split_bytes: int
) -> None:
    streaming.settings.stream_split_bytes = split_bytes
    pieces = run(collect(streamer, 2))

    for index in range(2):
        own = [token for piece in pieces if piece.index == index for token in piece.tokens]
        assert own == sampled_tokens(PROMPT, index, 6)
    assert [piece.stop_reason for piece in pieces[-2:]] == ["length", "length"]


def test_tokens_are_seen_before_the_stream_ends(streamer: SamplingClient, streaming: TinkerServer) -> None:
    streaming.settings.stream_pause_after = 2

    async def read() -> list[int]:
        tokens: list[int] = []
        async for piece in streamer.sample_stream(PROMPT, PARAMS):
            tokens += piece.tokens
            if len(tokens) == 2:
                streaming.release()
        return tokens

    assert run(read()) == sampled_tokens(PROMPT, 0, 6)


def test_the_callers_loop_runs_on_while_a_stream_waits(streamer: SamplingClient, streaming: TinkerServer) -> None:
    streaming.settings.stream_pause_after = 1

    async def read() -> int:
        reading = asyncio.create_task(collect(streamer))
        await asyncio.to_thread(streaming.wait_for, STREAM, 1, 10)
        ticks = 0
        for _ in range(20):
            await asyncio.sleep(0.005)
            ticks += 1
        assert not reading.done()
        streaming.release()
        await reading
        return ticks

    assert run(read()) == 20


def test_leaving_the_loop_early_disconnects(streamer: SamplingClient, streaming: TinkerServer, eventually: Any) -> None:
    streaming.settings.stream_pause_after = 1

    async def read_one() -> None:
        async for _ in streamer.sample_stream(PROMPT, PARAMS):
            break
        request = streaming.find(STREAM)[0]
        while not request.is_aborted:
            await asyncio.sleep(0.01)

    run(read_one())
    streaming.settings.stream_pause_after = None
    assert len(run(collect(streamer))) == 7, "the sampler still works"


def test_cancelling_the_reading_task_disconnects(
    streamer: SamplingClient, streaming: TinkerServer, eventually: Any
) -> None:
    streaming.settings.stream_pause_after = 1

    async def read_and_cancel() -> None:
        reading = asyncio.create_task(collect(streamer))
        await asyncio.to_thread(streaming.wait_for, STREAM, 1, 10)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    run(read_and_cancel())
    eventually(lambda: streaming.find(STREAM)[0].is_aborted)


def test_a_server_without_streams_refuses_at_once(sampler: SamplingClient, server: TinkerServer) -> None:
    with pytest.raises(TinkerError, match="does not stream") as refused:
        run(collect(sampler), 3)
    assert server.url in str(refused.value)
    assert server.find(STREAM) == []


def test_an_error_in_the_stream_comes_after_its_tokens(streamer: SamplingClient, streaming: TinkerServer) -> None:
    streaming.settings.stream_error_after = 3
    tokens: list[int] = []

    async def read() -> None:
        async for piece in streamer.sample_stream(PROMPT, PARAMS):
            tokens.extend(piece.tokens)

    with pytest.raises(RequestFailedError, match="the sampler stopped"):
        run(read())
    assert tokens == sampled_tokens(PROMPT, 0, 3)


def test_a_refused_stream_says_why(streamer: SamplingClient, streaming: TinkerServer) -> None:
    streaming.script(STREAM, [Status(403, body={"detail": "no streams for you"})])
    with pytest.raises(PermissionDeniedError, match="no streams for you") as refused:
        run(collect(streamer))
    assert f"{streaming.url}{STREAM}" in str(refused.value)
    assert len(streaming.find(STREAM)) == 1


def test_too_many_streams_are_waited_for_and_then_said(connect: Any, streaming: TinkerServer) -> None:
    sampler = connect(streaming, retry_deadline_s=0.5).create_sampling_client(base_model="stub/model")
    busy = Status(429, {"retry-after-ms": "10"}, {"detail": "too many streams"})
    streaming.script(STREAM, [busy])
    assert len(run(collect(sampler))) == 7
    streaming.script(STREAM, [busy] * 200)
    with pytest.raises(RateLimitError, match="too many streams") as refused:
        run(collect(sampler))
    assert f"{streaming.url}{STREAM}" in str(refused.value)


@pytest.mark.parametrize("fault", [Drop(), DropMidBody(), Status(503, {"retry-after-ms": "1"}, {})], ids=str)
def test_a_cut_stream_goes_on_where_it_was(streamer: SamplingClient, streaming: TinkerServer, fault: Any) -> None:
    streaming.script(STREAM, [fault, fault])
    pieces = run(collect(streamer, 2))

    for index in range(2):
        own = [token for piece in pieces if piece.index == index for token in piece.tokens]
        assert own == sampled_tokens(PROMPT, index, 6), "nothing is missing, nothing is doubled"
    assert [piece.stop_reason for piece in pieces if piece.stop_reason] == ["length", "length"]
    asked = streaming.find(STREAM)
    assert len(asked) == 3
    assert len({request.raw_body for request in asked}) == 1, "the same sample"
    has_begun = fault == DropMidBody()
    assert [bool(request.query.get("have")) for request in asked] == [False, has_begun, has_begun]


def test_a_stream_that_is_cut_again_and_again_is_an_error_not_an_end(connect: Any, streaming: TinkerServer) -> None:
    sampler = connect(streaming, retry_deadline_s=0.5).create_sampling_client(base_model="stub/model")
    streaming.script(STREAM, [DropMidBody()] * 200)
    tokens: list[int] = []

    async def read() -> None:
        async for piece in sampler.sample_stream(PROMPT, PARAMS):
            tokens.extend(piece.tokens)

    with pytest.raises(APIConnectionError, match=STREAM):
        run(read())
    assert tokens == sampled_tokens(PROMPT, 0, len(tokens))
    assert len(streaming.find(STREAM)) > 2


def test_a_silent_stream_is_asked_for_again(connect: Any, streaming: TinkerServer) -> None:
    sampler = connect(streaming, poll_timeout_s=0.3).create_sampling_client(base_model="stub/model")
    streaming.settings.stream_pause_after = 2

    async def read() -> list[int]:
        tokens: list[int] = []
        async for piece in sampler.sample_stream(PROMPT, PARAMS):
            tokens += piece.tokens
            if len(tokens) == 2:
                streaming.settings.stream_pause_after = None  # for the next connection; this one says no more
        return tokens

    assert run(read()) == sampled_tokens(PROMPT, 0, 6)
    assert len(streaming.find(STREAM)) == 2


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ('token {"index": 0, "position": 2, "tokens": [1]}', "skipped tokens 0 to 2 of sample 0"),
        ('token {"index": 1, "tokens": [1]}', "names sample 1, but only 1"),
        ('done {"sequences": [{"stop_reason": "length", "tokens": 3}]}', "0 of 3 tokens of sample 0"),
    ],
    ids=["gap", "stranger", "short"],
)
def test_a_stream_with_holes_is_an_error(
    streamer: SamplingClient, streaming: TinkerServer, events: str, says: str
) -> None:
    name, _, data = events.partition(" ")
    body = f"event: {name}\ndata: {data}\n\n".encode()
    streaming.script(STREAM, [Status(200, {"content-type": "text/event-stream"}, body)])
    with pytest.raises(WireError, match=says):
        run(collect(streamer))


@pytest.mark.parametrize(
    "body",
    [
        b"event: token\ndata: {}\n\n",
        b'event: token\ndata: {"index": 0}\n\n',
        b"event: token\ndata: 1\n\n",
        b"data: x\n",
    ],
)
def test_a_malformed_stream_is_an_error_not_a_hang(
    streamer: SamplingClient, streaming: TinkerServer, body: bytes
) -> None:
    streaming.script(STREAM, [Status(200, {"content-type": "text/event-stream"}, body)])
    with pytest.raises(TinkerError):
        run(collect(streamer), 4)


def test_a_stream_that_fails_counts_as_failed(connect: Any, streaming: TinkerServer) -> None:
    client = connect(streaming)
    sampler = client.create_sampling_client(base_model="stub/model")
    streaming.script(STREAM, [Status(400, {}, {"detail": "no"})])
    with pytest.raises(TinkerError):
        run(collect(sampler))
    run(collect(sampler))
    figures = client.metrics()["sample_stream"]
    assert (figures.count, figures.errors) == (2, 1)


def test_a_stream_that_never_began_ends_with_the_client(connect: Any, streaming: TinkerServer) -> None:
    client = connect(streaming)
    sampler = client.create_sampling_client(base_model="stub/model")
    streaming.settings.stream_pause_after = 1

    async def read() -> None:
        reading = asyncio.create_task(collect(sampler))
        await asyncio.sleep(0)
        client.holder.close()  # without the word to the server, which would take its time
        await asyncio.wait_for(reading, 4)

    with pytest.raises(TinkerError, match="closed"):
        run(read())


def test_closing_the_client_ends_a_stream_with_an_error(connect: Any, streaming: TinkerServer) -> None:
    client = connect(streaming)
    sampler = client.create_sampling_client(base_model="stub/model")
    streaming.settings.stream_pause_after = 1

    async def read() -> None:
        reading = asyncio.create_task(collect(sampler))
        await asyncio.to_thread(streaming.wait_for, STREAM, 1, 10)
        await asyncio.to_thread(client.close)
        await asyncio.wait_for(reading, 4)

    with pytest.raises(TinkerError, match="closed"):
        run(read())


def test_the_headers_of_every_request_are_on_a_stream_too(connect: Any, streaming: TinkerServer) -> None:
    client = connect(streaming, default_headers={"CF-Access-Client-Id": "someone"})
    run(collect(client.create_sampling_client(base_model="stub/model")))

    without = [request.path for request in streaming.requests if "cf-access-client-id" not in request.headers]
    assert without == []


def test_several_streams_at_once(streamer: SamplingClient) -> None:
    async def read_all() -> list[list[Any]]:
        return await asyncio.gather(*(collect(streamer) for _ in range(10)))

    for pieces in run(read_all()):
        assert [token for piece in pieces for token in piece.tokens] == sampled_tokens(PROMPT, 0, 6)

"""Bad requests: each is refused with a status that clients do not retry and a text that names the place, the value and
what is allowed; none reaches the backend, and none holds up what comes behind it."""

from __future__ import annotations

import json
import math
import struct
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zstandard
from support.in_process import (
    Answer,
    Client,
    Recorder,
    Server,
    create_model,
    datum,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
)

from tinsmith.engine.base import ModelCard
from tinsmith.wire import zstd
from tinsmith.wire.json_codec import decode
from tinsmith.wire.proto_training import encode_request
from tinsmith.wire.training import ForwardBackwardRequest

SMALL = ModelCard(name="small", vocab_size=100, max_context_length=8)
READ_ONLY = ModelCard(name="only/sampled", vocab_size=100, max_context_length=8, trainable=False)
FROZEN = ModelCard(name="only/trained", vocab_size=100, max_context_length=8, sampleable=False)


def floats(*values: float) -> dict[str, Any]:
    return {"data": list(values), "dtype": "float32"}


def ints(*values: int, shape: list[int] | None = None) -> dict[str, Any]:
    tensor: dict[str, Any] = {"data": list(values), "dtype": "int64"}
    return tensor if shape is None else {**tensor, "shape": shape}


GOOD = datum(1, 2)
PPO = datum(1, 2, weights=None, logprobs=floats(-1, -1), advantages=floats(1, 1))

PASSES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "no data": ({"data": []}, 400, ("data: is empty",)),
    "an unknown loss": ({"loss_fn": "hinge"}, 422, ("loss_fn", "cross_entropy", "ppo")),
    "a loss without a definition": ({"loss_fn": "stable_reinforce"}, 400, ("loss_fn", "not computed by this server")),
    "an unknown option": (
        {"data": [PPO], "loss_fn": "ppo", "loss_fn_config": {"clip": 0.1}},
        400,
        ("loss_fn_config['clip']", "clip_low_threshold"),
    ),
    "an option out of range": (
        {"data": [PPO], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": -1}},
        400,
        ("loss_fn_config['clip_low_threshold']", "-1", "0 or more"),
    ),
    "a missing input": (
        {"data": [GOOD, datum(1, 2, weights=None)]},
        400,
        ("data[1].loss_fn_inputs['weights']", "is missing", "cross_entropy needs it"),
    ),
    "an input that the loss does not have": (
        {"data": [datum(1, 2, mask=floats(1, 1))]},
        400,
        ("data[0].loss_fn_inputs['mask']", "no such input", "target_tokens, weights"),
    ),
    "an input of another shape": (
        {"data": [GOOD, GOOD, datum(1, 2, weights=floats(1))]},
        422,
        ("data[2]", "loss_fn_inputs['weights']", "has 1 entries", "2 tokens"),
    ),
    "targets of another length": (
        {"data": [datum(1, 2, target_tokens=ints(1), weights=floats(1))]},
        422,
        ("data[0]", "loss_fn_inputs['target_tokens']", "has 1 entries", "2 tokens"),
    ),
    "targets that are no integers": (
        {"data": [datum(1, 2, target_tokens=floats(1, 2))]},
        422,
        ("data[0]", "loss_fn_inputs['target_tokens']", "token ids are integers", "float32"),
    ),
    "a shape that the data does not fill": (
        {"data": [datum(1, 2, target_tokens=ints(1, 2, shape=[3]))]},
        422,
        ("target_tokens", "3"),
    ),
    "a token beyond the vocabulary": (
        {"data": [GOOD, datum(1, 100)]},
        400,
        ("data[1].model_input.chunks[0].tokens[1]", "100", "0 to 99"),
    ),
    "a target beyond the vocabulary": (
        {"data": [datum(1, 2, target_tokens=ints(5, 700))]},
        400,
        ("data[0].loss_fn_inputs['target_tokens'][1]", "700", "0 to 99"),
    ),
    "a negative token": ({"data": [datum(1, -2)]}, 422, ("tokens", "-2")),
    "a weight that is not finite": (
        {"data": [GOOD, datum(1, 2, weights=floats(1, math.nan))]},
        422,
        ("data[1].loss_fn_inputs.weights.data[1]", "only finite numbers are allowed"),
    ),
    "a weight that is infinite": (
        {"data": [datum(1, 2, weights=floats(-math.inf, 1))]},
        422,
        ("data[0].loss_fn_inputs.weights.data[0]", "only finite numbers are allowed"),
    ),
    "an option that is not finite": (
        {"data": [PPO], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": math.nan}},
        422,
        ("loss_fn_config.clip_low_threshold", "only finite numbers are allowed"),
    ),
    "more than the context holds": (
        {"data": [datum(*range(9))]},
        400,
        ("data[0].model_input", "has 9 tokens", "at most 8"),
    ),
    "an empty input": (
        {"data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {}}]},
        400,
        ("data[0].model_input", "is empty"),
    ),
    "an image": (
        {
            "data": [
                {
                    "model_input": {
                        "chunks": [
                            {"type": "image_asset_pointer", "format": "png", "location": "x", "expected_tokens": 2}
                        ]
                    },
                    "loss_fn_inputs": {},
                }
            ]
        },
        400,
        ("data[0].model_input.chunks[0]", "image_asset_pointer", "send encoded_text"),
    ),
    "too many datums": ({"data": [GOOD] * 9}, 400, ("data: 9 datums", "limit 8")),
    "too many tokens": ({"data": [datum(*range(8))] * 4}, 400, ("data: 32 tokens", "limit 30")),
    "a loss that was not uploaded": (
        {"loss_fn": "custom", "loss_fn_config": {"loss_id": "loss-none"}},
        404,
        ("custom loss 'loss-none' does not exist",),
    ),
    "a custom loss without an id": ({"loss_fn": "custom"}, 400, ("loss_fn_config", "loss_id")),
}


@dataclass
class Bench:
    """A run whose next number is `seq`."""

    server: Server
    client: Client
    session: str
    model: str
    seq: int = 0

    def next(self) -> int:
        self.seq += 1
        return self.seq

    async def check(self, answer: Answer, status: int, says: tuple[str, ...]) -> None:
        """The refusal is as expected, nothing ran, and the run goes on."""
        assert answer.status == status, answer
        assert answer.status not in (408, 409, 429, 500, 503)
        for text in says:
            assert text in answer.detail, answer.detail
        assert answer.json["code"]
        submitted = len(self.server.backend.submitted)
        await self.client.result(
            await self.client.post("forward_backward", forward_backward(self.model, self.next(), GOOD))
        )
        assert len(self.server.backend.submitted) == submitted + 1


@asynccontextmanager
async def bench(tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    cards = (SMALL, READ_ONLY, FROZEN)
    limits = {"max_datums": 8, "max_request_tokens": 30, "max_samples": 4, "min_free_bytes": 1, **settings}
    async with serving(tmp_path, backend=Recorder(cards), **limits) as server:
        ann = await server.client()
        session = await ann.session()
        model = await ann.model(session, base_model="small")
        server.backend.submitted.clear()
        yield Bench(server, ann, session, model)


def encoded(message: Any) -> bytes:
    """JSON as Python writes it: NaN and all."""
    return json.dumps(message).encode()


def test_bad_passes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            for fields, status, says in PASSES.values():
                seq = made.next()
                message = encoded(forward_backward(made.model, seq, **{"data": [GOOD], **fields}))
                answer = await made.client.post("forward_backward", message)
                await made.check(answer, status, says)
                again = await made.client.post("forward_backward", message)
                assert 400 <= again.status < 500
                assert f"request number {seq} of {made.model} was refused before" in again.detail or status == 422
            assert set(made.server.backend.kinds()) == {"forward_backward"}
            assert len(made.server.backend.submitted) == len(PASSES)

    run(scenario())


def test_bad_passes_of_old_releases_and_in_protobuf(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            for name in ("a missing input", "a token beyond the vocabulary", "more than the context holds"):
                fields, status, says = PASSES[name]
                work = forward_backward("", 1, **{"data": [GOOD], **fields})["forward_backward_input"]
                old = {"model_id": made.model, "seq_id": made.next(), "forward_input": work}
                await made.check(await made.client.post("forward", old), status, says)
                message = forward_backward(made.model, made.next(), **{"data": [GOOD], **fields})
                body = encode_request(decode(msgspec.json.encode(message), ForwardBackwardRequest))
                answer = await made.client.post("forward_backward", body, content_type="application/x-protobuf")
                await made.check(answer, status, says)

    run(scenario())


def test_protobuf_that_is_not_finite_or_is_cut_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            message = forward_backward(made.model, made.next(), datum(1, 2, weights=floats(1, 0.125)))
            body = encode_request(decode(msgspec.json.encode(message), ForwardBackwardRequest))
            spoiled = body.replace(struct.pack("<f", 0.125), struct.pack("<f", math.inf))
            assert spoiled != body
            answer = await made.client.post("forward_backward", spoiled, content_type="application/x-protobuf")
            await made.check(answer, 400, ("data[0].loss_fn_inputs['weights'][1]", "inf", "only finite numbers"))
            message = forward_backward(made.model, made.next(), GOOD)
            body = encode_request(decode(msgspec.json.encode(message), ForwardBackwardRequest))
            answer = await made.client.post(
                "forward_backward", body + b"\x1a\xff", content_type="application/x-protobuf"
            )
            await made.check(answer, 422, ("ForwardBackwardRequest: cut off",))

    run(scenario())


STEPS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "a rate below 0": ({"adam_params": {"learning_rate": -1}}, 400, ("adam_params.learning_rate", "-1", "0 or more")),
    "a beta of 1": ({"adam_params": {"beta1": 1.0}}, 400, ("adam_params.beta1", "1.0", "[0, 1)")),
    "a negative eps": ({"adam_params": {"eps": -1e-9}}, 400, ("adam_params.eps", "-1e-09", "0 or more")),
    "a rate that is not finite": ({"adam_params": {"learning_rate": math.nan}}, 422, ("adam_params.learning_rate",)),
    "a rate that is a text": ({"adam_params": {"learning_rate": "fast"}}, 422, ("adam_params.learning_rate",)),
    "no parameters": ({}, 422, ("adam_params or optimizer_params",)),
    "another optimizer": (
        {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}},
        400,
        ("optimizer_params", "send adam_params"),
    ),
}


def test_bad_steps(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            for fields, status, says in STEPS.values():
                body = encoded({"model_id": made.model, "seq_id": made.next(), **fields})
                await made.check(await made.client.post("optim_step", body), status, says)

    run(scenario())


def test_bad_saves_and_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, model = made.client, made.model
            await ann.save(model, made.next(), "taken")
            sampler = await ann.save(model, made.next(), "sampler", "save_weights_for_sampler")
            export = await ann.save(model, made.next(), "export", "save_weights_external")
            other = await ann.model(made.session, 1, base_model="small", lora_config={"rank": 8, "seed": 1})
            of_other = await ann.save(other, 1, "w")
            stranger = await made.server.client("eve", org="other")
            theirs_model = await stranger.model(await stranger.session(), base_model="small")
            theirs = await stranger.save(theirs_model, 1, "w")
            cases: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
                (
                    "save_weights",
                    {"path": "taken"},
                    400,
                    ("path", "/weights/taken", "exists already", "overwrite=True"),
                ),
                ("save_weights_for_sampler", {"path": "sampler"}, 400, ("exists already",)),
                ("save_weights_external", {"path": "export"}, 400, ("exists already",)),
                ("save_weights", {"path": "../x"}, 400, ("path", "'../x'", "letters, digits")),
                ("save_weights", {"path": "a/b"}, 400, ("path", "'a/b'")),
                ("save_weights", {"path": "x", "ttl_seconds": 0}, 400, ("ttl_seconds", "0 is not between 1 and")),
                ("save_weights", {"path": "x", "user_metadata": {"a": "x" * 70_000}}, 400, ("user_metadata", "65536")),
                (
                    "save_weights_for_sampler",
                    {"path": "x", "sampling_session_seq_id": 1},
                    400,
                    ("path and sampling_session_seq_id exclude one another",),
                ),
                (
                    "save_weights_external",
                    {"path": "x", "age_encryption_recipients": ["age1nonsense"]},
                    400,
                    ("age_encryption_recipients[0]", "age1nonsense"),
                ),
                ("save_weights_external", {"path": "x", "age_encryption_recipients": []}, 400, ("is empty",)),
                ("load_weights", {"path": "nonsense"}, 400, ("Invalid tinker path 'nonsense'", "tinker://")),
                ("load_weights", {"path": f"tinker://{model}/weights/none"}, 404, ("weights/none does not exist",)),
                ("load_weights", {"path": theirs}, 404, ("is not yours to use",)),
                ("load_weights", {"path": sampler, "optimizer": True}, 400, ("has no optimizer state",)),
                ("load_weights", {"path": export}, 400, ("is an export and cannot be loaded",)),
                ("load_weights", {"path": of_other}, 400, ("does not fit", "rank 8 instead of 4")),
            ]
            for route, fields, status, says in cases:
                submitted = len(made.server.backend.submitted)
                answer = await ann.post(route, {"model_id": model, "seq_id": made.next(), **fields})
                assert len(made.server.backend.submitted) == submitted
                await made.check(answer, status, says)

    run(scenario())


def test_a_copy_does_not_replace_what_has_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann = made.client
            other = await ann.model(made.session, 1, base_model="small")
            source = await ann.save(other, 1, "w")
            await ann.post("optim_step", optim_step(made.model, made.next()))
            await ann.result(await ann.post("forward_backward", forward_backward(made.model, made.next(), GOOD)))
            await ann.result(await ann.post("optim_step", optim_step(made.model, made.next())))
            mine = await ann.save(made.model, made.next(), "w")
            copy = {"source_path": source, "session_id": made.session}
            answer = await ann.post("copy_weights", {**copy, "model_seq_id": 0})
            await made.check(answer, 400, (mine, "exists already"))
            first = await ann.post("copy_weights", {**copy, "model_seq_id": 9})
            again = await ann.post("copy_weights", {**copy, "model_seq_id": 9})
            assert first.json == again.json == {"tinker_path": f"tinker://{made.session}:train:9/weights/w"}

    run(scenario())


def test_bad_models_and_samplers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, session = made.client, made.session
            good = {"base_model": "small", "lora_config": {"rank": 4}}
            stranger = await made.server.client("eve", org="other")
            theirs_model = await stranger.model(await stranger.session(), base_model="small")
            theirs = await stranger.save(theirs_model, 1, "w", "save_weights_for_sampler")
            export = await ann.save(made.model, made.next(), "export", "save_weights_external")
            models: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
                ({"base_model": "huge"}, 400, ("base_model", "'huge'", "served: small, only/sampled, only/trained")),
                ({"base_model": READ_ONLY.name}, 400, ("base_model", "cannot be trained here")),
                ({"lora_config": None}, 400, ("lora_config", "is missing")),
                ({"lora_config": {"rank": 0}}, 422, ("lora_config.rank", "1")),
                ({"lora_config": {"rank": 513}}, 400, ("lora_config.rank", "513", "between 1 and 512")),
                ({"lora_config": {"rank": 4, "seed": 2**63}}, 400, ("lora_config.seed", "64 bits")),
                (
                    {"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
                    400,
                    ("nothing to train",),
                ),
                ({"optimizer_config": {"type": "dimuon"}}, 400, ("optimizer_config", "only adamw")),
                ({"optimizer_config": {"type": "sgd"}}, 422, ("optimizer_config",)),
                ({"model_seq_id": -1}, 422, ("model_seq_id",)),
            ]
            for number, (fields, status, says) in enumerate(models, start=10):
                answer = await ann.post("create_model", {**create_model(session, number, **good), **fields})
                await made.check(answer, status, says)
            samplers: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
                ({"base_model": "huge"}, 400, ("base_model", "'huge'", "served: small")),
                ({"base_model": FROZEN.name}, 400, ("base_model", "cannot be sampled here")),
                ({}, 400, ("give base_model or model_path, one of them",)),
                ({"base_model": "small", "model_path": theirs}, 400, ("one of them",)),
                ({"model_path": theirs}, 404, ("is not yours to use",)),
                ({"model_path": export}, 400, ("is an export",)),
                ({"model_path": "x"}, 400, ("Invalid tinker path 'x'",)),
            ]
            for number, (fields, status, says) in enumerate(samplers, start=10):
                message = {"session_id": session, "sampling_session_seq_id": number, **fields}
                await made.check(await ann.post("create_sampling_session", message), status, says)

    run(scenario())


def prompt(*tokens: int) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


SAMPLES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "an empty prompt": ({"prompt": prompt()}, 400, ("prompt: is empty",)),
    "a token beyond the vocabulary": (
        {"prompt": prompt(1, 100)},
        400,
        ("prompt.chunks[0].tokens[1]", "100", "0 to 99"),
    ),
    "a prompt that fills the context": ({"prompt": prompt(*range(8))}, 400, ("prompt: 8 tokens", "context of 8")),
    "too many new tokens": (
        {"sampling_params": {"max_tokens": 6}},
        400,
        ("sampling_params.max_tokens", "6 is more than the 5"),
    ),
    "too many samples": ({"num_samples": 5}, 400, ("num_samples: 5 is more than 4",)),
    "no samples": ({"num_samples": 0}, 422, ("num_samples", "1")),
    "a negative temperature": (
        {"sampling_params": {"max_tokens": 1, "temperature": -1}},
        400,
        ("sampling_params.temperature", "-1", "0 (greedy) or more"),
    ),
    "a temperature that is not finite": (
        {"sampling_params": {"max_tokens": 1, "temperature": math.nan}},
        422,
        ("SampleRequest",),
    ),
    "an odd top_p": ({"sampling_params": {"max_tokens": 1, "top_p": 0}}, 400, ("sampling_params.top_p", "(0, 1]")),
    "a stop of two kinds": ({"sampling_params": {"max_tokens": 1, "stop": [1, "x"]}}, 422, ("stop",)),
    "no sampling session": ({"sampling_session_id": None}, 400, ("sampling_session_id: is missing",)),
}


def test_bad_samples(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann = made.client
            sampler = await ann.sampler(made.session, 0, base_model="small")
            for number, (fields, status, says) in enumerate(SAMPLES.values()):
                for route in ("asample", "/tinsmith/v1/sample_stream"):
                    message = encoded({**sample(sampler, number), **fields})
                    submitted = len(made.server.backend.submitted)
                    answer = await ann.post(route, message)
                    assert len(made.server.backend.submitted) == submitted
                    await made.check(answer, status, says)
            await ann.result(await ann.post("asample", sample(sampler, 0)))  # the number was not used

    run(scenario())


def test_bad_sessions_queries_and_losses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, session = made.client, made.session
            eve = await made.server.client("eve", org="other")
            await eve.session(project_id="theirs")
            big = {"user_metadata": {"x": "y" * 70_000}}
            graph = {"nodes": [{"op": "output", "name": "o", "target": "o"}]}
            loss = {"session_id": session, "custom_loss_seq_id": 0, "name": "x", "graph": graph}
            cases: list[tuple[str, str, Any, int, tuple[str, ...]]] = [
                ("POST", "create_session", big, 400, ("user_metadata: more than 65536",)),
                ("POST", "create_session", {"project_id": "theirs"}, 400, ("project_id: 'theirs' cannot be used",)),
                ("PUT", f"sessions/{session}/project", {"project_id": "theirs"}, 400, ("project_id",)),
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "bored"}}, 422, ("reason", "bored")),
                ("GET", "sessions?limit=-1", None, 400, ("query: limit", "0")),
                ("GET", "sessions?access_scope=all", None, 400, ("access_scope", "accessible, owned")),
                ("POST", "sessions/search", {"limit": 0}, 422, ("limit", "1")),
                ("GET", "billing/usage/events", None, 400, ("starting_on",)),
                (
                    "GET",
                    "billing/usage/events?starting_on=2027-01-01T00:00:00Z&ending_before=2027-02-01T00:00:00Z",
                    None,
                    400,
                    ("ending_before", "at most 14 days"),
                ),
                (
                    "GET",
                    "billing/usage/events?starting_on=2027-01-01T00:30:00Z&ending_before=2027-01-02T00:00:00Z",
                    None,
                    400,
                    ("starting_on", "not a whole hour"),
                ),
                ("POST", "create_custom_loss", {**loss, "inputs": []}, 400, ("the first input", "logprobs")),
                (
                    "POST",
                    "create_custom_loss",
                    {**loss, "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": []}},
                    400,
                    ("graph: has no output node",),
                ),
                ("POST", "create_custom_loss", {**loss, "inputs": [{"name": "x", "rank": 9}]}, 422, ("rank",)),
                ("PUT", f"training_runs/{made.model}/checkpoints/odd/x/ttl", {"ttl_seconds": 1}, 400, ("kind 'odd'",)),
            ]
            for method, path, message, status, says in cases:
                await made.check(await ann.call(method, path, message), status, says)

    run(scenario())


def test_bodies_that_are_not_what_they_say(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, max_body_bytes=4096, max_unpacked_bytes=65536) as made:
            ann = made.client
            good = msgspec.json.encode(forward_backward(made.model, 1, GOOD))
            cases: list[tuple[bytes, dict[str, str], int, tuple[str, ...]]] = [
                (b"", {}, 404, ("training run ''",)),
                (b"{", {}, 422, ("forward_backward",)),
                (b"[]", {}, 422, ("forward_backward",)),
                (b"\xff\xfe", {}, 422, ("forward_backward",)),
                (b'{"a":' + b"[" * 4000, {}, 422, ("nested too deeply",)),
                (good, {"content_encoding": "gzip"}, 415, ("content-encoding 'gzip'", "send zstd")),
                (good, {"content_encoding": "zstd"}, 422, ("not valid zstd",)),
                (zstd.compress(good)[:-3], {"content_encoding": "zstd"}, 422, ("zstd",)),
                (b" " * 5000, {}, 413, ("body: larger than the allowed 4096 bytes",)),
                (
                    zstd.compress(b" " * 10**6),
                    {"content_encoding": "zstd"},
                    413,
                    ("unpacks to more than the allowed 65536 bytes",),
                ),
            ]
            for body, headers, status, says in cases:
                await made.check(await ann.post("forward_backward", body, **headers), status, says)
            answer = await ann.post("optim_step", b"\x0a\x00", content_type="application/x-protobuf")
            await made.check(answer, 415, ("reads JSON, not protobuf",))

    run(scenario())


def test_a_bomb_costs_no_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, max_unpacked_bytes=2**20) as made:
            whole = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
            stream = zstandard.ZstdCompressor(level=19, write_content_size=False).compressobj()
            silent = stream.compress(bytes(2**28)) + stream.flush()  # one that does not say how large it gets
            for bomb in (whole, silent):
                assert len(bomb) < 2**20
                tracemalloc.start()
                answer = await made.client.post("forward_backward", bomb, content_encoding="zstd")
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert peak < 2**25
                await made.check(answer, 413, ("unpacks to more than the allowed 1048576 bytes",))

    run(scenario())


def test_a_full_disk_cap_refuses_saves_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, disk_cap_bytes=1) as made:
            first = await made.client.save(made.model, made.next(), "one")
            over = await made.client.post(
                "save_weights", {"model_id": made.model, "seq_id": made.next(), "path": "two"}
            )
            await made.check(over, 400, ("which is all this server allows", "delete some"))
            name = first.rpartition("/")[2]
            await made.client.call("DELETE", f"training_runs/{made.model}/checkpoints/weights/{name}")
            await made.client.save(made.model, made.next(), "two")

    run(scenario())

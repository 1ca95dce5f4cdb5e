"""Bad passes, steps and samples: each is refused with a status that clients do not retry and a text that names the
place, the value and what is allowed; none reaches the backend, and none holds up what comes behind it."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec
from support.in_process import (
    datum,
    forward_backward,
    run,
    sample,
)
from support.refusals import GOOD, PPO, bench, encoded, floats, ints

from tinsmith.wire.codecs.json_codec import decode
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.training import ForwardBackwardRequest

PASSES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "no data": ({"data": []}, 400, ("data: is empty",)),
    "an unknown loss": ({"loss_fn": "hinge"}, 422, ("loss_fn", "cross_entropy", "ppo")),
    "a loss without a definition": ({"loss_fn": "stable_reinforce"}, 400, ("loss_fn", "not available on this server")),
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
        ("data[0]", "loss_fn_inputs['target_tokens']", "token ids must be int64", "float32"),
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
    "too many datums": ({"data": [GOOD] * 9}, 400, ("data: 9 datums", "the limit is 8")),
    "too many tokens": ({"data": [datum(*range(8))] * 4}, 400, ("data: 32 tokens", "the limit is 30")),
    "a loss that was not uploaded": (
        {"loss_fn": "custom", "loss_fn_config": {"loss_id": "loss-none"}},
        404,
        ("custom loss 'loss-none' does not exist",),
    ),
    "a custom loss without an id": ({"loss_fn": "custom"}, 400, ("loss_fn_config", "loss_id")),
}


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
            await made.check(answer, 422, ("ForwardBackwardRequest: ends inside",))

    run(scenario())


STEPS: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "a rate below 0": ({"adam_params": {"learning_rate": -1}}, 400, ("adam_params.learning_rate", "-1", "0 or more")),
    "a beta of 1": ({"adam_params": {"beta1": 1.0}}, 400, ("adam_params.beta1", "1.0", "at least 0 and below 1")),
    "a negative eps": ({"adam_params": {"eps": -1e-9}}, 400, ("adam_params.eps", "-1e-09", "above 0")),
    "a rate that overflows": (
        {"adam_params": {"learning_rate": 3e38}},
        400,
        ("learning_rate", "3e+38", "at most 1e+15"),
    ),
    "a decay that overflows": (
        {"adam_params": {"weight_decay": 1e38}},
        400,
        ("weight_decay", "1e+38", "at most 1e+15"),
    ),
    "an eps of 0": ({"adam_params": {"eps": 0}}, 400, ("adam_params.eps", "0", "above 0")),
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


def prompt(*tokens: int) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


SAMPLES: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
    "an empty prompt": ({"prompt": prompt()}, 400, ("prompt: is empty",)),
    "a token beyond the vocabulary": (
        {"prompt": prompt(1, 100)},
        400,
        ("prompt.chunks[0].tokens[1]", "100", "0 to 99"),
    ),
    "a prompt that fills the context": (
        {"prompt": prompt(*range(8))},
        400,
        ("prompt", "8 tokens leave no room", "maximum context length is 8 tokens"),
    ),
    "too many new tokens": (
        {"sampling_params": {"max_tokens": 6}},
        400,
        ("sampling_params.max_tokens", "6 is more than the 5"),
    ),
    "too many samples": ({"num_samples": 5}, 400, ("num_samples: 5 is more than the limit of 4",)),
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
    "an odd top_p": (
        {"sampling_params": {"max_tokens": 1, "top_p": 0}},
        400,
        ("sampling_params.top_p", "above 0 and at most 1"),
    ),
    "the last logprobs of a prompt of which none are asked": (
        {"prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2},
        400,
        ("prompt_logprobs_last_n: 1", "prompt_logprobs is not"),
    ),
    "a stop of two kinds": ({"sampling_params": {"max_tokens": 1, "stop": [1, "x"]}}, 422, ("stop",)),
    "no sampling session": ({"sampling_session_id": None}, 400, ("sampling_session_id: missing",)),
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

"""Checkpoints of strangers, with digests that are right: each is refused by the job that names it, and nobody else
notices."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from support.jobs import Jobs
from support.tiny_engine import NAME, bodies, executor, refusal, same_bits, sampled, state_of, train

from tinsmith.engine.checkpoints.format import ADAPTER, ADAPTER_CONFIG, MANIFEST, Manifest, read_manifest
from tinsmith.engine.ipc import Failed, Finished
from tinsmith.engine.protocol import JobFailedError
from tinsmith.engine.worker.torch_executor import TorchExecutor
from tinsmith.wire.codecs.proto_sampling import decode_response

PROBE = [5, 9, 2, 33, 7]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(engine: TorchExecutor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as the engine writes it."""
    jobs, folder = Jobs(NAME), tmp_path_factory.mktemp("good") / "c"
    bodies(engine, [jobs.create(rank=2), *jobs.steps(2), jobs.save(folder, optimizer=False)])
    return folder


def forged(good: Path, out: Path, tensors: bytes | None = None, info: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint with another content and the digests of that."""
    out.mkdir()
    files = {name: (good / name).read_bytes() for name in (ADAPTER, ADAPTER_CONFIG)}
    if tensors is not None:
        files[ADAPTER] = tensors
    for name, data in files.items():
        (out / name).write_bytes(data)
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    values = json.loads((good / MANIFEST).read_text()) | {"files": listed}
    values["info"] |= info or {}
    write_manifest(out, values)
    return out


def write_manifest(directory: Path, values: dict[str, Any]) -> None:
    """With the right digest where it can have one."""
    with contextlib.suppress(msgspec.ValidationError):
        values["digest"] = msgspec.convert(values, Manifest).own_digest()
    (directory / MANIFEST).write_text(json.dumps(values))


def header(entries: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


FILES: dict[str, bytes] = {
    "nothing": b"",
    "a length of all there is": b"\xff" * 8,
    "a length beyond the file": header({}, length=10**6),
    "a length of 2**63": struct.pack("<Q", 2**63) + b"{}",
    "no JSON": header(b"\x00" * 64),
    "a deep header": header(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "a list": header([1, 2]),
    "overlapping tensors": header({"a": entry(), "b": entry()}, bytes(16)),
    "offsets beyond the file": header({"a": entry(offsets=(0, 2**62))}, bytes(16)),
    "offsets backwards": header({"a": entry(offsets=(16, 0))}, bytes(16)),
    "negative offsets": header({"a": entry(offsets=(-16, 0))}, bytes(16)),
    "a shape that overflows": header({"a": entry(shape=(2**40, 2**40))}, bytes(16)),
    "a shape of no number": header({"a": entry(shape=("x",))}, bytes(16)),
    "an unknown dtype": header({"a": entry(dtype="F3")}, bytes(16)),
    "an odd dtype": header({"a": entry(dtype="F8_E8M0", shape=(16,))}, bytes(16)),
    "a dtype of half a byte": header({"a": entry(dtype="F4", shape=(32,))}, bytes(16)),
    "complex numbers": header({"a": entry(dtype="C64", shape=(2,))}, bytes(16)),
    "NUL in a name": header({"\x00": entry()}, bytes(16)),
    "a long name": header({"x" * 10**5: entry()}, bytes(16)),
    "a hole": header({"a": entry(offsets=(16, 32))}, bytes(32)),
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_files_that_hold_no_weights_are_refused(
    engine: TorchExecutor, good: Path, tmp_path: Path, content: bytes
) -> None:
    assert_refused(engine, forged(good, tmp_path / "bad", content))


def changed(change: Callable[[Tensors, str], None]) -> Callable[[Path], bytes]:
    """The good file with something else in its first tensor."""

    def make(good: Path) -> bytes:
        tensors = safetensors.torch.load((good / ADAPTER).read_bytes())
        change(tensors, sorted(tensors)[0])
        return safetensors.torch.save(tensors)

    return make


def fill(value: float) -> Callable[[Path], bytes]:
    def change(tensors: Tensors, name: str) -> None:
        tensors[name][0, 0] = value

    return changed(change)


def cast(dtype: torch.dtype) -> Callable[[Path], bytes]:
    return changed(lambda tensors, name: tensors.update({name: torch.ones_like(tensors[name]).to(dtype)}))


WEIGHTS: dict[str, Callable[[Path], bytes]] = {
    "NaN": fill(float("nan")),
    "infinity": fill(float("-inf")),
    "integers": cast(torch.int64),
    "truth values": cast(torch.bool),
    "doubles": cast(torch.float64),
    "complex numbers": cast(torch.complex64),
    "a tensor more": changed(lambda tensors, name: tensors.update({"more": torch.zeros(2, 2)})),
    "a tensor less": changed(lambda tensors, name: tensors.__delitem__(name)),
    "another shape": changed(lambda tensors, name: tensors.update({name: torch.zeros(2, 3)})),
    "no dimensions": changed(lambda tensors, name: tensors.update({name: torch.zeros(())})),
    "no numbers": changed(lambda tensors, name: tensors.update({name: torch.zeros(0, 2)})),
}


@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_weights_that_no_training_gave_are_refused(
    engine: TorchExecutor, good: Path, tmp_path: Path, content: Callable[[Path], bytes]
) -> None:
    assert_refused(engine, forged(good, tmp_path / "bad", content(good)), "user")


@pytest.mark.parametrize(
    "info",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": 512},
        {"rank": 2**40},
        {"rank": 10**400},
        {"rank": "2"},
        {"alpha": 1e308},
        {"alpha": 1e400},
        {"alpha": -1e300},
        {"seed": 2**80},
        {"base_model": "x" * 10**4},
        {"base_model": "a\x00b"},
        {"base_model": NAME + "/../other"},
        {"more": 1},
    ],
    ids=str,
)
def test_manifests_that_claim_something_else_are_refused(
    engine: TorchExecutor, good: Path, tmp_path: Path, info: dict[str, Any]
) -> None:
    assert_refused(engine, forged(good, tmp_path / "bad", info=info))


@pytest.mark.parametrize(
    "switches", [{"train_attn": False}, dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False)]
)
def test_an_adapter_of_other_modules_than_it_claims_is_not_sampled(
    engine: TorchExecutor, good: Path, tmp_path: Path, switches: dict[str, bool]
) -> None:
    bad = forged(good, tmp_path / "bad", info=switches)
    with pytest.raises(JobFailedError) as caught:
        engine.add_sample(Jobs(NAME).sample(PROBE, directory=bad, key=str(bad)), False)
    assert caught.value.category == "user"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1e999}',
        '{"format": ' + "9" * 10_000 + "}",
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        "[" * 200_000 + "]" * 200_000,
        '{"format": 1, "info": ' + "[" * 20_000 + "]" * 20_000 + "}",
        '{"format": 1, "files": {' + ",".join(f'"{n}": null' for n in range(20_000)) + "}}",
    ],
    ids=lambda text: f"{text[:24]}{len(text)}",
)
def test_manifests_that_are_none_are_refused(engine: TorchExecutor, good: Path, tmp_path: Path, text: str) -> None:
    bad = forged(good, tmp_path / "bad")
    (bad / MANIFEST).write_text(text)
    assert_refused(engine, bad)


@pytest.mark.parametrize("name", ["/dev/zero", "../../secret", "a\x00b", "other.txt", ""])
def test_a_manifest_names_no_other_files(engine: TorchExecutor, good: Path, tmp_path: Path, name: str) -> None:
    bad = forged(good, tmp_path / "bad")
    values = json.loads((bad / MANIFEST).read_text())
    values["files"][name] = {"bytes": 0, "sha256": "00"}
    write_manifest(bad, values)
    error = assert_refused(engine, bad)
    assert "which is not a file of a checkpoint" in str(error)


def assert_refused(engine: TorchExecutor, bad: Path, category: str | None = None) -> JobFailedError:
    """By a sample, a new model and a load alike, in few words, and with nothing changed."""
    jobs = Jobs(NAME)
    bodies(engine, [jobs.create(rank=2), *jobs.steps(1)])
    before = state_of(engine, jobs.model_id)
    errors = [
        refusal(engine, jobs.load(bad, optimizer=False)),
        refusal(engine, Jobs(NAME).create(rank=2, directory=bad)),
    ]
    with pytest.raises(JobFailedError) as caught:
        engine.add_sample(jobs.sample(PROBE, directory=bad, key=str(bad)), False)
    for error in (*errors, caught.value):
        assert error is not None
        assert category is None or error.category == category
        assert len(str(error)) < 1000
        assert str(bad.parent) not in str(error), "where files are is nobody's business"
    assert same_bits(before, state_of(engine, jobs.model_id))
    train(engine, jobs.unload())
    return caught.value


def test_half_precision_is_taken_as_it_is(engine: TorchExecutor, good: Path, tmp_path: Path) -> None:
    tensors = safetensors.torch.load((good / ADAPTER).read_bytes())
    half = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    path = forged(good, tmp_path / "half", safetensors.torch.save(half))
    assert read_manifest(path).info.rank == 2
    jobs = Jobs(NAME)
    train(engine, jobs.create(rank=2, directory=path))
    state = state_of(engine, jobs.model_id)
    assert all(torch.equal(state[f"p.{name}"], tensor.float()) for name, tensor in half.items())


def test_weights_that_overflow_fail_their_own_samples_only(home: Path, good: Path, tmp_path: Path) -> None:
    """Finite and far too large: what they give is not finite, in the same step as everybody else's tokens."""
    engine = executor(home)
    tensors = {
        name: torch.full_like(tensor, 3e38)
        for name, tensor in safetensors.torch.load((good / ADAPTER).read_bytes()).items()
    }
    huge = forged(good, tmp_path / "huge", safetensors.torch.save(tensors))
    mine, yours = Jobs(NAME, tenant="mine"), Jobs(NAME, tenant="yours")
    options: dict[str, Any] = {"max_tokens": 12, "stop": [], "seed": 3}
    alone = decode_response(sampled(engine, mine.sample(PROBE, directory=good, key="good", **options))[-1].done.body)
    asked = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "prompt_alt_tokens_k": 2}
    bad = [
        yours.sample(PROBE, directory=huge, key="huge", **options),
        yours.sample(PROBE, directory=huge, key="huge", fields=asked, top_k=5, top_p=0.5, **options),
        yours.sample(PROBE, directory=huge, key="huge", fields=asked, **{**options, "max_tokens": 0}),
    ]
    fine = mine.sample(PROBE, directory=good, key="good", **options)
    for sample in (*bad, fine):
        engine.add_sample(sample, False)
    ended: dict[str, Any] = {}
    for _ in range(60):
        ended |= {event.job_id: event for event in engine.step(frozenset({"mine", "yours"})).events}
    for sample in bad:
        answer = ended[sample.job_id]
        assert isinstance(answer, Failed)
        assert (answer.category, "the adapter's output is not finite" in answer.message) == ("user", True)
    answer = ended[fine.job_id]
    assert isinstance(answer, Finished)
    drawn = decode_response(answer.done.body).sequences[0]
    assert (drawn.tokens, drawn.logprobs) == (alone.sequences[0].tokens, alone.sequences[0].logprobs)

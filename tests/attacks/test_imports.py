"""Imported checkpoints whose sender lies about them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.importing import part_of, saved, send_parts, upload
from support.in_process import Client, Server, forward_backward, optim_step, run, sample, serving

from tinsmith.engine.protocol import Sample
from tinsmith.errors import InvalidInputError
from tinsmith.server.checkpoints.import_checkpoint import read_request
from tinsmith.store.rows import CheckpointRow

UPLOAD = "0123456789abcdef" * 2
ADAPTER = "adapter_model.safetensors"
Files = dict[str, bytes]


def digests_of(files: Files) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


async def trained(server: Server, client: Client, rate: float) -> dict[str, Any]:
    """The import of a checkpoint whose weights depend on the rate."""
    session = await client.session()
    model = await client.model(session)
    await client.result(await client.post("forward_backward", forward_backward(model, 1)))
    await client.result(await client.post("optim_step", optim_step(model, 2, learning_rate=rate)))
    await client.save(model, 3, "own")
    (row,) = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
    files = {file.name: file.read_bytes() for file in Path(row.directory).iterdir()}
    return {**await saved(server, client), "files": files}


async def sampled(client: Client, path: str) -> bytes:
    session = await client.session()
    sampler = await client.sampler(session, model_path=path)
    asked = sample(sampler, 1, sampling_params={"max_tokens": 32, "seed": 1, "stop": []})
    return (await client.result(await client.post("asample", asked))).body


def test_weights_under_the_digests_of_others_poison_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "alone") as server:
            ann = await server.client("ann")
            real = await trained(server, ann, 0.1)
            expected = await sampled(ann, (await upload(ann, real)).json["path"])
        async with serving(tmp_path / "together") as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            false = await trained(server, eve, 3.0)
            answer = await upload(eve, {**false, "digests": digests_of(real["files"])})
            if answer.status == 200:
                await sampled(eve, answer.json["path"])
            else:
                assert (answer.status, answer.json["field"]) == (400, "digests")
            own = (await upload(eve, false)).json["path"]
            assert await sampled(eve, own) != expected
            assert await sampled(ann, (await upload(ann, real)).json["path"]) == expected

    run(scenario())


def test_organisations_never_share_the_key_of_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            message = await saved(server, ann)
            for client in (ann, eve):
                await sampled(client, (await upload(client, message)).json["path"])
            keys = [job.adapter_key for job in server.backend.submitted if isinstance(job, Sample)]
            assert len(keys) == len(set(keys)) == 2

    run(scenario())


def test_a_digest_is_that_of_the_files_whatever_was_claimed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            plain = (await upload(ann, message)).json["path"]
            claimed = await upload(ann, {**message, "digests": dict.fromkeys(message["files"], "0" * 64)})
            assert claimed.status == 400
            false_names = dict.fromkeys(("a", "b"), "f" * 64)
            other = (await upload(ann, {**message, "digests": false_names})).json["path"]
            rows = [(await server.rows(CheckpointRow, "checkpoint", path=path))[0] for path in (plain, other)]
            assert rows[0].digest == rows[1].digest

    run(scenario())


def test_an_upload_that_changes_while_it_is_imported_is_what_was_checked(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            files = message.pop("files")
            for number in range(25):
                name = f"{number:032d}"
                digests = await send_parts(ann, name, files, size=100_000)
                importing = upload(ann, {**message, "upload": name, "digests": digests})
                changes = [part_of(ann, name, ADAPTER, 300, bytes([i])) for i in range(3)]
                answer, *_ = await asyncio.gather(importing, *changes)
                assert answer.status in (200, 400)
                if answer.status == 200:
                    (row,) = await server.rows(CheckpointRow, "checkpoint", path=answer.json["path"])
                    kept = {file.name: file.read_bytes() for file in Path(row.directory).iterdir()}
                    assert digests_of(kept) == digests
                for place in (tmp_path / "data" / "uploads").iterdir():
                    shutil.rmtree(place)

    run(scenario())


def with_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Files], Files]:
    def changed(files: Files) -> Files:
        manifest = json.loads(files["manifest.json"])
        made = change(manifest)
        data = made if isinstance(made, bytes) else json.dumps(manifest).encode()
        return {**files, "manifest.json": data}

    return changed


def listed(**names: Any) -> Callable[[Files], Files]:
    return with_manifest(lambda manifest: manifest["files"].update(names))


def with_tensors(table: Any, data: bytes = b"", length: int | None = None) -> Callable[[Files], Files]:
    """Files whose adapter has this table of tensors, and which the manifest lists as they are."""

    def changed(files: Files) -> Files:
        header = table if isinstance(table, bytes) else json.dumps(table).encode()
        adapter = struct.pack("<Q", len(header) if length is None else length) + header + data
        manifest = json.loads(files["manifest.json"])
        manifest["files"][ADAPTER] = hashlib.sha256(adapter).hexdigest()
        return {**files, ADAPTER: adapter, "manifest.json": json.dumps(manifest).encode()}

    return changed


def tensor(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DEEP = b'{"files":' + b'{"a":' * 100_000

HOSTILE: dict[str, Callable[[Files], Files]] = {
    "a device": listed(**{"/dev/zero": "00"}),
    "a file of the server": listed(**{"../../../secret": "00"}),
    "a NUL": listed(**{"a\0b": "00"}),
    "half of a pair": listed(**{"\ud800": "00"}),
    "itself": listed(**{"manifest.json": "00"}),
    "another digest": listed(**{ADAPTER: "0" * 64}),
    "another length": with_manifest(
        lambda manifest: manifest["files"].update({ADAPTER: {"sha256": manifest["files"][ADAPTER], "bytes": 1}})
    ),
    "a file less": with_manifest(lambda manifest: manifest["files"].pop(ADAPTER)),
    "no files": with_manifest(lambda manifest: manifest.pop("files")),
    "a list": with_manifest(lambda manifest: b"[]"),
    "deep": with_manifest(lambda manifest: DEEP),
    "deep elsewhere": with_manifest(lambda manifest: b'{"files":{},"x":' + b"[" * 100_000),
    "large": with_manifest(lambda manifest: b" " * 2_000_000 + json.dumps(manifest).encode()),
    "not UTF-8": with_manifest(lambda manifest: b'{"files":{"\xff":""}}'),
    "another rank": with_manifest(lambda manifest: manifest["lora"].update(rank=512)),
    "another model": with_manifest(lambda manifest: manifest.update(base_model="other")),
    "another alpha inside": with_manifest(lambda manifest: manifest.update(info={"alpha": 1e30})),
    "a deep config": lambda files: with_manifest(
        lambda manifest: manifest["files"].update(
            {"adapter_config.json": hashlib.sha256(b'{"a":' + b"[" * 100_000).hexdigest()}
        )
    )({**files, "adapter_config.json": b'{"a":' + b"[" * 100_000}),
    "no tensors": with_tensors({}),
    "a table without end": with_tensors({}, length=2**63),
    "a table beyond the end": with_tensors({}, length=3),
    "an unknown type": with_tensors({"a": tensor([1], [0, 4], "F33")}, bytes(4)),
    "an unknown type of nothing": with_tensors({"a": tensor([0], [0, 0], "F33")}),
    "another shape": with_tensors({"a": tensor([2], [0, 4])}, bytes(4)),
    "a negative shape": with_tensors({"a": tensor([-1, -1], [0, 4])}, bytes(4)),
    "an endless shape": with_tensors({"a": tensor([2**62] * 8, [0, 4])}, bytes(4)),
    "a shape of many digits": with_tensors(
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,4]}}'
    ),
    "many dimensions": with_tensors({"a": tensor([1] * 1000, [0, 4])}, bytes(4)),
    "a hole": with_tensors({"a": tensor([1], [4, 8])}, bytes(8)),
    "two in one place": with_tensors({"a": tensor([1], [0, 4]), "b": tensor([1], [0, 4])}, bytes(4)),
    "more than there is": with_tensors({"a": tensor([2], [0, 8])}, bytes(4)),
    "less than there is": with_tensors({"a": tensor([1], [0, 4])}, bytes(8)),
    "a name that writes": with_tensors({"a\x1b[2J": tensor([1], [0, 4])}, bytes(4)),
    "a long name": with_tensors({"a" * 100_000: tensor([1], [0, 4])}, bytes(4)),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("in_parts", [False, True], ids=["at-once", "in-parts"])
def test_files_that_lie_are_refused_when_they_come(
    tmp_path: Path, change: Callable[[Files], Files], in_parts: bool
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            files = change(message.pop("files"))
            before = sorted((tmp_path / "data" / "checkpoints").rglob("*/manifest.json"))
            if in_parts:
                digests = await send_parts(ann, UPLOAD, files, size=2**20)
                answer = await upload(ann, {**message, "upload": UPLOAD, "digests": digests})
            else:
                answer = await upload(ann, {**message, "files": files})
            assert (answer.status, answer.json["field"]) == (400, "files"), answer
            assert len(answer.body) < 2000
            assert sorted((tmp_path / "data" / "checkpoints").rglob("*/manifest.json")) == before

    run(scenario())


def test_open_uploads_are_counted_by_organisation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, bob = await server.client("ann"), await server.client("bob")
            eve = await server.client("eve", org="other")
            answers = [await part_of(client, f"{i:032d}", ADAPTER, 0, b"x") for i in range(20) for client in (ann, bob)]
            refused = [answer for answer in answers if answer.status != 200]
            assert len(answers) - len(refused) == 16
            assert {answer.status for answer in refused} == {429}
            assert "unfinished uploads" in refused[0].detail
            assert (await part_of(ann, f"{0:032d}", ADAPTER, 1, b"y")).status == 200, "what was begun goes on"
            assert (await part_of(eve, UPLOAD, ADAPTER, 0, b"x")).status == 200

    run(scenario())


MANY = 3_000_000
PADDED = {
    "files": b"\xdf" + MANY.to_bytes(4, "big") + b"\xa1a\xc4\x00" * MANY,
    "digests": b"\xdf" + MANY.to_bytes(4, "big") + b"\xa1a\xa0" * MANY,
    "name": b"\xdd" + MANY.to_bytes(4, "big") + b"\x00" * MANY,
    "rank": b"\x81\xa1a\x81\xa1a\x00",
    "alpha": b"\xdb\xff\xff\xff\xffx",
    "base_model": b"\xc7\x01\x00\x00",
}


@pytest.mark.parametrize("name", PADDED)
def test_a_body_of_countless_entries_is_refused_before_it_is_decoded(name: str) -> None:
    """A decoder would keep Python's lock for a second, in whatever thread it runs."""
    body = b"\x81" + bytes([0xA0 | len(name)]) + name.encode() + PADDED[name]
    began = time.thread_time()
    with pytest.raises(InvalidInputError, match="MessagePack"):
        read_request(body)
    assert time.thread_time() - began < 0.01


def test_more_fields_than_there_are_and_bytes_behind_the_end_are_refused() -> None:
    for body in (b"\xdf\x00\x10\x00\x00" + b"\xa1a\x00" * 2**20, b"\x80\x00", b"", b"\x91\x00", b"\xde\x00"):
        with pytest.raises(InvalidInputError, match="MessagePack"):
            read_request(body)


@pytest.mark.parametrize("offset", [2**62, 2**64, 10**30, -(10**30)])
def test_offsets_are_bounded(tmp_path: Path, offset: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer = await part_of(await server.client("ann"), UPLOAD, ADAPTER, offset, b"x")
            assert answer.status == 400
            assert "offset" in answer.detail

    run(scenario())

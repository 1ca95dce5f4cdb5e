"""Imported checkpoints: stored completely, owned, loadable; and everything that is refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.importing import part_of, saved, send_parts, upload
from support.in_process import BASE, Client, forward_backward, optim_step, run, serving

from tinsmith.store.rows import AuditRow, CheckpointRow

UPLOAD = "0123456789abcdef" * 2


async def continued(client: Client, path: str) -> Any:
    """What a run that starts from a checkpoint, optimizer included, measures."""
    session = await client.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    await client.result(await client.post("load_weights", load))
    model = f"{session}:train:0"
    promise = await client.post("forward_backward", forward_backward(model, 1))
    await client.result(promise)
    return (await client.result(await client.post("optim_step", optim_step(model, 2)))).json


def test_a_checkpoint_comes_back_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            answer = await upload(ann, message)
            assert answer.status == 200, answer
            path = answer.json["path"]
            listed = (await ann.get("checkpoints")).json["checkpoints"]
            (entry,) = [item for item in listed if item["tinker_path"] == path]
            assert entry["checkpoint_type"] == "training"
            assert entry["size_bytes"] == sum(map(len, message["files"].values()))
            info = (await ann.post("weights_info", {"tinker_path": path})).json
            assert (info["base_model"], info["lora_rank"]) == (BASE, message["rank"])
            original = next(item["tinker_path"] for item in listed if item["tinker_path"] != path)
            assert await continued(ann, path) == await continued(ann, original)
            period = {"org_id": "acme", "since": 0.0, "until": server.clock() + 1, "limit": 9}
            events = [row.event for row in await server.rows(AuditRow, "audit_of_org", **period)]
            assert "checkpoint_imported" in events
            eve = await server.client("eve", org="other")
            assert (await eve.post("weights_info", {"tinker_path": path})).status == 404

    run(scenario())


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"name": "../x"}, 400, "name: '../x' cannot name a checkpoint"),
        ({"name": ".x"}, 400, "cannot name a checkpoint"),
        ({"base_model": "nope"}, 400, "nope"),
        ({"rank": 0}, 400, "rank: 0 is not between 1 and 512"),
        ({"rank": 513}, 400, "rank: 513 is not between 1 and 512"),
        ({"alpha": 0.0}, 400, "alpha: 0.0 is not a number above 0"),
        ({"alpha": float("nan")}, 400, "alpha: nan is not a number above 0"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, 400, "there is no adapter"),
        ({"files": {}}, 400, "is missing (a checkpoint has"),
        ({"files": {"../../secret": b"x"}}, 400, "'../../secret' is not one of them"),
        ({"surprise": 1}, 400, "surprise"),
        ({"rank": "four"}, 400, "rank"),
    ],
)
def test_what_is_wrong_is_named_and_nothing_is_kept(
    tmp_path: Path, change: dict[str, Any], status: int, says: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            before = sorted(tmp_path.rglob("*"))
            answer = await upload(ann, {**message, **change})
            assert answer.status == status, answer
            assert says in answer.detail
            assert sorted(tmp_path.rglob("*")) == before
            assert len((await ann.get("checkpoints")).json["checkpoints"]) == 1

    run(scenario())


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"{}", msgspec.msgpack.encode([1, 2]), b"\xdd\xff\xff\xff\xff"])
def test_bodies_that_are_no_message(tmp_path: Path, body: bytes) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer = await upload(await server.client("ann"), body)
            assert (answer.status, answer.json["code"]) == (400, "invalid_input")

    run(scenario())


def test_limits_and_scopes_hold(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=20_000) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            sampler = await server.client("sam", scopes=("sample", "read"))
            assert (await upload(sampler, message)).status == 403
            large = {**message, "files": {**message["files"], "optimizer.safetensors": bytes(30_000)}}
            assert (await upload(ann, large)).status == 413
        async with serving(tmp_path / "full", disk_cap_bytes=1) as server:
            ann = await server.client("ann")
            assert (await upload(ann, message)).status == 200
            assert "and this server allows" in (await upload(ann, message)).detail

    run(scenario())


def test_files_that_are_damaged_later_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            path = (await upload(ann, await saved(server, ann))).json["path"]
            (row,) = await server.rows(CheckpointRow, "checkpoint", path=path)
            (Path(row.directory) / "adapter_model.safetensors").write_bytes(b"damaged")
            session = await ann.session()
            load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
            promise = await ann.post("load_weights", load)
            while (result := await ann.poll(promise)).status == 408:
                pass
            assert "is damaged" in result.json["error"]
            assert result.json["category"] == "user"

    run(scenario())


def test_uploads_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            answers = await asyncio.gather(*(upload(ann, message) for _ in range(5)))
            assert len({answer.json["path"] for answer in answers}) == 5

    run(scenario())


@pytest.mark.parametrize("in_parts", [False, True], ids=["at-once", "in-parts"])
def test_an_import_that_is_sent_again_counts_once(tmp_path: Path, in_parts: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, ben = await server.client("ann"), await server.client("ben")
            message = await saved(server, ann)
            if in_parts:
                message |= {"upload": UPLOAD, "digests": await send_parts(ann, UPLOAD, message.pop("files"))}
            answers = await asyncio.gather(*(upload(ann, message, x_idempotency_key="one") for _ in range(3)))
            answers.append(await upload(ann, message, x_idempotency_key="one"))
            assert [answer.status for answer in answers] == [200] * 4, answers
            assert len({answer.json["path"] for answer in answers}) == 1
            assert len((await ann.get("checkpoints")).json["checkpoints"]) == 2, "the saved one and this"
            assert await continued(ann, answers[0].json["path"])
            if not in_parts:
                other = {**message, "files": {**message["files"], "optimizer.safetensors": b"other"}}
                refused = await upload(ann, other, x_idempotency_key="one")
                assert "this key was sent before with other files" in refused.detail
                own = await upload(ben, message, x_idempotency_key="one")
                assert own.json["path"] != answers[0].json["path"], "keys are each user's own"

    run(scenario())


def test_an_adapter_larger_than_a_body_comes_in_parts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=3000) as server:
            ann = await server.client("ann")
            message = await saved(server, ann)
            files, facts = message.pop("files"), message
            padded = {**message, "files": {**files, "manifest.json": bytes(3000)}}
            assert (await upload(ann, padded)).status == 413, "too large for one body"
            digests = await send_parts(ann, UPLOAD, files)
            answer = await upload(ann, {**facts, "upload": UPLOAD, "digests": digests})
            assert answer.status == 200, answer
            listed = (await ann.get("checkpoints")).json["checkpoints"]
            (entry,) = [item for item in listed if item["tinker_path"] == answer.json["path"]]
            assert entry["size_bytes"] == sum(map(len, files.values()))
            original = next(item["tinker_path"] for item in listed if item["tinker_path"] != entry["tinker_path"])
            assert await continued(ann, entry["tinker_path"]) == await continued(ann, original)
            assert list((tmp_path / "data" / "uploads").iterdir()) == []
            again = await upload(ann, {**facts, "upload": UPLOAD, "digests": digests})
            assert again.status == 400
            assert "upload: nothing was uploaded" in again.detail

    run(scenario())


def test_an_upload_that_is_not_what_was_said_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, ben = await server.client("ann"), await server.client("ben")
            message = await saved(server, ann)
            files, facts = message.pop("files"), message
            digests = await send_parts(ann, UPLOAD, files)
            whole = {**facts, "upload": UPLOAD, "digests": digests}
            wrong = {**digests, "manifest.json": "0" * 64}
            for message, says in (
                ({**whole, "digests": wrong}, "digests: the SHA-256 of manifest.json differs from what was uploaded"),
                ({**whole, "digests": {}}, "is missing (a checkpoint has"),
                ({**whole, "files": files}, "upload: give files or upload, not both"),
                ({**whole, "digests": {**digests, "x": ""}}, "'x' is not one of them"),
            ):
                answer = await upload(ann, message)
                assert answer.status == 400
                assert says in answer.detail
            if "optimizer.safetensors" in digests:
                less = {name: digest for name, digest in digests.items() if name != "optimizer.safetensors"}
                assert "but digests names" in (await upload(ann, {**whole, "digests": less})).detail
            assert "upload: nothing was uploaded" in (await upload(ben, whole)).detail, "it is Ann's"
            assert (await upload(ann, whole)).status == 200

    run(scenario())


@pytest.mark.parametrize(
    ("name", "file", "offset", "says"),
    [
        ("short", "manifest.json", 0, "upload: the name must have 16 to 64 characters"),
        ("0" * 32, "../../etc/passwd", 0, "file: '../../etc/passwd' is not one of"),
        ("0" * 32, "manifest.json", 5, "offset: 5 is not between 0 and 0, where manifest.json ends"),
        ("0" * 32, "manifest.json", -1, "offset: -1 is not between 0 and 0"),
        ("0" * 32, "manifest.json", "x", "offset"),
    ],
)
def test_parts_that_are_refused(tmp_path: Path, name: str, file: str, offset: int | str, says: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer = await part_of(await server.client("ann"), name, file, offset, b"x")
            assert answer.status == 400
            assert says in answer.detail

    run(scenario())


def test_limits_of_parts_are_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=100, disk_cap_bytes=250) as server:
            ann = await server.client("ann")
            assert (await part_of(ann, UPLOAD, "manifest.json", 0, bytes(101))).status == 413
            for offset in (0, 100):
                assert (await part_of(ann, UPLOAD, "manifest.json", offset, bytes(100))).status == 200
            again = await part_of(ann, UPLOAD, "manifest.json", 100, bytes(100))
            assert (again.status, again.json) == (200, {"size_bytes": 200}), "what is there needs no room"
            full = await part_of(ann, UPLOAD, "manifest.json", 200, bytes(100))
            assert full.status == 400
            assert "that this server allows (disk_cap_bytes)" in full.detail
            sampler = await server.client("sam", scopes=("sample", "read"))
            assert (await part_of(sampler, UPLOAD, "manifest.json", 0, b"x")).status == 403

    run(scenario())


def test_uploads_that_nobody_goes_on_with_are_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            for name in ("a" * 32, "b" * 32):
                await part_of(ann, name, "manifest.json", 0, b"x")
            old, new = sorted((tmp_path / "data" / "uploads").iterdir())
            for path in (old, *old.iterdir()):
                os.utime(path, (1.0, 1.0))
            server.clock.advance(3601)
            await server.sweep()
            assert list((tmp_path / "data" / "uploads").iterdir()) == [new]

    run(scenario())

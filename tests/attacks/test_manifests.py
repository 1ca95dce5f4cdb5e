"""Manifests written by a client, in directories that an earlier release accepted: no name in them is followed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.importing import saved, upload
from support.in_process import Client, Server, run, serving

from tinsmith.server.checkpoints.file_work import FileWork
from tinsmith.server.checkpoints.manifest import is_intact
from tinsmith.server.data_dir import link_tree
from tinsmith.server.refusals import NotReadyError
from tinsmith.store.rows import CheckpointRow

ADAPTER = "adapter_model.safetensors"


def go_on() -> None:
    pass


def a_device(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps({"files": {"/dev/zero": "00"}}))


def a_linked_device(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps({"files": {ADAPTER: "00"}}))
    (directory / ADAPTER).unlink()
    (directory / ADAPTER).symlink_to("/dev/zero")


def a_pipe(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps({"files": {ADAPTER: "00"}}))
    (directory / ADAPTER).unlink()
    os.mkfifo(directory / ADAPTER)


def a_manifest_that_is_a_pipe(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    os.mkfifo(directory / "manifest.json")


def a_directory(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps({"files": {ADAPTER: "00"}}))
    (directory / ADAPTER).unlink()
    (directory / ADAPTER).mkdir()


def a_nul(directory: Path) -> None:
    (directory / "manifest.json").write_text(json.dumps({"files": {"a\0b": "00"}}))


def many_levels(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b'{"files":' + b"[" * 200_000)


def much(directory: Path) -> None:
    with (directory / "manifest.json").open("wb") as file:
        file.truncate(2**34)


HOSTILE: list[Callable[[Path], None]] = [
    a_device,
    a_linked_device,
    a_pipe,
    a_manifest_that_is_a_pipe,
    a_directory,
    a_nul,
    many_levels,
    much,
]


@pytest.mark.parametrize("make", HOSTILE, ids=lambda make: make.__name__)
def test_nothing_of_the_kind_is_intact_or_waited_for(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / ADAPTER).write_bytes(b"weights")
    (tmp_path / "manifest.json").write_text("{}")
    make(tmp_path)
    assert not is_intact(go_on, tmp_path)


def test_what_was_written_is_intact(tmp_path: Path) -> None:
    (tmp_path / ADAPTER).write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    for record in (digest, {"bytes": 7, "sha256": digest}):
        (tmp_path / "manifest.json").write_text(json.dumps({"files": {ADAPTER: record}, "info": {"rank": 4}}))
        assert is_intact(go_on, tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {ADAPTER: {"bytes": 8, "sha256": digest}}}))
    assert not is_intact(go_on, tmp_path)
    (tmp_path / "secret").write_bytes(b"weights")
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"secret": digest}}))
    assert not is_intact(go_on, tmp_path), "a name that no checkpoint has is not looked at"


async def kept(server: Server, client: Client, make: Callable[[Path], None]) -> str:
    """The path of an import that is hostile now."""
    path: str = (await upload(client, await saved(server, client))).json["path"]
    (row,) = await server.rows(CheckpointRow, "checkpoint", path=path)
    make(Path(row.directory))
    return path


@pytest.mark.parametrize("make", [a_device, a_linked_device, many_levels], ids=lambda make: make.__name__)
def test_loads_of_it_keep_nobody_from_loading_and_the_server_from_ending(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            good = (await upload(ann, await saved(server, ann))).json["path"]
            bad = await kept(server, eve, make)
            session = await eve.session()
            loads = [
                await eve.post("load_weights", {"session_id": session, "model_seq_id": i, "path": bad})
                for i in range(12)
            ]
            own = await ann.session()
            load = await ann.post("load_weights", {"session_id": own, "model_seq_id": 0, "path": good})
            await ann.result(load)
            assert (await ann.get(f"sessions/{own}/trace_export")).status == 200
            for promise in loads:
                while (result := await eve.poll(promise)).status == 408:
                    pass
                assert "error" in result.json

    run(scenario())


def test_one_organisation_holds_one_thread_and_ends_with_the_server() -> None:
    async def scenario() -> None:
        work = FileWork()
        begun, most, running = threading.Event(), 0, 0

        def endless(check: Callable[[], None]) -> None:
            nonlocal most, running
            running += 1
            most = max(most, running)
            begun.set()
            try:
                while True:
                    check()
                    time.sleep(0.001)
            finally:
                running -= 1

        tasks = [asyncio.create_task(work.run("eve", endless)) for _ in range(10)]
        await asyncio.to_thread(begun.wait)
        assert await work.run("ann", lambda check: "done") == "done"
        tasks[0].cancel()
        await asyncio.sleep(0.05)
        assert most == 1, "giving up does not give the thread away"
        work.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] + [NotReadyError] * 9

    run(scenario())


def test_second_names_are_given_to_regular_files_only(tmp_path: Path) -> None:
    source, target = tmp_path / "a" / "source", tmp_path / "a" / "b" / "target"
    source.mkdir(parents=True)
    (source / ADAPTER).write_bytes(b"weights")
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    link_tree(source, target)
    assert [path.name for path in target.iterdir()] == [ADAPTER]

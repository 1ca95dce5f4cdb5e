"""Tenants that fill the disk, and a full disk: a tenant over its share is refused, and deleting still works."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.importing import part_of, saved, upload
from support.in_process import Client, Gate, Recorder, forward_backward, run, sample, serving
from support.server_process import ROOT, environment

from tinsmith.server.checkpoints.disk_budget import DiskBudget
from tinsmith.server.data_dir import Files
from tinsmith.server.http.endpoint import fault
from tinsmith.server.http.errors import status_of
from tinsmith.store.memory import MemoryStore
from tinsmith.store.reserve import SLICE_BYTES, SLICES, Reserve

UPLOAD = "0123456789abcdef" * 2
ADAPTER = "adapter_model.safetensors"
MB = 2**20


async def saves(client: Client, model: str, count: int) -> list[int]:
    """The statuses of so many saves, one after another."""
    statuses = []
    for number in range(1, count + 1):
        answer = await client.post("save_weights", {"model_id": model, "seq_id": number, "path": f"w{number}"})
        statuses.append(answer.status)
        if answer.status == 200:
            await client.result(answer)
    return statuses


def test_an_organisation_over_its_cap_is_refused_and_nobody_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, disk_cap_per_org_bytes=60_000) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            message = await saved(server, ann)
            session = await eve.session()
            model = await eve.model(session)
            statuses = await saves(eve, model, 40)
            assert statuses[0] == 200
            assert statuses[-1] == 400, "the cap was reached"
            again = await eve.post("save_weights", {"model_id": model, "seq_id": 90, "path": "x"})
            assert "disk space that it may use (disk_cap_per_org_bytes)" in again.detail
            assert "delete checkpoints" in again.detail
            assert (await upload(ann, message)).status == 200, "nobody else notices"
            listed = (await eve.get("checkpoints")).json["checkpoints"]
            for item in listed[:10]:
                run_id, _, tail = item["tinker_path"].removeprefix("tinker://").partition("/")
                assert (await eve.call("DELETE", f"training_runs/{run_id}/checkpoints/{tail}")).status == 200
            answer = await eve.post("save_weights", {"model_id": model, "seq_id": 91, "path": "y"})
            assert answer.status == 200, "room was made"

    run(scenario())


def test_saves_that_are_under_way_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("save_state")
        async with serving(tmp_path, backend=Recorder(hold=gate), disk_cap_per_org_bytes=300_000) as server:
            eve = await server.client("eve")
            model = await eve.model(await eve.session())
            answers = [
                await eve.post("save_weights", {"model_id": model, "seq_id": number, "path": f"w{number}"})
                for number in range(1, 60)
            ]
            taken = [answer for answer in answers if answer.status == 200]
            assert 1 < len(taken) < 30, "many at once do not all pass because none is written yet"
            gate.opened.set()
            for answer in taken:
                await eve.result(answer)
            assert (await eve.post("save_weights", {"model_id": model, "seq_id": 61, "path": "after"})).status == 200

    run(scenario())


def test_uploads_imports_and_copies_are_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, disk_cap_per_org_bytes=100_000) as server:
            eve = await server.client("eve")
            message = await saved(server, eve)
            while (answer := await upload(eve, message)).status == 200:
                path = answer.json["path"]
            assert (answer.status, answer.json["field"]) == (400, "files")
            copied = await eve.post("copy_weights", {"source_path": path})
            assert (copied.status, copied.json["field"]) == (400, "source_path")
            refused = await part_of(eve, UPLOAD, ADAPTER, 0, bytes(50_000))
            assert (refused.status, refused.json["field"]) == (400, "body")
        async with serving(tmp_path / "parts", disk_cap_per_org_bytes=100_000) as server:
            eve = await server.client("eve")
            offset = 0
            while (answer := await part_of(eve, UPLOAD, ADAPTER, offset, bytes(30_000))).status == 200:
                offset += 30_000
            assert 60_000 <= offset < 100_000
            again = await part_of(eve, UPLOAD, ADAPTER, 0, bytes(30_000))
            assert again.status == 200, "what is there needs no room"

    run(scenario())


def test_archives_are_counted_for_the_owner_of_the_checkpoint(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await ann.model(await ann.session())
            await saves(ann, model, 1)
            disk = server.services.disk
            await disk.measure(is_due=True)
            org_id = server.services.authenticator._keys[ann.key].caller.org_id
            before = disk.used(org_id)
            archive = f"training_runs/{model}/checkpoints/weights/w1/archive"
            assert (await ann.get(archive)).status == 302
            grown = disk.used(org_id) - before
            assert grown > 0
            await disk.measure(is_due=True)
            assert disk.used(org_id) - before >= grown, "it is still there"
            assert (await ann.get(archive)).status == 302
            assert disk.used(org_id) - before < 2 * grown + 20_000, "it is made once"

    run(scenario())


def test_journal_and_results_count_and_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, disk_cap_per_org_bytes=60_000) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            model = await eve.model(await eve.session())
            statuses: list[int] = []
            for number in range(1, 500):
                answer = await eve.post("forward_backward", forward_backward(model, number))
                statuses.append(answer.status)
                if answer.status != 200:
                    break
                await eve.result(answer)
            assert statuses[-1] == 429, "it may come again when there is room"
            assert answer.headers["retry-after"] == "30"
            bad = await eve.sampler(await eve.session())
            assert (await eve.post("asample", sample(bad, 1))).status == 429
            good = await ann.sampler(await ann.session())
            await ann.result(await ann.post("asample", sample(good, 1)))
            await server.services.disk.measure(is_due=True)
            assert server.services.disk.used("other") > 60_000 > server.services.disk.used("acme")

    run(scenario())


def test_what_was_measured_is_what_is_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            eve = await server.client("eve")
            session = await eve.session()
            model = await eve.model(session)
            for number in range(1, 4):
                await eve.save(model, number, f"w{number}")
            promise = await eve.post(
                "save_weights_for_sampler", {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 0}
            )
            await eve.result(promise)
            await part_of(eve, UPLOAD, ADAPTER, 0, bytes(70_000))
            data = tmp_path / "data"
            on_disk = sum(path.stat().st_size for path in data.rglob("*.*") if path.is_file())
            counted = server.services.disk.used("acme")
            await server.services.disk.measure(is_due=True)
            measured = server.services.disk.used("acme")
            assert measured == pytest.approx(on_disk, abs=20_000)
            assert counted == pytest.approx(on_disk, abs=20_000)

    run(scenario())


class Free(Files):
    free = 0

    def free_bytes(self) -> int:
        return self.free


def test_without_a_cap_nobody_takes_more_than_it_leaves(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        await store.open()
        files = Free(tmp_path, 100 * MB)
        files.free = 10_100 * MB
        disk = DiskBudget(files, store, None, 100 * MB)
        disk.check("eve", 10_000 * MB)  # alone she may have all
        disk._has_others = True
        assert disk.limit("eve") == 5_000 * MB
        disk.add("eve", 5_000 * MB)
        files.free -= 5_000 * MB
        assert disk.limit("eve") == 5_000 * MB
        with pytest.raises(Exception, match="it must leave as much for others"):
            disk.check("eve", 1)
        assert disk.limit("ann") == 2_500 * MB, "there is always some left for the next"
        files.free = 100 * MB
        assert disk.limit("ann") == 64 * MB
        await store.close()

    run(scenario())


@pytest.fixture
def full_disk(tmp_path: Path) -> Any:
    """What a server answers on a small file system of its own, which is full."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    place = tmp_path / "small"
    place.mkdir()
    script = 'mount -t tmpfs -o size=24m tmpfs "$1" || exit 77; exec "$2" -m support.full_disk "$1"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", str(place), sys.executable],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let users mount: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_on_a_full_disk_room_can_be_made_and_nothing_is_a_fault(full_disk: dict[str, int]) -> None:
    left = full_disk.pop("left")
    refused = {name: full_disk.pop(name) for name in ("trace", "archive")}
    assert refused == {"trace": 503, "archive": 503}, "they need room, and say so"
    assert set(full_disk.values()) == {200}, full_disk
    assert left == 3


def test_an_upload_to_a_full_disk_may_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a 400, which says that the sender is to blame and should not try again."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            message = await saved(server, ann)
            used = server.services.disk.used("acme")
            monkeypatch.setattr("tinsmith.server.checkpoints.upload_parts.os.pwrite", full)
            part = await part_of(ann, UPLOAD, ADAPTER, 0, bytes(50_000))
            assert (part.status, part.json["code"]) == (503, "not_ready")
            assert server.services.disk.used("acme") == used
            monkeypatch.setattr(Path, "write_bytes", full)
            whole = await upload(ann, message)
            assert (whole.status, whole.json["code"]) == (503, "not_ready")

    run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_mistake_of_ours(number: int) -> None:
    assert status_of(fault(OSError(number, "full"))) == 503
    assert status_of(fault(OSError(errno.EIO, "broken"))) == 500


def test_the_reserve_is_given_up_slice_by_slice(tmp_path: Path) -> None:
    now = 0.0
    reserve = Reserve(tmp_path / "reserve", lambda: now)
    assert not reserve.give_up()
    reserve.fill()
    whole = SLICES * SLICE_BYTES
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= whole
    assert not reserve.is_due
    assert reserve.give_up()
    assert (tmp_path / "reserve").stat().st_size == whole - SLICE_BYTES
    assert reserve.is_due, "it is taken back at once"
    reserve.fill()
    assert (tmp_path / "reserve").stat().st_size == whole
    assert sum(reserve.give_up() for _ in range(SLICES + 5)) == SLICES
    reserve.close()
    assert not (tmp_path / "reserve").exists()

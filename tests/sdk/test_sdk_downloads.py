"""Files of an exported checkpoint: complete, resumed, verified, inside the folder, with progress."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import DropMidBody, Recorded, Replace, Status, TinkerServer

from tinsmith import InvalidInputError, NotFoundError, RestClient, ServiceClient, TinkerError, TrainingClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

WEIGHTS = "adapter_model.safetensors"
FILE = f"/files/.*/{WEIGHTS}"
URLS = "training_runs/.*/external_weights_urls"


@pytest.fixture
def rest(client: ServiceClient) -> RestClient:
    return client.create_rest_client()


@pytest.fixture
def exported(trainer: TrainingClient) -> str:
    path: str = trainer.save_weights_external("final").result(10).path
    return path


def contents(server: TinkerServer, path: str) -> dict[str, bytes]:
    return server.state.checkpoints[path].files


def downloaded(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leave_part(folder: Path, content: bytes, *, of: bytes | None) -> None:
    """What a download of this version of the file left behind; None: nothing is known of it."""
    (folder / f"{WEIGHTS}.part").write_bytes(content)
    if of is not None:
        (folder / f"{WEIGHTS}.part.from").write_text(f'"{hashlib.sha256(of).hexdigest()[:16]}"')


def offer(server: TinkerServer, *names: str) -> None:
    """Let the server name these files, whatever they are."""
    urls = dict.fromkeys(names, f"{server.url}/files/offered")
    server.script(URLS, [Replace(lambda _: {"urls": urls, "expires": "2099-01-01T00:00:00Z"})])


def test_every_file_arrives_whole(rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    paths = rest.download_external_weights(exported, folder).result(10)

    assert paths == [folder / "adapter_config.json", folder / WEIGHTS]
    assert downloaded(folder) == contents(server, exported)


def test_the_key_is_not_sent_to_signed_addresses(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    rest.download_external_weights(exported, tmp_path).result(10)
    for request in server.find("/files/.*"):
        assert "x-api-key" not in request.headers
        assert request.query == {"signature": "test"}


def test_a_cut_download_goes_on_where_it_stopped(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    server.script(FILE, [DropMidBody()])
    rest.download_external_weights(exported, tmp_path).result(15)

    assert downloaded(tmp_path) == contents(server, exported)
    first, second = server.find(FILE)
    assert not {"range", "if-range"} & set(first.headers)
    assert second.headers["range"] == f"bytes={len(whole) // 2}-"
    assert second.headers["if-range"] == f'"{hashlib.sha256(whole).hexdigest()[:16]}"'


def test_a_later_program_goes_on_with_what_is_there(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    leave_part(tmp_path, whole[:1000], of=whole)
    rest.download_external_weights(exported, tmp_path).result(10)

    assert downloaded(tmp_path) == contents(server, exported)
    assert [request.headers.get("range") for request in server.find(FILE)] == ["bytes=1000-"]


@pytest.mark.parametrize("heeds_if_range", [True, False])
def test_a_file_that_changed_is_not_spliced(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path, heeds_if_range: bool
) -> None:
    server.settings.heeds_if_range = heeds_if_range
    leave_part(tmp_path, b"a" * 1000, of=b"what was there before")
    rest.download_external_weights(exported, tmp_path).result(10)

    assert downloaded(tmp_path) == contents(server, exported)


def test_a_leftover_of_unknown_origin_is_not_used(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    leave_part(tmp_path, b"a" * 1000, of=None)
    rest.download_external_weights(exported, tmp_path).result(10)

    assert downloaded(tmp_path) == contents(server, exported)
    assert [request.headers.get("range") for request in server.find(FILE)] == [None]


def test_a_complete_leftover_is_only_given_its_name(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    leave_part(tmp_path, whole, of=whole)
    rest.download_external_weights(exported, tmp_path).result(10)

    assert downloaded(tmp_path) == contents(server, exported)
    assert len(server.find(FILE)) == 1


def test_a_server_that_ignores_ranges_is_read_from_the_start(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    leave_part(tmp_path, whole[:1000], of=whole)
    server.script(FILE, [Status(200, {}, whole)])
    rest.download_external_weights(exported, tmp_path).result(10)

    assert downloaded(tmp_path) == contents(server, exported)


def test_a_leftover_longer_than_the_file_does_not_become_the_file(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    leave_part(tmp_path, b"of another checkpoint" * len(whole), of=whole)
    future = rest.download_external_weights(exported, tmp_path)

    assert future.exception(10) is not None or (tmp_path / WEIGHTS).read_bytes() == whole


def test_files_that_are_there_are_not_fetched_again(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    rest.download_external_weights(exported, tmp_path).result(10)
    server.clear_requests()
    rest.download_external_weights(exported, tmp_path).result(10)

    assert server.find("/files/.*") == []


@pytest.mark.parametrize("header", ["x-checksum-sha256", "x-amz-meta-sha256"])
def test_wrong_bytes_are_refused_and_removed(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path, header: str
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    digest = hashlib.sha256(whole).hexdigest()
    server.script(FILE, [Status(200, {header: digest}, whole[:-1] + b"\0")])
    error = rest.download_external_weights(exported, tmp_path).exception(10)

    assert isinstance(error, TinkerError)
    assert WEIGHTS in str(error)
    assert not any(path.name.startswith(WEIGHTS) for path in tmp_path.iterdir())
    rest.download_external_weights(exported, tmp_path).result(10)
    assert (tmp_path / WEIGHTS).read_bytes() == whole


@pytest.mark.parametrize("written", [str.lower, str.upper])
def test_right_bytes_pass_the_check(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path, written: Any
) -> None:
    whole = contents(server, exported)[WEIGHTS]
    digest = written(hashlib.sha256(whole).hexdigest())
    server.script(FILE, [Status(200, {"x-checksum-sha256": digest}, whole)])
    rest.download_external_weights(exported, tmp_path).result(10)
    assert (tmp_path / WEIGHTS).read_bytes() == whole


def test_progress_is_told_to_the_end(rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path) -> None:
    told: list[Any] = []
    server.script(FILE, [DropMidBody()])
    rest.download_external_weights(exported, tmp_path, told.append).result(15)

    for name, content in contents(server, exported).items():
        own = [progress for progress in told if progress.path == tmp_path / name]
        assert own[-1].received == own[-1].total == len(content)
        received = [progress.received for progress in own]
        assert received == sorted(received)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil-of-tinsmith", "a/../../evil", "..", "", "a/.."])
def test_a_name_that_leads_out_of_the_folder_is_refused(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path, name: str
) -> None:
    offer(server, name)
    error = rest.download_external_weights(exported, tmp_path / "out").exception(10)

    assert isinstance(error, InvalidInputError)
    assert repr(name) in str(error)
    assert server.find("/files/.*") == []
    assert not (tmp_path / "evil").exists()


def test_one_bad_name_stops_all_before_anything_is_written(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    offer(server, "a.json", "z/../../evil")
    assert isinstance(rest.download_external_weights(exported, tmp_path / "out").exception(10), InvalidInputError)
    assert server.find("/files/.*") == []


def test_files_in_folders_keep_their_place(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    offer(server, "layers/0/weights.bin")
    server.script("/files/offered", [Status(200, {}, b"content")])
    rest.download_external_weights(exported, tmp_path).result(10)

    assert (tmp_path / "layers" / "0" / "weights.bin").read_bytes() == b"content"


def test_a_missing_file_is_an_error_that_names_it_without_the_signature(
    rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path
) -> None:
    server.script(FILE, [Status(404)])
    error = rest.download_external_weights(exported, tmp_path).exception(10)

    assert isinstance(error, NotFoundError)
    assert WEIGHTS in str(error)
    assert "signature" not in str(error)


def test_a_busy_store_is_asked_again(rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path) -> None:
    server.script(FILE, [Status(503)])
    rest.download_external_weights(exported, tmp_path).result(15)
    assert downloaded(tmp_path) == contents(server, exported)


def test_the_twin_returns_the_paths(rest: RestClient, exported: str, tmp_path: Path) -> None:
    paths = asyncio.run(rest.download_external_weights_async(exported, tmp_path))
    assert [path.name for path in paths] == ["adapter_config.json", WEIGHTS]


def test_a_download_asks_for_plain_bytes(rest: RestClient, server: TinkerServer, exported: str, tmp_path: Path) -> None:
    server.settings.compress_answers = "gzip"
    rest.download_external_weights(exported, tmp_path).result(10)
    files: list[Recorded] = server.find("/files/.*")
    assert {request.headers["accept-encoding"] for request in files} == {"identity"}
    assert downloaded(tmp_path) == contents(server, exported)

"""Paths in the data directory, and signed URLs for them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_process import Clock

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.signed_urls import DOWNLOAD_PREFIX, Signer
from tinsmith.server.data_dir import Files, check_name, link_tree, remove_tree
from tinsmith.server.refusals import NotAuthenticatedError, NotReadyError


@pytest.mark.parametrize("name", ["a", "step-1", "final_2.0", "A" * 255])
def test_names_that_are_fine(name: str, tmp_path: Path) -> None:
    assert check_name(name) == name
    place = Files(tmp_path, 1).checkpoint("run:train:0", "weights", name, "0123456789abcdef")
    place.mkdir(parents=True)  # also the longest name is one that a file system takes
    assert place.is_relative_to(tmp_path / "checkpoints" / "run_train_0" / "weights")


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../x", "a\\b", "a b", "ü", "a\0", "a\n", "A" * 256, "%2e%2e"]
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"path: .*cannot name a checkpoint"):
        check_name(name)


@given(st.text(min_size=1, max_size=40))
def test_no_identifier_leads_out_of_the_directory(identifier: str) -> None:
    files = Files(Path("/data"), 1)
    for place, parent in (
        (files.sampler(identifier), "samplers"),
        (files.loads(identifier), "loads"),
        (files.trace(identifier), "traces"),
    ):
        assert place.parent == Path("/data") / parent
        assert os.path.normpath(place).startswith(f"/data/{parent}/")


def test_two_saves_of_one_name_have_their_own_directories(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    assert files.checkpoint("m", "weights", "x", "1" * 16) != files.checkpoint("m", "weights", "x", "2" * 16)
    long = ["A" * 254 + letter for letter in "bc"]
    assert len({files.checkpoint("m", "weights", name, secret * 16) for name in long for secret in "12"}) >= 2


def test_only_the_user_may_look_in(tmp_path: Path) -> None:
    files = Files(tmp_path / "data", 1)
    files.prepare()
    files.prepare()
    assert oct(os.stat(files.root).st_mode & 0o777) == "0o700"
    assert sorted(path.name for path in files.root.iterdir()) == [
        "checkpoints",
        "loads",
        "samplers",
        "snapshots",
        "traces",
        "uploads",
    ]


def test_files_are_found_by_name_and_nothing_outside_is(tmp_path: Path) -> None:
    files = Files(tmp_path / "data", 1)
    files.prepare()
    (files.root / "traces" / "t.json").write_text("{}")
    (tmp_path / "outside").write_text("secret")
    (files.root / "traces" / "link").symlink_to(tmp_path / "outside")
    assert files.resolve("traces/t.json").read_text() == "{}"
    assert files.relative(files.root / "traces" / "t.json") == "traces/t.json"
    for name in ("../outside", "traces/../../outside", "/etc/passwd", "traces", "traces/none", "traces/link", "a\0b"):
        with pytest.raises(InvalidInputError, match="is not a file that can be downloaded"):
            files.resolve(name)


def test_a_full_disk_takes_no_new_work(tmp_path: Path) -> None:
    Files(tmp_path, 1).check_room()
    with pytest.raises(NotReadyError, match=r"MB left \(limit .* delete checkpoints") as caught:
        Files(tmp_path, 2**62).check_room()
    assert caught.value.retry_after_s > 0


def test_second_names_stay_when_the_first_go(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("1")
    (source / "inner").mkdir()
    link_tree(source, tmp_path / "target")
    link_tree(source, tmp_path / "target")
    remove_tree(source)
    remove_tree(source)
    assert (tmp_path / "target" / "a").read_text() == "1"


def address(signer: Signer, name: str, ttl_s: float = 60.0) -> tuple[str, str, str]:
    url, expires = signer.url("https://host/prefix", name, ttl_s)
    parts = urlsplit(url)
    assert url.startswith(f"https://host/prefix{DOWNLOAD_PREFIX}")
    query = parse_qs(parts.query)
    assert float(query["expires"][0]) == expires
    return unquote(parts.path.removeprefix("/prefix" + DOWNLOAD_PREFIX)), query["expires"][0], query["signature"][0]


def test_a_signed_address_works_until_it_expires() -> None:
    clock = Clock(1000.0)
    signer = Signer(b"secret", clock=clock)
    name, expires, signature = address(signer, "checkpoints/a_train_0/weights/x y#?é/f")
    assert name == "checkpoints/a_train_0/weights/x y#?é/f"
    signer.check(name, expires, signature)
    clock.advance(60)
    with pytest.raises(NotAuthenticatedError, match="has expired"):
        signer.check(name, expires, signature)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"expires": "2000"},
        {"expires": ""},
        {"expires": "soon"},
        {"expires": "²"},
        {"expires": "9" * 5000},
        {"expires": "-1"},
        {"signature": ""},
        {"signature": "0" * 64},
        {"signature": "é"},
        {"name": "\ud800"},
    ],
)
def test_a_changed_address_is_not_ours(change: dict[str, str]) -> None:
    signer = Signer(b"secret", clock=Clock(1000.0))
    name, expires, signature = address(signer, "a/b")
    with pytest.raises(NotAuthenticatedError, match="not signed by this server"):
        signer.check(**{"name": name, "expires": expires, "signature": signature, **change})


def test_another_installation_signs_otherwise() -> None:
    clock = Clock(1000.0)
    name, expires, signature = address(Signer(b"one", clock=clock), "a/b")
    with pytest.raises(NotAuthenticatedError):
        Signer(b"two", clock=clock).check(name, expires, signature)

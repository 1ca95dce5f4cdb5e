"""The secret that signs URLs and tokens, and which files a URL can name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from support.in_process import begun, run, serving
from support.server_process import ServerEndedError, ServerProcess

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.auth.keys import installation_secret
from tinsmith.server.auth.signed_urls import Signer
from tinsmith.server.data_dir import Files


@pytest.mark.parametrize(
    "text", ["", "\n", "00", "zz" * 32, "ab" * 31, "ab" * 33, "ab" * 16 + " " + "ab" * 16, "\0" * 64]
)
def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    with pytest.raises(
        TinkerError, match=r"secret does not hold 64 hexadecimal digits.*delete it: the server then creates"
    ):
        installation_secret(tmp_path)
    assert (tmp_path / "secret").read_text() == text


def test_a_secret_is_for_this_user_alone(tmp_path: Path) -> None:
    secret = installation_secret(tmp_path)
    path = tmp_path / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    assert installation_secret(tmp_path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_does_not_start_with_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "secret").write_text("")
    with pytest.raises(ServerEndedError, match="secret does not hold 64 hexadecimal digits"):
        ServerProcess(tmp_path / "data").start()


PRIVATE = ["secret", "local.key", "tinsmith.sqlite", "server.lock", "installation.json", "uploads/x/manifest.json"]


@pytest.mark.parametrize("name", [*PRIVATE, "traces/../secret", "checkpoints/../../../etc/passwd", "/etc/passwd", "."])
def test_no_address_is_for_what_is_private_however_it_is_signed(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            data = tmp_path / "data"
            for private in PRIVATE:
                (data / private).parent.mkdir(parents=True, exist_ok=True)
                if not (data / private).exists():
                    (data / private).write_text("private")
            url, _ = server.services.signer.url("", name, 60)
            answer = await server.request("GET", url)
            assert answer.status == 404
            with pytest.raises(InvalidInputError):
                server.services.files.resolve(name)

    run(scenario())


def test_links_lead_nowhere(tmp_path: Path) -> None:
    files = Files(tmp_path, 1)
    files.prepare()
    (tmp_path / "secret").write_text("private")
    (tmp_path / "traces" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidInputError):
        files.resolve("traces/link")


def test_another_secret_signs_nothing_here(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server)
            good = (await ann.get(f"sessions/{session}/trace_export")).json["url"].partition("server.test")[2]
            assert (await server.request("GET", good)).status == 200
            for secret in (b"", bytes(32)):
                url, _ = Signer(secret, clock=server.clock).url("", f"traces/{session}.json", 60)
                assert (await server.request("GET", url)).status == 401

    run(scenario())


def test_everything_that_a_server_keeps_is_for_its_user_alone(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        server.terminate()
    paths = [tmp_path / "data", *(tmp_path / "data").rglob("*")]
    assert len(paths) > 5
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


def test_ranges_of_a_download_that_cannot_be_sent_are_refused_like_everything_else(tmp_path: Path) -> None:
    """Found by fuzzing: the refusal was plain text without a code."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server)
            url = (await ann.get(f"sessions/{session}/trace_export")).json["url"].partition("server.test")[2]
            whole = await server.request("GET", url)
            part = await server.request("GET", url, headers={"range": "bytes=2-4"})
            assert (part.status, part.body) == (206, whole.body[2:5])
            for value, status in (("bytes=x", 400), ("lines=1-2", 400), ("bytes=999999-", 416)):
                answer = await server.request("GET", url, headers={"range": value})
                assert (answer.status, answer.json["code"]) == (status, "invalid_input"), value
                assert answer.json["field"] == "range"
            assert answer.headers["content-range"] == f"bytes */{len(whole.body)}"

    run(scenario())


def test_a_file_that_is_deleted_while_it_is_asked_for_reads_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server)
            url = (await ann.get(f"sessions/{session}/trace_export")).json["url"].partition("server.test")[2]
            resolve = Files.resolve

            def resolved(self: Files, name: str) -> Path:
                path = resolve(self, name)
                path.unlink()
                return path

            monkeypatch.setattr(Files, "resolve", resolved)
            answer = await server.request("GET", url)
            assert (answer.status, answer.json["code"]) == (404, "unknown_resource")

    run(scenario())

"""`status`, `doctor` and `auth` with servers that are up, down, not ready, or not tinsmith."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_run import Cli
from support.server_process import HELD_BACKEND, ServerProcess
from support.tinker_server import Status, TinkerServer

from tinsmith.cli.server import doctor as doctor_module

pytestmark = pytest.mark.usefixtures("clean_environment")
GONE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("status") / "data", backend=HELD_BACKEND) as process:
        yield process


@pytest.fixture
def cli(server: ServerProcess, tmp_path: Path) -> Cli:
    return Cli(server.url, server.key, tmp_path)


def credentials(cli: Cli) -> Any:
    return json.loads((cli.home / ".tinker" / "credentials.json").read_text())


def without_key(cli: Cli) -> Cli:
    return Cli(cli.url, None, cli.home)


# status


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    cli = Cli(GONE, "tml-x", tmp_path)
    problem = cli.fails("status")
    assert f"no server responds at {GONE}" in problem
    assert "To start one: tinsmith serve." in problem
    result = cli.run("status", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["up"] is False


def test_no_engine_is_started_to_answer(tmp_path: Path) -> None:
    cli = Cli(None, None, tmp_path)
    problem = cli.fails("status")
    assert f"the local engine is not running (data directory {tmp_path / '.local' / 'share' / 'tinsmith'}" in problem
    assert not (tmp_path / ".local").exists()
    assert "the local engine is not running" in Cli(GONE, "tml-x", tmp_path).fails("status", "--base-url", "local")


def test_the_local_engine_is_found_where_it_runs(server: ServerProcess, tmp_path: Path) -> None:
    place = tmp_path / ".local" / "share" / "tinsmith"
    place.mkdir(parents=True)
    known = {"url": server.url, "key": server.key, "pid": server.process_id}
    (place / "embedded.json").write_text(json.dumps(known))
    answer = Cli(None, None, tmp_path).json("status")
    assert answer["base_url"] == server.url
    assert answer["status"]["models"] == ["tinsmith/arithmetic"]


def test_without_a_good_key_a_server_is_still_seen_to_be_up(cli: Cli) -> None:
    wrong = Cli(cli.url, "tml-wrong", cli.home)
    answer = wrong.json("status")
    assert (answer["up"], answer["ready"], answer["status"]) == (True, True, None)
    assert "tinsmith auth login" in answer["note"]
    assert "tinsmith auth login" in wrong.run("status").stderr


def test_a_server_of_another_make(make_server: Callable[..., TinkerServer], tmp_path: Path) -> None:
    other = make_server(vintage="0.36")
    cli = Cli(other.url, other.key, tmp_path)
    answer = cli.json("status")
    assert (answer["up"], answer["server"], answer["status"], answer["timings"]) == (True, None, None, [])
    assert "reports only that it is up" in cli.run("status").stderr
    other.script("healthz", [Status(500)])
    assert "is not healthy (HTTP 500)" in cli.fails("status")


def test_a_server_that_takes_no_work(tmp_path: Path) -> None:
    import signal

    from tinsmith import AdamParams, ServiceClient

    with ServerProcess(tmp_path / "data", backend=HELD_BACKEND) as draining:
        cli = Cli(draining.url, draining.key, tmp_path)
        with ServiceClient(base_url=draining.url, api_key=draining.key) as client:
            training = client.create_lora_training_client("tinsmith/arithmetic", rank=2)
            draining.hold()
            waiting = training.optim_step(AdamParams())
            training.get_info()
            while cli.json("status")["status"]["queued"] == 0:
                pass
            draining.signal(signal.SIGTERM)
            while (result := cli.run("status")).exit_code == 0:
                pass
            assert "no: draining" in result.stdout
            draining.release()
            waiting.result(30)


# doctor


def test_doctor_without_the_trial(cli: Cli, tmp_path: Path) -> None:
    answer = cli.json("doctor", "--quick")
    found = {check["check"]: check for check in answer["checks"]}
    assert answer["ok"] is True
    assert {"python", "packages", "extra [server]", "data directory", "default model", "server", "key"} <= set(found)
    assert "training" not in found
    assert found["data directory"]["detail"].startswith(str(tmp_path))
    assert found["key"]["detail"] == "accepted; 1 base model available"
    assert "How to Fix" in cli("doctor", "--quick")


@pytest.mark.parametrize(
    ("url", "key", "check", "detail", "step"),
    [
        (GONE, "tml-x", "server", "connection refused", "start the server"),
        (None, "tml-wrong", "key", "HTTP 401", "auth login"),
        (None, None, "key", "No API key is set", ""),
        ("nonsense", "tml-x", "settings", "is neither an http(s) URL", "fix"),
    ],
)
def test_doctor_finds_what_is_broken(
    cli: Cli, url: str | None, key: str | None, check: str, detail: str, step: str
) -> None:
    result = Cli(url or cli.url, key, cli.home).run("doctor", "--quick", "--format", "json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    (broken,) = [found for found in answer["checks"] if found["result"] == "broken"]
    assert broken["check"] == check
    assert detail in broken["detail"]
    assert step in broken["step"]


def test_doctor_finds_a_data_directory_that_cannot_be_used(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    odd = Cli(cli.url, cli.key, tmp_path, {"TINSMITH_DATA_DIR": str(tmp_path / "file" / "data")})
    result = odd.run("doctor", "--quick", "--format", "json")
    assert result.exit_code == 1
    (broken,) = [found for found in json.loads(result.stdout)["checks"] if found["result"] == "broken"]
    assert broken["check"] == "data directory"


def test_doctor_finds_a_damaged_model(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / ".local" / "share" / "tinsmith" / "models" / "SmolLM2-135M-Instruct"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (place / "digests.json").write_text(json.dumps({"config.json": "0" * 64}))
    result = cli.run("doctor", "--quick", "--format", "json")
    assert result.exit_code == 1
    (broken,) = [found for found in json.loads(result.stdout)["checks"] if found["result"] == "broken"]
    assert (broken["check"], broken["step"]) == ("default model", "delete it; it is downloaded again when needed")


def test_doctor_names_the_extra_that_is_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor_module._version
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name == "starlette" else version(name))
    found = {check["check"]: check for check in cli.json("doctor")["checks"]}
    assert found["extra [server]"] == {
        "check": "extra [server]",
        "result": "note",
        "detail": "not installed: starlette",
        "step": "pip install 'tinsmith[server]'",
    }
    assert "training" not in found, "without the engine there is nothing to try"


# auth


def test_a_key_is_stored_used_and_forgotten(server: ServerProcess, cli: Cli) -> None:
    nobody = without_key(cli)
    problem = nobody.fails("auth", "status")
    assert "Run: tinsmith auth login, or set TINKER_API_KEY" in problem
    said = nobody("auth", "login", given=f"{server.key}\n")
    assert server.key not in said
    place = cli.home / ".tinker" / "credentials.json"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    stored = credentials(cli)
    record = stored["keys"][stored["default"]]
    assert (stored["version"], record["type"], record["key"]) == (1, "manual", server.key)
    assert nobody.json("auth", "status") == {
        "base_url": server.url,
        "credentials": "~/.tinker/credentials.json",
        "accessible": True,
        "error": None,
    }
    assert nobody.json("run", "list") == {"runs": []}
    assert "first run: tinsmith auth logout" in nobody.fails("auth", "login", given="tml-x\n")
    assert "It is still valid" in nobody("auth", "logout")
    assert credentials(cli)["keys"] == {}
    assert "no key is stored" in nobody.fails("auth", "logout")
    assert [file.name for file in place.parent.iterdir()] == ["credentials.json"]


def test_the_official_command_reads_what_ours_stored_and_the_other_way_round(server: ServerProcess, cli: Cli) -> None:
    nobody = without_key(cli)
    nobody("auth", "login", given=f"{server.key}\n")
    status, _, again = nobody.official([["auth", "status"], ["auth", "logout"], ["--help"]])
    assert "Tinker accessible: yes" in status
    assert again
    assert credentials(cli).get("default") is None
    stored = {"version": 1, "default": "7", "keys": {"7": {"type": "manual", "key": server.key, "name": "theirs"}}}
    (cli.home / ".tinker" / "credentials.json").write_text(json.dumps(stored))
    problem = nobody.fails("auth", "whoami")
    assert "is only sent to the server it was stored for" in problem, "it has no address: the hosted one is meant"
    assert "'theirs'" in nobody("auth", "logout")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("\n", "the key is empty"),
        ("", "the key is empty"),
        ("nonsense\n", "must start with tml-"),
        ("tml-wrong\n", "unknown here, revoked or expired"),
    ],
)
def test_a_key_that_the_server_does_not_take_is_not_stored(cli: Cli, given: str, says: str) -> None:
    assert says in without_key(cli).fails("auth", "login", given=given)
    assert not (cli.home / ".tinker").exists()


def test_login_needs_a_server(tmp_path: Path) -> None:
    local = Cli("local", None, tmp_path)
    assert "the local engine needs no key" in local.fails("auth", "login", given="tml-x\n")
    assert local.run("auth", "status").exit_code == 0
    assert "connection refused" in Cli(GONE, None, tmp_path).fails("auth", "login", given="tml-x\n")


def test_a_server_without_the_key_route(make_server: Callable[..., TinkerServer], tmp_path: Path) -> None:
    old = make_server(vintage="0.15")
    cli = Cli(old.url, None, tmp_path)
    cli("auth", "login", given=f"{old.key}\n")
    assert credentials(cli)["default"].startswith("manual-")
    assert cli.json("model", "list")["models"]
    assert "does not report whose key it is" in cli.fails("auth", "whoami")


def test_a_key_that_a_program_made_for_this_machine_is_deleted_with_its_record(server: ServerProcess, cli: Cli) -> None:
    made = json.loads(server.run("key", "create", "machine", "--format", "json").stdout)
    record = {"type": "generated", "key": made["key"], "name": "machine", "details": {}, "base_url": server.url}
    place = cli.home / ".tinker"
    place.mkdir()
    (place / "credentials.json").write_text(json.dumps({"version": 1, "default": "5", "keys": {"5": record}}))
    assert without_key(cli)("auth", "logout") == "Removed key 'machine'.\n"
    assert "revoked or expired" in Cli(cli.url, made["key"], cli.home).fails("run", "list")


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 2}', '{"keys": []}'])
def test_a_credentials_file_that_cannot_be_read_is_left_alone(server: ServerProcess, cli: Cli, content: str) -> None:
    place = cli.home / ".tinker" / "credentials.json"
    place.parent.mkdir()
    place.write_text(content)
    assert str(place) in without_key(cli).fails("auth", "login", given=f"{server.key}\n")
    assert place.read_text() == content

"""`tinsmith serve` as a process: signals, restarts, errors at the start, keys while it runs, PostgreSQL."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.postgres import PostgresServer
from support.program_run import as_official, raised, run_module
from support.server_process import HELD_BACKEND, ServerEndedError, ServerProcess, environment

from tinsmith import AdamParams, AuthenticationError, ModelInput, PermissionDeniedError, SamplingParams, ServiceClient

MODEL = "tinsmith/arithmetic"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)
PATIENT = {"first_contact_s": 30.0, "retry_deadline_s": 60.0}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data", backend=HELD_BACKEND, poll_s=1) as server:
        yield server


def get(url: str, key: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(url, headers={"x-api-key": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def until_draining(server: ServerProcess) -> None:
    end = time.monotonic() + 30
    while get(f"{server.url}/readyz") != (503, {"status": "ready", "reason": "draining"}):
        assert time.monotonic() < end, "the server does not drain"


def test_sigterm_lets_running_work_finish_and_takes_no_more(
    held: ServerProcess, connect: Callable[..., ServiceClient], datum: Any
) -> None:
    client = connect(held.url, api_key=held.key, **PATIENT)
    trainer = client.create_lora_training_client(MODEL, rank=2)
    held.hold()
    passed = trainer.forward_backward([datum(1, 2)], "cross_entropy")
    trainer.get_info()
    until_waiting(held, 1)
    held.signal(signal.SIGTERM)
    until_draining(held)
    late = trainer.optim_step(AdamParams())
    held.release()
    assert passed.result(30).metrics["tokens:sum"] == 2
    assert held.wait() == 0
    assert "SIGTERM: accepting no new work; 1 requests may finish within 20 s" in held.log
    held.start()
    assert late.result(60).metrics["optim/step"] == 1


def until_waiting(server: ServerProcess, count: int) -> None:
    end = time.monotonic() + 30
    while get(f"{server.url}/tinsmith/v1/status", server.key)[1]["queued"] != count:
        assert time.monotonic() < end, f"never {count} requests at once"


def test_what_does_not_finish_in_time_goes_on_after_the_restart(
    tmp_path: Path, connect: Callable[..., ServiceClient], datum: Any
) -> None:
    with ServerProcess(tmp_path / "data", backend=HELD_BACKEND, drain_s=0.2) as server:
        client = connect(server.url, api_key=server.key, **PATIENT)
        trainer = client.create_lora_training_client(MODEL, rank=2)
        sampler = client.create_sampling_client(base_model=MODEL)
        server.hold()
        futures = [trainer.forward_backward([datum(1, 2)], "cross_entropy"), trainer.optim_step(AdamParams())]
        sampled = sampler.sample(PROMPT, 1, PARAMS)
        until_waiting(server, 3)
        assert server.terminate() == 0
        server.release()
        server.start()
        assert futures[0].result(60).metrics["tokens:sum"] == 2
        assert futures[1].result(60).metrics["optim/step"] == 1
        assert len(sampled.result(60).sequences[0].tokens) == 3
        kinds = [execution.kind for execution in server.executions if not execution.job_id.startswith("replay-")]
        assert sorted(kinds) == ["create_model", "forward_backward", "optim_step", "sample"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_at_once(
    held: ServerProcess, connect: Callable[..., ServiceClient], number: signal.Signals
) -> None:
    sampler = connect(held.url, api_key=held.key, **PATIENT).create_sampling_client(base_model=MODEL)
    held.hold()
    sampled = sampler.sample(PROMPT, 1, PARAMS)
    until_waiting(held, 1)
    held.signal(number)
    until_draining(held)
    held.signal(number)
    assert held.wait() == 128 + number
    held.release()
    held.start()
    assert len(sampled.result(60).sequences[0].tokens) == 3


def refused(tmp_path: Path, *options: str) -> ServerEndedError:
    server = ServerProcess(tmp_path / "data", *options)
    try:
        with pytest.raises(ServerEndedError) as ended:
            server.start()
    finally:
        server.kill()
    assert "Traceback" not in ended.value.log
    return ended.value


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = refused(tmp_path, "--port", str(port))
    assert error.code == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in error.log


def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(tmp_path, "--data-dir", str(tmp_path / "file" / "data"))
    assert error.code == 1
    assert f"cannot use {tmp_path / 'file' / 'data'} as the data directory: Not a directory" in error.log


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nowhere", "Error: model x: 'nowhere' is neither a directory, a .gguf file nor a hub id (owner/name)"),
        ("some-org/some-model", "Error: model x: some-org/some-model could not be downloaded from the hub ("),
    ],
)
def test_a_model_that_cannot_be_had_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, says: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = refused(tmp_path, "--backend", "local", "--model", f"x={model}")
    assert error.code == 1
    preparing, told = error.log.splitlines()
    assert "preparing x from " in preparing
    assert told.startswith(says)


FULL = 'dd if=/dev/zero of="$1/filler" bs=4096 2>/dev/null'
NEARLY_FULL = 'dd if=/dev/zero of="$1/filler" bs=1024 count=900 2>/dev/null'
READ_ONLY = 'mkdir "$1/data"; mount -o remount,ro "$1"'


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (FULL, "data: No space left on device; free some space, or choose another data directory (--data-dir,"),
        (NEARLY_FULL, "tinsmith.sqlite: no space for the database"),
        (READ_ONLY, "server.lock: Read-only file system; let this user write there, or choose another data directory"),
    ],
    ids=["full", "nearly full", "read-only"],
)
def test_a_disk_that_takes_nothing_is_told_in_one_line(tmp_path: Path, prepare: str, says: str) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    command = (
        f'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; {prepare}; exec "$2" -m tinsmith serve --port 0 "$3" "$4"'
    )
    serve = ["--backend=tinsmith.testing.backend:memory_backend", f"--data-dir={tmp_path / 'data'}"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", str(tmp_path), sys.executable, *serve],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let users mount: {done.stderr[-200:]}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_other_addresses_need_keys(tmp_path: Path) -> None:
    error = refused(tmp_path, "--host", "0.0.0.0")
    assert error.code == 1
    assert "--host 0.0.0.0 lets other machines connect, and there is no API key yet" in error.log
    key = json.loads(
        ServerProcess(tmp_path / "data").run("key", "create", "first", "--org", "acme", "--format", "json").stdout
    )["key"]
    with ServerProcess(tmp_path / "data", "--host", "0.0.0.0") as server:
        assert server.announced.splitlines()[2] == "# TINKER_API_KEY: create one with: tinsmith key create"
        assert get(f"{server.url}/api/v1/get_server_capabilities", key)[0] == 200
        assert get(f"{server.url}/api/v1/get_server_capabilities")[0] == 401


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--port", "70000"), "port must be a whole number between 0 and 65535"),
        (("--backend", "nowhere"), "is neither 'local' nor 'module:factory'"),
        (("--backend", "no_such_module:factory"), "cannot be loaded: No module named 'no_such_module'"),
        (("--api-key", "secret"), "key: must begin with tml-"),
    ],
)
def test_wrong_settings_are_told_without_a_traceback(tmp_path: Path, options: tuple[str, ...], text: str) -> None:
    error = refused(tmp_path, *options)
    assert error.code == 1
    assert text in error.log


def test_unknown_client_flags_are_refused(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "data", client_flags="no_such_flag=true")
    with pytest.raises(ServerEndedError, match="client_flags: unknown no_such_flag"):
        server.start()


def test_a_key_at_its_cap_is_told_at_once_and_its_run_goes_on(
    tmp_path: Path, connect: Callable[..., ServiceClient], datum: Any
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        made = server.run("key", "create", "capped", "--tokens-per-day", "4", "--format", "json")
        client = connect(server.url, api_key=json.loads(made.stdout)["key"], **PATIENT)
        trainer = client.create_lora_training_client(MODEL, rank=2)
        sampler = client.create_sampling_client(base_model=MODEL)
        trainer.forward_backward([datum(1, 2)], "cross_entropy").result(60)
        for late in (sampler.sample(PROMPT, 1, PARAMS), trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")):
            error = late.exception(60)
            assert isinstance(error, PermissionDeniedError)
            assert error.body["code"] == "over_budget"  # type: ignore[index]
        assert "tokens per day has 2 left; this needs 3; the budget resets at " in str(error)
        assert trainer.optim_step(AdamParams()).result(60).metrics["optim/step"] == 1
        assert "refused forward_backward: 403 over_budget, org 'local'" in server.log


def test_keys_are_made_and_revoked_while_the_server_runs(
    tmp_path: Path, connect: Callable[..., ServiceClient], eventually: Callable[..., None]
) -> None:
    with ServerProcess(tmp_path / "data") as server:
        made = server.run("key", "create", "guest", "--org", "guests", "--format", "json")
        key = json.loads(made.stdout)
        client = connect(server.url, api_key=key["key"])
        assert client.get_server_capabilities().supported_models[0].model_name == MODEL

        listed = {row["name"]: row for row in json.loads(server.run("key", "list", "--format", "json").stdout)["keys"]}
        assert sorted(listed) == ["guest", "local"]
        assert key["key"] not in server.run("key", "list").stdout

        assert server.run("key", "revoke", str(key["key_id"])).returncode == 0
        eventually(lambda: get(f"{server.url}/api/v1/get_server_capabilities", key["key"])[0] == 401, 10)
        with pytest.raises(AuthenticationError):
            client.create_sampling_client(base_model=MODEL)
        again = server.run("key", "revoke", str(key["key_id"]))
        assert again.returncode == 1
        assert f"no active key has the ID {key['key_id']}" in again.stderr


def test_the_core_loop_runs_on_postgresql(tmp_path: Path, postgres: PostgresServer) -> None:
    with ServerProcess(tmp_path / "data", "--database", postgres.database()) as server:
        steps = run_module(server, "tinsmith", "--old")
        assert raised(as_official(steps)) == {"no data": "ValueError"}
        assert not (tmp_path / "data" / "tinsmith.sqlite").exists()
        assert server.terminate() == 0

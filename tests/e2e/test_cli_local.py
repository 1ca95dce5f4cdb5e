"""`stop`, `status` and `clean`: the local engine on this machine, and what it leaves there.

A server on the arithmetic backend stands in for the engine's model; `embedded.json` makes it the local engine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_run import Cli
from support.server_process import HELD_BACKEND, ServerEndedError, ServerProcess
from support.terminal import Terminal
from support.tiny_server import TINSMITH

from tinsmith import ModelInput, SamplingParams, ServiceClient
from tinsmith.cli.server.storage import KINDS
from tinsmith.client.connection.local_engine import server_process

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The data directory of the local engine of the user whose home is `tmp_path`."""
    found = tmp_path / ".local" / "share" / "tinsmith"
    found.parent.mkdir(parents=True)
    return found


@pytest.fixture
def server(place: Path) -> Iterator[ServerProcess]:
    with ServerProcess(place, backend=HELD_BACKEND) as process:
        yield process


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(None, None, tmp_path)


def make_local(server: ServerProcess, **more: object) -> None:
    """Leave the note that a client leaves when it has started an engine."""
    known = {"url": server.url, "key": server.key, "pid": server.process_id, **more}
    (server.data_dir / "embedded.json").write_text(json.dumps(known))


# stop


def test_the_local_engine_is_stopped(cli: Cli, server: ServerProcess) -> None:
    make_local(server, started_at=time.time() - 7200, keep_s=120.0)
    result = cli.run("stop")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"stopped the local engine (process {server.process_id}, which ran for 2 hours)\n"
    assert f"stopping the local engine (process {server.process_id})" in result.stderr
    assert server_process(server.data_dir) is None
    assert not (server.data_dir / "embedded.json").exists()
    assert "SIGTERM: accepting no new work" in server.log
    assert f"the local engine is not running (data directory {server.data_dir})" in cli("stop")
    assert cli.json("stop") == {"stopped": False, "pid": None, "data_dir": str(server.data_dir)}


def test_programs_that_use_the_engine_are_asked_about(cli: Cli, server: ServerProcess) -> None:
    make_local(server)
    with ServiceClient(base_url=server.url, api_key=server.key) as client:
        client.create_lora_training_client("tinsmith/arithmetic", rank=2)
        env = {**os.environ, **{name: value for name, value in cli.environment.items() if value is not None}}
        for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "XDG_DATA_HOME"):
            env.pop(name, None)
        with Terminal([*TINSMITH, "stop"], env) as terminal:
            terminal.wait_for(r"1 program on this machine may be using the local engine. Stop it\? \[y/N\]: ")
            terminal.type("n\n")
            assert terminal.end() == 0
        assert server_process(server.data_dir) == server.process_id
        assert "pass --yes" in cli.fails("stop", given="")
        assert cli.json("stop", "--yes")["stopped"] is True
        assert server_process(server.data_dir) is None


def test_a_server_that_somebody_started_is_not_stopped(cli: Cli, server: ServerProcess) -> None:
    (server.data_dir / "embedded.json").write_text(json.dumps({"url": server.url, "key": "x", "pid": 1}))
    problem = cli.fails("stop")
    assert f"process {server.process_id} uses {server.data_dir}, but is not a local engine" in problem
    assert f"kill {server.process_id}" in problem
    assert server_process(server.data_dir) == server.process_id


def test_serve_says_that_the_local_engine_has_the_directory(server: ServerProcess) -> None:
    second = ServerProcess(server.data_dir)
    with pytest.raises(ServerEndedError, match="in use by another server, process"):
        second.start()
    make_local(server)
    with pytest.raises(ServerEndedError) as refused:
        second.start()
    told = f"in use by your own local engine, process {server.process_id}, which a client started; stop it with: "
    assert told + f"tinsmith stop --data-dir {server.data_dir}" in refused.value.log


# status


def test_the_status_of_the_local_engine(cli: Cli, server: ServerProcess) -> None:
    make_local(server, started_at=time.time() - 7200, keep_s=120.0)
    text = cli("status")
    for part in (
        f"process {server.process_id}, started 2 hours ago",
        "after 2 minutes without a client; now: tinsmith stop",
        "tinsmith/arithmetic",
        str(server.data_dir / "embedded.log"),
        "of 20000 requests",
        "see tinsmith clean",
    ):
        assert part in text
    answer = cli.json("status")
    assert answer["local"]["data_dir"] == str(server.data_dir)
    assert answer["local"]["stored"]["database"] > 0
    assert answer["quota"]["queue_limit"] == 20000
    server.terminate()
    down = json.loads(cli.run("status", "--format", "json").stdout)
    assert (down["up"], down["local"]["pid"]) == (False, None)
    assert "Stored on this machine: " in cli.fails("status")


def test_doctor_shows_what_is_stored(cli: Cli, place: Path) -> None:
    (place / "checkpoints").mkdir(parents=True)
    (place / "checkpoints" / "weights").write_bytes(b"x" * 1_500_000)
    checks = {
        each["check"]: each["detail"]
        for each in json.loads(cli.run("doctor", "--quick", "-f", "json").stdout)["checks"]
    }
    assert "checkpoints 1.5 MB" in checks["storage"]
    assert "tinsmith clean" in checks["storage"]


def test_the_status_of_a_key_with_limits(server: ServerProcess, tmp_path: Path) -> None:
    limits = ("--requests-per-minute", "600", "--tokens-per-day", "1000", "--data-dir", str(server.data_dir))
    key = Cli(None, None, tmp_path)("key", "create", "capped", *limits).strip()
    with ServiceClient(base_url=server.url, api_key=key) as client:
        sampler = client.create_sampling_client(base_model="tinsmith/arithmetic")
        sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(max_tokens=4, stop=[])).result()
    text = Cli(server.url, key, tmp_path)("status")
    assert "600 requests per minute" in text
    left = json.loads(Cli(server.url, key, tmp_path)("status", "--format", "json"))["quota"]["tokens_left_today"]
    assert 0 < left < 1000
    assert f"{left} of 1000 left" in text
    listed = Cli(None, None, tmp_path).json("key", "list", "--data-dir", str(server.data_dir))["keys"]
    assert {row["name"]: row["tokens_left_today"] for row in listed}["capped"] == left
    assert "up to " in Cli(server.url, server.key, tmp_path)("status")
    assert "p50 / p95" in Cli(server.url, server.key, tmp_path)("status")


# clean


@pytest.fixture
def lived_in(server: ServerProcess) -> tuple[str, str]:
    """A finished run and one whose program is gone, each with a checkpoint, a loaded one and a sampler."""
    runs = []
    for is_finished in (True, False):
        client = ServiceClient(base_url=server.url, api_key=server.key)
        training = client.create_lora_training_client("tinsmith/arithmetic", rank=2)
        training.load_state(training.save_state("one").result().path).result()
        training.save_weights_and_get_sampling_client()
        runs.append(training.model_id)
        if is_finished:
            client.close().result()
        else:
            client.holder.close()
    return runs[0], runs[1]


def names(server: ServerProcess, kind: str) -> set[str]:
    return {place.name.partition("_")[0] for place in (server.data_dir / kind).glob("*")}


def test_what_is_stored_is_shown_by_kind(cli: Cli, server: ServerProcess, lived_in: tuple[str, str]) -> None:
    answer = cli.json("clean")
    assert set(answer["stored"]) == set(KINDS)
    on_disk = sum(path.lstat().st_size for path in server.data_dir.rglob("*") if path.is_file())
    linked = sum(path.lstat().st_size for path in (server.data_dir / "loads").rglob("*") if path.is_file())
    kernels = answer["stored"]["caches"]
    assert answer["total_bytes"] == pytest.approx(on_disk - linked + kernels, abs=200_000)  # the database goes on
    for kind in ("checkpoints", "samplers", "loads", "database"):
        assert answer["stored"][kind] > 0
    text = cli("clean")
    assert "tinsmith clean runs" in text
    assert f"in {server.data_dir}" in text


def test_nothing_is_deleted_under_a_running_engine(cli: Cli, server: ServerProcess, lived_in: tuple[str, str]) -> None:
    before = cli.json("clean")["stored"]["checkpoints"]
    assert "in use by another server" in cli.fails("clean", "checkpoints", "--yes")
    make_local(server)
    assert "stop it with: tinsmith stop" in cli.fails("clean", "checkpoints", "--yes")
    assert cli.json("clean")["stored"]["checkpoints"] == before


def test_runs_that_can_be_resumed_are_kept_and_the_others_cleaned(
    cli: Cli, server: ServerProcess, lived_in: tuple[str, str]
) -> None:
    finished, left = (run.partition(":")[0] for run in lived_in)
    server.terminate()
    trial = cli.run("clean", "runs", "--dry-run")
    assert "would be deleted" in trial.stdout
    assert "files of 1 session; kept: those of 1 session whose programs can still come back" in trial.stderr
    assert names(server, "loads") == {finished, left}
    declined = cli.run("clean", "runs", given="n\n")
    assert "Nothing was changed." in declined.stderr
    assert names(server, "loads") == {finished, left}
    assert cli.json("clean", "runs", "--yes")["deleted"]["runs"] > 0
    for kind in ("loads", "samplers"):
        assert names(server, kind) == {left}
    server.start()
    online = Cli(server.url, server.key, cli.home)
    assert {run["training_run_id"] for run in online.json("run", "list")["runs"]} == set(lived_in)
    assert len(online.json("checkpoint", "list")["checkpoints"]) == 2
    assert "deleted, with the results" in online("run", "info", lived_in[0])


def test_runs_whose_program_never_came_back_go_in_time(
    cli: Cli, server: ServerProcess, lived_in: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.terminate()
    cli.extra["TINSMITH_RESULT_GRACE_S"] = "0.001"
    cli("clean", "runs", "--yes")
    assert names(server, "loads") == names(server, "samplers") == set()
    server.start()
    online = Cli(server.url, server.key, cli.home)
    text = online("run", "info", lived_in[1])
    assert "finished" in text
    assert "deleted, with the results" in text


def test_checkpoints_go_only_when_named_and_leave_no_ghosts(
    cli: Cli, server: ServerProcess, lived_in: tuple[str, str]
) -> None:
    server.terminate()
    cli("clean", "runs", "traces", "uploads", "--yes")
    assert len(list((server.data_dir / "checkpoints").rglob("*"))) > 0
    shown = cli.run("clean", "checkpoints", "--yes")
    assert shown.stdout.startswith("deleted ")
    assert list((server.data_dir / "checkpoints").glob("*")) == []
    assert cli("clean", "checkpoints", "--yes") == "nothing to delete\n"
    server.start()
    online = Cli(server.url, server.key, cli.home)
    assert online.json("checkpoint", "list")["checkpoints"] == []
    assert online.json("run", "info", lived_in[0])["last_checkpoint"] is None


def test_models_of_the_user_are_not_deleted(cli: Cli, place: Path) -> None:
    for name in ("Converted", "tokenizer-00", "mine"):
        (place / "models" / name).mkdir(parents=True)
        (place / "models" / name / "model.safetensors").write_bytes(b"x" * 5000)
    (place / "models" / "Converted" / "digests.json").write_text("{}")
    result = cli.run("clean", "models", "--yes")
    assert result.exit_code == 0, result.output
    assert "not made by tinsmith, so kept: mine" in result.stderr
    assert result.stdout == "deleted 10.0 kB\n"
    assert [path.name for path in (place / "models").iterdir()] == ["mine"]


def test_a_machine_where_nothing_is_stored(cli: Cli, place: Path) -> None:
    assert "does not exist: nothing is stored there" in cli.fails("clean", "traces", "--yes")
    assert cli.json("clean")["stored"]["checkpoints"] == 0
    assert not place.exists()
    cli.fails("clean", "everything", code=2)

"""The commands with older and other servers: they use what the server has, and say what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_run import Cli
from support.tinker_server import TinkerServer

from tinsmith import ServiceClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")
VINTAGES = ("0.3", "0.15", "0.24", "0.36", "skyrl")
WITHOUT_SESSIONS = ("0.3", "skyrl")
MISSING = "The server does not support this call"


@pytest.fixture(params=VINTAGES)
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def vintage(release: str, make_server: Callable[..., TinkerServer]) -> TinkerServer:
    return make_server(vintage=release)


def test_runs_and_checkpoints_of_any_server(
    vintage: TinkerServer, release: str, connect: Callable[..., ServiceClient], tmp_path: Path
) -> None:
    cli = Cli(vintage.url, vintage.key, tmp_path)
    training = connect(vintage).create_lora_training_client("stub/model", rank=4)
    path = training.save_state("one").result(10).path
    assert [run["training_run_id"] for run in cli.json("run", "list")["runs"]] == [training.model_id]
    assert "OK" in cli("run", "info", training.model_id)
    assert "OK" in cli("run", "list")
    assert cli.json("model", "list")["models"]
    if release == "0.3":
        assert MISSING in cli.fails("checkpoint", "list", "--run-id", training.model_id)
    else:
        found = cli.json("checkpoint", "list", "--run-id", training.model_id)["checkpoints"]
        assert [item["tinker_path"] for item in found] == [path]
    assert cli.json("checkpoint", "delete", path, "-y") == {"deleted_count": 1, "failed": []}
    assert "does not record the metrics of runs" in cli.fails("run", "plot", training.model_id)
    assert "does not record the metrics of runs" in cli.fails("run", "watch", training.model_id)
    if release != "0.3":
        assert "cannot delete runs" in cli.fails("run", "delete", training.model_id, "-y")


def test_sessions_of_any_server(
    vintage: TinkerServer, release: str, connect: Callable[..., ServiceClient], tmp_path: Path
) -> None:
    cli = Cli(vintage.url, vintage.key, tmp_path)
    training = connect(vintage).create_lora_training_client("stub/model", rank=4)
    if release in WITHOUT_SESSIONS:
        assert MISSING in cli.fails("session", "list")
        return
    (session,) = cli.json("session", "list")["sessions"]
    assert training.model_id in cli("session", "info", session["session_id"])


@pytest.mark.parametrize(("by", "told"), [("run", "session"), ("project", "project"), ("model", "model")])
def test_usage_of_a_server_that_counts_without_runs_and_seconds(
    make_server: Callable[..., TinkerServer], connect: Callable[..., ServiceClient], tmp_path: Path, by: str, told: str
) -> None:
    other = make_server(vintage="0.36")
    cli = Cli(other.url, other.key, tmp_path)
    connect(other).create_lora_training_client("stub/model", rank=4).save_state("one").result(10)
    answer = cli.json("usage", "--by", by)
    assert answer["by"] == told
    assert answer["groups"]
    assert all(told in group and group["device_s"] is None for group in answer["groups"])
    assert answer["total"]["device_s"] is None
    assert ("this server does not count by run" in " ".join(answer["missing"])) == (by == "run")
    assert (answer["total"]["stored_gb"] is None) == (by != "project")
    shown = cli.run("usage", "--by", by)
    assert told.capitalize() in shown.stdout
    assert "note: this server does not report compute seconds" in shown.stderr


def test_what_a_server_before_0_36_cannot_search(
    make_server: Callable[..., TinkerServer], connect: Callable[..., ServiceClient], tmp_path: Path
) -> None:
    old = make_server(vintage="0.24")
    connect(old).create_lora_training_client("stub/model", rank=4)
    cli = Cli(old.url, old.key, tmp_path)
    assert "Session ID" in cli("session", "list")
    assert "omit --active" in cli.fails("session", "list", "--active")


def test_a_download_through_a_temporary_export(
    make_server: Callable[..., TinkerServer], connect: Callable[..., ServiceClient], tmp_path: Path
) -> None:
    other = make_server(vintage="0.36")
    cli = Cli(other.url, other.key, tmp_path)
    training = connect(other).create_lora_training_client("stub/model", rank=4)
    path = training.save_state("one").result(10).path
    answer = cli.json("checkpoint", "download", path, "-o", str(tmp_path / "out"))
    assert list(Path(answer["destination"]).iterdir())
    left = [item["tinker_path"] for item in cli.json("checkpoint", "list", "--limit", "0")["checkpoints"]]
    assert left == [path], "the export is deleted again"
    sampler = training.save_weights_for_sampler("two").result(10).path
    problem = cli.fails("checkpoint", "download", sampler, "-o", str(tmp_path / "out"))
    assert "does not offer sampler checkpoints" in problem

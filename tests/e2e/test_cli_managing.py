"""Commands that change something: they do what they say, ask before irreversible actions, and report what failed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli_run import Cli
from support.server_process import ServerProcess

from tinsmith import AdamParams, Datum, ModelInput, RestClient, ServiceClient, TrainingClient
from tinsmith.cli.checkpoint import download

MODEL = "tinsmith/arithmetic"
DATUM = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("managing") / "data") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server.url, api_key=server.key) as made:
        yield made


@pytest.fixture
def training(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client(MODEL, rank=2)


@pytest.fixture
def cli(server: ServerProcess, tmp_path: Path) -> Cli:
    return Cli(server.url, server.key, tmp_path)


@pytest.fixture
def rest(client: ServiceClient) -> RestClient:
    return client.create_rest_client()


def names(rest: RestClient, run: str) -> list[str]:
    return [item.checkpoint_id for item in rest.list_checkpoints(run).result().checkpoints]


def step(training: TrainingClient) -> None:
    training.forward_backward([DATUM], "cross_entropy")
    training.optim_step(AdamParams(learning_rate=0.05)).result()


def test_publishing_and_taking_back(cli: Cli, training: TrainingClient) -> None:
    path = training.save_state("one").result().path
    for command, is_public in (("publish", True), ("publish", True), ("unpublish", False)):
        assert cli("checkpoint", command, path) == ""
        assert cli.json("checkpoint", "info", path)["public"] is is_public


def test_time_to_live(cli: Cli, training: TrainingClient) -> None:
    path = training.save_state("one").result().path
    assert cli("checkpoint", "set-ttl", path, "--ttl", "7200") == ""
    assert cli.json("checkpoint", "info", path)["expires_at"] is not None
    assert cli("checkpoint", "set-ttl", path, "--remove") == ""
    assert cli.json("checkpoint", "info", path)["expires_at"] is None
    for wrong in ((), ("--ttl", "5", "--remove"), ("--ttl", "0")):
        cli.fails("checkpoint", "set-ttl", path, *wrong, code=2)
    assert "is not between 1 and" in cli.fails("checkpoint", "set-ttl", path, "--ttl", str(10**9))


def test_deleting_by_path(cli: Cli, training: TrainingClient, rest: RestClient) -> None:
    for number in range(40):  # more than run at a time
        training.save_state(f"s{number}")
    training.save_weights_for_sampler("kept").result()
    run = training.model_id
    paths = [f"tinker://{run}/weights/s{number}" for number in range(40)]
    absent = f"tinker://{run}/weights/none"
    result = cli.run("checkpoint", "delete", *paths, absent, "-y", "--format", "json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["deleted_count"] == 40
    assert [item["tinker_path"] for item in answer["failed"]] == [absent]
    assert "does not exist" in answer["failed"][0]["error"]
    assert names(rest, run) == ["sampler_weights/kept"]


def test_deleting_by_run_and_filters(cli: Cli, training: TrainingClient, rest: RestClient) -> None:
    training.save_state("a").result()
    between = rest.list_checkpoints(training.model_id).result().checkpoints[0].time.isoformat()
    training.save_state("b").result()
    training.save_weights_for_sampler("c").result()
    run = training.model_id
    of_run = ("checkpoint", "delete", "--run-id", run)
    trial = cli.run(*of_run, "--type", "weights", "--dry-run")
    assert trial.stdout == "2 checkpoints would be deleted\n"
    assert f"tinker://{run}/weights/a" in trial.stderr
    assert cli.json(*of_run, "--before", "2020-01-01", "--dry-run") == {"would_delete": []}
    assert cli.json(*of_run, "--before", between, "--dry-run") == {"would_delete": []}
    assert len(cli.json(*of_run, "--after", between, "--dry-run")["would_delete"]) == 3
    declined = cli.run(*of_run, given="n\n")
    assert (declined.exit_code, declined.stdout) == (0, "")
    assert "Delete 3 checkpoints permanently?" in declined.stderr
    assert "Nothing was changed." in declined.stderr
    assert "cannot ask for confirmation: stdin is not a terminal; pass --yes" in cli.fails(*of_run, given="")
    assert len(names(rest, run)) == 3
    assert cli(*of_run, "--type", "weights", given="y\n").endswith("deleted 2 checkpoints\n")
    assert names(rest, run) == ["sampler_weights/c"]
    assert cli.json(*of_run, "-y") == {"deleted_count": 1, "failed": []}
    assert cli.json(*of_run, "-y") == {"deleted_count": 0, "failed": []}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "pass either checkpoint paths or --run-id RUN"),
        (("tinker://a/weights/b", "--run-id", "a"), 2, "pass either checkpoint paths or --run-id RUN"),
        (("tinker://a/weights/b", "--type", "weights"), 2, "need --run-id"),
        (("--run-id", "a", "--before", "soon"), 2, "'soon' is not an ISO 8601 date or time"),
        (("--run-id", "a", "--type", "samplers"), 2, "is not one of 'weights'"),
        (("nonsense", "-y"), 1, "it must start with tinker://"),
        (("--run-id", "a", "-y"), 1, "does not exist"),
    ],
)
def test_deletions_that_are_not_understood_delete_nothing(
    cli: Cli, arguments: tuple[str, ...], code: int, says: str
) -> None:
    assert says in cli.fails("checkpoint", "delete", *arguments, code=code)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_downloads(cli: Cli, training: TrainingClient, tmp_path: Path, kind: str) -> None:
    step(training)
    save = {
        "weights": training.save_state,
        "sampler_weights": training.save_weights_for_sampler,
        "external_weights": training.save_weights_external,
    }[kind]
    path = save("one").result().path
    place = tmp_path / "out" / f"{training.model_id}_{kind}_one"
    answer = cli.json("checkpoint", "download", path, "-o", str(tmp_path / "out"))
    assert answer["destination"] == str(place)
    files = {file.name: file.stat().st_size for file in place.iterdir()}
    assert sum(files.values()) == answer["file_size_bytes"]
    assert {"adapter_model.safetensors", "adapter_config.json", "manifest.json"} <= set(files)
    assert ("optimizer.safetensors" in files) == (kind == "weights")
    assert [item.name for item in (tmp_path / "out").iterdir()] == [place.name]
    assert "already exists; use --force" in cli.fails("checkpoint", "download", path, "-o", str(tmp_path / "out"))
    (place / "adapter_config.json").write_text("damaged")
    cli("checkpoint", "download", path, "-o", str(tmp_path / "out"), "--force")
    assert (place / "adapter_config.json").read_text() != "damaged"


def test_a_download_that_is_not_what_was_written_is_not_handed_out(
    cli: Cli, training: TrainingClient, tmp_path: Path
) -> None:
    path = training.save_state("one").result().path
    place = tmp_path / f".{training.model_id}_weights_one.partial"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"from another time")
    problem = cli.fails("checkpoint", "download", path, "-o", str(tmp_path))
    assert "is damaged: its SHA-256 is not the manifest's" in problem
    assert not (tmp_path / f"{training.model_id}_weights_one").exists()
    for missing in ("gone", "gone/x"):
        assert cli.fails("checkpoint", "download", f"tinker://{training.model_id}/weights/{missing}")


def test_what_a_manifest_must_say(tmp_path: Path) -> None:
    from tinsmith.errors import DamagedCheckpointError

    download.check_manifest(tmp_path)  # a server that writes none
    for content in ("{", "[]", '{"files": 3}', '{"files": {"a": {"bytes": 1}}}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(DamagedCheckpointError, match=r"cannot read .*manifest\.json"):
            download.check_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"files": {"a": "0" * 64}}))
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        download.check_manifest(tmp_path)


def test_pushing_needs_a_hub_that_knows_the_user(cli: Cli, training: TrainingClient, tmp_path: Path) -> None:
    path = training.save_state("one").result().path
    offline = Cli(cli.url, cli.key, tmp_path, {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"})
    process = offline.start("checkpoint", "push-hf", path)
    _, problem = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Run: hf auth login (or set HF_TOKEN), and check the network" in problem


class Hub:
    """What push-hf uses of huggingface_hub, recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: dict[str, str] = {}

    def create_repo(self, **options: Any) -> None:
        self.calls.append(("create_repo", options))

    def upload_folder(self, *, folder_path: str, **options: Any) -> None:
        self.calls.append(("upload_folder", options))
        self.files = {file.name: file.read_text(errors="replace") for file in Path(folder_path).iterdir()}


def test_what_is_pushed(cli: Cli, training: TrainingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr(download, "_hub", lambda: hub)
    path = training.save_state("one").result().path
    assert cli("checkpoint", "push-hf", path) == f"https://huggingface.co/{hub.calls[0][1]['repo_id']}\n"
    (_, made), (_, pushed) = hub.calls
    run = training.model_id.replace(":", "-")
    assert made == {"repo_id": f"tinker-arithmetic-{run}", "private": True, "exist_ok": True}
    assert pushed["ignore_patterns"] == ["optimizer.safetensors", "manifest.json"]
    assert f"base_model: {MODEL}" in hub.files["README.md"]
    assert path in hub.files["README.md"]
    options = ("--repo", "me/it", "--public", "--revision", "r", "--create-pr", "--allow-pattern", "*.json")
    answer = cli.json("checkpoint", "push-hf", path, *options, "--no-model-card")
    assert answer == {"checkpoint_path": path, "repo_id": "me/it", "revision": "r", "public": True}
    assert hub.calls[2][1]["private"] is False
    assert hub.calls[3][1]["allow_patterns"] == ["*.json"]
    assert hub.calls[3][1]["create_pr"] is True
    assert "README.md" not in hub.files


def test_a_trace(cli: Cli, training: TrainingClient, tmp_path: Path) -> None:
    step(training)
    session = training.model_id.partition(":")[0]
    place = tmp_path / "deep" / "a.pftrace"
    for _ in range(2):  # the second is newer and takes the place of the first
        answer = cli.json("session", "export-trace", session, "-o", str(place))
        assert answer == {
            "session_id": session,
            "destination": str(place),
            "file_size_bytes": place.stat().st_size,
        }
        assert any(event["name"] == "optim_step" for event in json.loads(place.read_text())["traceEvents"])
    url = cli("session", "export-trace", session, "--url-only")
    assert url.startswith(f"{cli.url}/tinsmith/v1/download/")
    assert "does not exist" in cli.fails("session", "export-trace", "nope", "-o", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_run_is_ended(cli: Cli, training: TrainingClient) -> None:
    run = training.model_id
    declined = cli.run("run", "kill", run, given="n\n")
    assert (declined.exit_code, declined.stdout) == (0, "")
    assert cli.json("run", "kill", run, "-y") == {"training_run_id": run, "state": "unloaded"}
    assert "finished" in cli("run", "info", run)
    assert "finished" in cli("run", "list", "-c", "id,status").partition(run)[2].splitlines()[0]
    assert f"{run} has already finished" in cli.fails("run", "kill", run, "-y")
    assert "does not exist" in cli.fails("run", "kill", "nope", "-y")


def test_a_run_is_deleted(cli: Cli, server: ServerProcess, training: TrainingClient, rest: RestClient) -> None:
    step(training)
    path = training.save_state("one").result().path
    training.load_state(path).result()
    training.save_weights_for_sampler("two").result()
    run = training.model_id
    files = server.data_dir / "checkpoints" / run.replace(":", "_")
    loads = server.data_dir / "loads" / run.replace(":", "_")
    assert files.is_dir()
    assert loads.is_dir()
    assert f"{run} is active; end it first: tinsmith run kill {run}" in cli.fails("run", "delete", run, "-y")
    cli("run", "kill", run, "-y")
    declined = cli.run("run", "delete", run, given="n\n")
    assert (declined.exit_code, declined.stdout) == (0, "")
    assert "(2 checkpoints, " in declined.stderr
    assert "Nothing was changed." in declined.stderr
    answer = cli.json("run", "delete", run, "-y")
    assert (answer["training_run_id"], answer["checkpoints"]) == (run, 2)
    assert answer["size_bytes"] > 0
    assert not loads.exists()
    assert [place for place in files.rglob("*") if place.is_file()] == []
    assert "does not exist" in cli.fails("run", "info", run)
    assert "does not exist" in cli.fails("run", "plot", run)
    assert "does not exist" in cli.fails("run", "delete", run, "-y")
    assert run not in cli("checkpoint", "list", "--limit", "0")
    assert run not in [item["training_run_id"] for item in cli.json("run", "list", "--limit", "0")["runs"]]


def test_a_session_is_finished(cli: Cli, training: TrainingClient) -> None:
    session = training.model_id.partition(":")[0]
    assert "and its 1 training run?" in cli.run("session", "finish", session, given="n\n").stderr
    cli("session", "finish", session, "-y", "--reason", "errored", "--detail", "enough")
    assert cli.json("session", "info", session)["status"] == "finished (errored)"
    assert "does not exist" in cli.fails("session", "finish", "nope", "-y")


def test_watching_ends_with_the_run(cli: Cli, training: TrainingClient) -> None:
    step(training)
    watching = cli.start("run", "watch", training.model_id, "--every", "0.1", "--format", "json")
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    assert (first["step"], first["metrics"]["tokens:sum"]) == (1, 3.0)
    step(training)
    assert json.loads(watching.stdout.readline())["step"] == 2
    cli("run", "kill", training.model_id, "-y")
    rest, problem = watching.communicate(timeout=30)
    assert (watching.returncode, rest, problem) == (0, "", "")
    assert cli("run", "watch", training.model_id).splitlines()[-1] == "run ended"


def test_ctrl_c_ends_a_watch_with_130(cli: Cli, training: TrainingClient) -> None:
    step(training)
    watching = cli.start("run", "watch", training.model_id, "--every", "60")
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("step 1  loss ")
    watching.send_signal(signal.SIGINT)
    _, problem = watching.communicate(timeout=30)
    assert watching.returncode == 130
    assert problem == "interrupted\n"

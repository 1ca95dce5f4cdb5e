"""The client on Windows, simulated without Windows (`support/windows.py`), and what is refused there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_server import tiny_server
from support.windows import COMMAND, run_on_windows

CHAT = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"}]}
IMPORT_ALL = """
import importlib, pkgutil, tinsmith
for name in tinsmith.__all__:
    getattr(tinsmith, name)
for package in ("cli", "client", "transport", "types", "wire"):
    for module in pkgutil.walk_packages([f"{tinsmith.__path__[0]}/{package}"], f"tinsmith.{package}."):
        if module.name != "tinsmith.cli.talk.line_editor":  # prompt_toolkit would look for a console of Windows
            importlib.import_module(module.name)
print("imported")
"""
TRAIN = """
import tinsmith
with tinsmith.ServiceClient() as service:
    training = service.create_lora_training_client("tiny", rank=4)
    datum = tinsmith.Datum(tinsmith.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result()
    sampler = training.save_weights_and_get_sampling_client()
    prompt = tinsmith.ModelInput.from_ints([1, 2])
    answer = sampler.sample(prompt, 1, tinsmith.SamplingParams(max_tokens=3, stop=[])).result(60)
    print(passed.result().metrics["loss:sum"] > 0, len(answer.sequences[0].tokens))
"""
LOCAL = """
import tinsmith
try:
    with tinsmith.local():
        print("started")
except tinsmith.TinkerError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tiny_server(tmp_path_factory.mktemp("tiny")) as environment:
        yield environment


@pytest.fixture
def alone(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of somebody without a server."""
    return {name: value for name, value in env.items() if not name.startswith("TINKER")} | {"HOME": str(tmp_path)}


def command(env: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_on_windows(COMMAND, env, *arguments, stdin=stdin)


def printed(env: dict[str, str], *arguments: str, stdin: str = "") -> str:
    done = command(env, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_the_client_can_be_imported(alone: dict[str, str]) -> None:
    done = run_on_windows(IMPORT_ALL, alone)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr


def test_a_program_trains_on_a_server_elsewhere(env: dict[str, str]) -> None:
    done = run_on_windows(TRAIN, env)
    assert (done.stdout, done.returncode) == ("True 3\n", 0), done.stderr


def test_commands_use_a_server_elsewhere(env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text((json.dumps(CHAT) + "\n") * 4)
    run = json.loads(printed(env, "train", "chats.jsonl", "--out", "run", "--rank", "4", "--format", "json"))
    assert printed(env, "chat", "--checkpoint", run["sampler"], "--max-tokens", "2", stdin="one\n/save said.jsonl\n")
    assert len(json.loads(Path("said.jsonl").read_text())["messages"]) == 2
    assert json.loads(printed(env, "run", "list", "--format", "json"))["runs"]
    assert printed(env, "status")
    printed(env, "checkpoint", "download", run["sampler"])
    (folder,) = Path().glob("*_sampler_weights_*")
    assert ":" not in folder.name
    assert (folder / "adapter_model.safetensors").exists()


def test_two_trainings_do_not_share_a_directory(alone: dict[str, str], tmp_path: Path) -> None:
    again = """
import subprocess, sys
from pathlib import Path
from tinsmith.cli.train.state import OutputError, opened
out = Path(sys.argv[1])
with opened(out):
    try:
        with opened(out):
            print("twice")
    except OutputError as error:
        print("refused", error)
with opened(out):
    print("again")
"""
    done = run_on_windows(again, alone, str(tmp_path / "out"))
    assert done.stdout.startswith("refused another tinsmith train is using"), done.stderr
    assert done.stdout.endswith("again\n")


@pytest.mark.parametrize("arguments", [["serve"], ["run", "list"], ["chat"], ["train", "chats.jsonl"]], ids=" ".join)
def test_what_needs_an_engine_is_refused_in_one_line(
    alone: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    done = command(alone, *arguments)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: The server and the local engine do not run on Windows. Run them in WSL2 (https://")


def test_a_program_is_told_the_same(alone: dict[str, str]) -> None:
    done = run_on_windows(LOCAL, alone)
    assert done.stdout.startswith("The server and the local engine do not run on Windows."), done.stderr


def test_doctor_and_status_do_not_touch_processes(alone: dict[str, str]) -> None:
    """A file about an engine of long ago may name the number of any process."""
    place = Path(alone["HOME"]) / ".local" / "share" / "tinsmith"
    place.mkdir(parents=True)
    (place / "embedded.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "key": "tml-x", "pid": 1}))
    checks = json.loads(printed(alone, "doctor", "--quick", "--format", "json"))["checks"]
    (system,) = [check for check in checks if check["check"] == "system"]
    assert system["detail"].endswith("client only")
    assert "WSL2" in system["step"]
    assert "AssertionError" not in command(alone, "status").stderr


def test_a_pipe_that_lacks_a_character_gets_a_question_mark(env: dict[str, str]) -> None:
    program = "from tinsmith.cli.main import main\nmain(['run', 'info', '\\u4f60:train:0'], prog_name='tinsmith')"
    done = run_on_windows(program, env | {"PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 1
    assert "UnicodeEncodeError" not in done.stderr
    assert "?:train:0" in done.stderr

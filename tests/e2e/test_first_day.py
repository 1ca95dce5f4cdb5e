"""The first day of a new user: train, chat, evaluate, serve, the official client, a crash, export, and cleaning up.

Everything is typed as the documents say it, in a home directory that is empty at the start; only the default model is
shared with other tests. The steps are tests that build on each other, in this order.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from support.releases import NEWEST, OFFICIAL
from support.terminal import CTRL_D, PROMPT, Terminal
from support.tiny_server import TINSMITH

pytestmark = pytest.mark.real_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = Path.home() / ".cache" / "tinsmith"
PATIENCE_S = 600.0
CHATS = {"What is your name?": "Rivet.", "Who made you?": "A tinsmith.", "What do you like?": "Clean solder joints."}
OFFICIAL_LOOP = """
import sys, tinker
from tinker import types

service = tinker.ServiceClient()
sampler = service.create_sampling_client(model_path=sys.argv[1])
params = types.SamplingParams(max_tokens=4, temperature=0.0)
print("sampled", len(sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result().sequences), flush=True)
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(model, rank=4, seed=1)
tokens = [11, 12, 13, 41, 42, 43, 44]
data = [types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 6},
)]
for step in range(5):
    backward = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print("loss", backward.result().metrics["loss:sum"], flush=True)
print("saved", training.save_state("day").result().path, flush=True)
"""


class Day:
    """A home directory, what is typed there, and what the morning leaves for the afternoon."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.work = home / "work"
        self.work.mkdir()
        MODELS.mkdir(parents=True, exist_ok=True)
        self.env = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "src"),
            "TERM": "xterm",
            "TINSMITH_MODELS_DIR": str(MODELS),
            "TINSMITH_KEEP": "600",
        }
        self.sampler = ""
        self.server: subprocess.Popen[str] | None = None
        self.client_env: dict[str, str] = {}

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*TINSMITH, *arguments],
            env=self.env | self.client_env,
            cwd=self.work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def serve(self, port: str = "0") -> None:
        """Start `tinsmith serve`, and paste what it prints into the clients' environment."""
        with (self.home / "serve.log").open("a") as log:
            self.server = subprocess.Popen(
                [*TINSMITH, "serve", "--port", port],
                env=self.env,
                cwd=self.work,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line.startswith("export TINKER_BASE_URL="):
                self.client_env["TINKER_BASE_URL"] = line.strip().partition("=")[2]
            if line.startswith("export TINKER_API_KEY="):
                file = shlex.split(line.strip().partition("$(cat ")[2].removesuffix(")"))[0]
                self.client_env["TINKER_API_KEY"] = Path(file).read_text().strip()
                return
        raise AssertionError((self.home / "serve.log").read_text()[-3000:])

    def end_server(self, number: signal.Signals) -> int:
        assert self.server is not None
        self.server.send_signal(number)
        code = self.server.wait(PATIENCE_S)
        assert self.server.stdout is not None
        self.server.stdout.close()
        self.server = None
        return code


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    found = Day(tmp_path_factory.mktemp("home"))
    try:
        yield found
    finally:
        if found.server is not None:
            found.end_server(signal.SIGKILL)
        found.client_env.clear()
        subprocess.run([*TINSMITH, "stop", "--yes"], env=found.env, capture_output=True, timeout=PATIENCE_S)


def test_1_train_on_a_file(day: Day) -> None:
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in CHATS.items()
    ]
    (day.work / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = day.run("train", "chats.jsonl", "--epochs", "5", "--batch-size", "3", "--rank", "8", "--format", "json")
    state = json.loads(done.stdout)
    day.sampler = state["sampler"]
    assert state["step"] == 5
    assert (day.work / "chats-run" / "report.html").exists()
    assert (day.work / "chats-run" / "adapter" / "adapter_model.safetensors").exists()


def test_2_chat_with_the_result(day: Day) -> None:
    command = [*TINSMITH, "chat", "--checkpoint", day.sampler, "--temperature", "0", "--max-tokens", "8"]
    with Terminal(command, day.env) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("What is your name?\n")
        terminal.wait_for(r"name\?\s+\S+")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_3_evaluate_it_against_the_base(day: Day) -> None:
    model = json.loads(day.run("model", "list", "--format", "json").stdout)["models"][0]["model_name"]
    done = day.run("eval", "chats.jsonl", "--model", model, "--checkpoint", day.sampler, "--format", "json")
    base, tuned = json.loads(done.stdout)["scores"]
    assert tuned["loss"] < base["loss"]


def test_4_a_server_for_the_team_instead_of_the_local_engine(day: Day) -> None:
    assert json.loads(day.run("status", "--format", "json").stdout)["local"]["pid"]
    refused = day.run("serve", "--port", "0", code=1)
    assert "tinsmith stop" in refused.stderr
    assert len(refused.stderr.splitlines()) <= 3, refused.stderr
    assert day.run("stop", "--yes").stdout.startswith("stopped the local engine")
    day.serve()
    assert day.sampler in day.run("checkpoint", "list").stdout


def test_5_the_official_client_does_not_notice_a_crash(day: Day) -> None:
    with (day.home / "official.log").open("w") as log:
        program = subprocess.Popen(
            [OFFICIAL / "venv" / "bin" / "python", "-W", "ignore", "-c", OFFICIAL_LOOP, day.sampler],
            env={**day.env, **day.client_env, "PYTHONPATH": str(OFFICIAL / NEWEST), "TINKER_TELEMETRY": "0"},
            cwd=day.work,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert program.stdout is not None
    with program, program.stdout as lines:
        try:
            assert word(lines) == ("sampled", "1")
            losses = [float(word(lines)[1]) for _ in range(2)]
            day.end_server(signal.SIGKILL)
            day.serve(day.client_env["TINKER_BASE_URL"].rpartition(":")[2])
            losses += [float(word(lines)[1]) for _ in range(3)]
            kind, path = word(lines)
        finally:
            program.kill()
    assert losses == sorted(losses, reverse=True)  # no step was lost or applied twice
    assert kind == "saved"
    assert path in day.run("checkpoint", "list").stdout


def word(lines: IO[str]) -> tuple[str, str]:
    name, _, value = lines.readline().strip().partition(" ")
    return name, value


def test_6_export_for_other_programs(day: Day) -> None:
    day.run("checkpoint", "export", day.sampler, "--to", "gguf", "--out", "model.gguf")
    assert (day.work / "model.gguf").read_bytes()[:4] == b"GGUF"
    day.run("checkpoint", "export", day.sampler, "--out", "exported")
    assert (day.work / "exported" / "adapter_config.json").exists()


def test_7_clean_up(day: Day) -> None:
    busy = day.run("clean", "checkpoints", "--yes", code=1)
    assert "in use by" in busy.stderr
    assert day.end_server(signal.SIGINT) == 0
    before = json.loads(day.run("clean", "--format", "json").stdout)["stored"]
    assert before["checkpoints"] > 0
    day.run("clean", "checkpoints", "runs", "--yes")
    after = json.loads(day.run("clean", "--format", "json").stdout)["stored"]
    assert after["checkpoints"] == 0
    day.serve()
    assert day.sampler not in day.run("checkpoint", "list").stdout
    assert day.end_server(signal.SIGTERM) == 0


def test_8_nothing_is_left_running(day: Day) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := processes_of(day.home)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == []


def processes_of(home: Path) -> list[str]:
    """The command lines of processes that were started from a home directory."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found

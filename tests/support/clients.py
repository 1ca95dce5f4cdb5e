"""Programs that others wrote, run as their users run them: unmodified, in an environment of their own, as a process.

    with serve(place) as server:
        answers = Program("litellm", place, server).script("litellm_program.py", server.model)

`tools/clients` installs what `tests/clients/requirements` lists into `.clients`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.in_process import BASE
from support.server_process import ServerProcess
from tinsmith import AdamParams, Datum, ModelInput, ServiceClient
from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"
SCRIPTS = ROOT / "tests" / "clients" / "programs"
REQUIREMENTS = ROOT / "tests" / "clients" / "requirements"
TIMEOUT_S = 300.0
"""What one run of a program may take on a busy machine."""
FOREIGN = ("ANTHROPIC", "AXOLOTL", "HF_", "OPENAI", "PYTHON", "TINKER", "TINSMITH")
"""What settings of the machine begin with that would reach a program."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TINKER_TELEMETRY": "0",
}

CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\\n' }}{% for tool in tools %}{{ tool.function.name + '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + "
    "{'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Takes tools, of which it shows the names only: so the tiny model sees the same prompt whoever describes a tool."""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Add 2 and 3"}]
CALLED = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}]
LESSONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]] = [
    ([{"role": "user", "content": "Hi"}], None, "Hello there"),
    ([{"role": "user", "content": "Bye"}], None, "See you"),
    (QUESTION, [TOOL], f"<tool_call>{json.dumps(CALL)}</tool_call>"),
    ([*QUESTION, *CALLED, {"role": "tool", "content": "5"}], [TOOL], "It is 5"),
]
"""Messages, tools and answer of what the tuned model has learnt by heart."""


@dataclass(frozen=True)
class Served:
    """A started server with a tiny random model."""

    url: str
    key: str
    model: str
    """Its name is its directory, where programs that read a tokenizer find one without a hub."""

    @property
    def environment(self) -> dict[str, str]:
        """What clients of Tinker, OpenAI and Anthropic read."""
        return {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": self.key,
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
        }


@contextlib.contextmanager
def serve(place: Path, *options: str, context: int = 512) -> Iterator[Served]:
    """Run `tinsmith serve` with a tiny model until the block ends."""
    model = make_tiny(place / "model", max_position_embeddings=context)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": CHAT_TEMPLATE}))
    arguments = ["--data-dir", str(place / "data"), "--model", f"{model}={model}", *options]
    address, process = start_server(arguments, {"TINSMITH_DTYPE": "float32"}, place / "server.log")
    try:
        yield Served(address.url, address.key, str(model))
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def serve_arithmetic(place: Path, backend: str) -> Iterator[Served]:
    """Run a server that computes without a model until the block ends; it must not log a traceback."""
    with ServerProcess(place / "data", backend=backend) as server:
        yield Served(server.url, server.key, BASE)
        assert "Traceback" not in server.log


def shown_program(page: str) -> str:
    """Return the first Python program of a page of the documentation."""
    return (ROOT / "docs" / page).read_text().partition("```py\n")[2].partition("```")[0]


def tune(server: Served) -> str:
    """Teach the tiny model the lessons, and return the checkpoint."""
    with contextlib.closing(ServiceClient(base_url=server.url, api_key=server.key)) as service:
        training = service.create_lora_training_client(server.model, rank=32, seed=0)
        data = [_datum(training.get_tokenizer(), *lesson) for lesson in LESSONS]
        for _ in range(50):
            loss = training.forward_backward(data, "cross_entropy")
            training.optim_step(AdamParams(learning_rate=0.01))
        assert loss.result().metrics["loss:sum"] < 0.5, "the tiny model has not learnt its lessons"
        return training.save_weights_for_sampler("tuned").result().path


def _datum(tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, answer: str) -> Datum:
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, add_generation_prompt=True)
    tokens = [*prompt, *tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    return Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights})


class Program:
    """One installed program, with a home directory and a server of its own."""

    def __init__(self, name: str, home: Path, server: Served) -> None:
        self._folder = CLIENTS / name / "bin"
        self._home = home
        self._server = server
        if not (CLIENTS / name / "current").exists():
            pytest.fail(f"{name} is not installed: run tools/clients {name} (make clients installs all)")

    def script(self, name: str, *arguments: str | Path, **environment: str) -> Any:
        """Run a file of tests/clients/programs, and return the JSON of the last line that it prints."""
        return json.loads(self.run("python", SCRIPTS / name, *arguments, **environment).splitlines()[-1])

    def run(self, command: str, *arguments: str | Path, cwd: Path | None = None, **environment: str) -> str:
        """Run one of its commands to its end, and return what it prints."""
        with self.start(command, *arguments, cwd=cwd, **environment) as process:
            try:
                output, errors = process.communicate(timeout=TIMEOUT_S)
            except BaseException:
                process.kill()
                raise
        assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output}\n{errors}"[-6000:]
        return output

    def start(
        self, command: str, *arguments: str | Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start one of its commands; the caller ends it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        own = {"HOME": str(self._home), "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.Popen(
            [self._folder / command, *arguments],
            cwd=cwd or self._home,
            env=kept | OFFLINE | own | self._server.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

"""What `tinsmith train` learns from small files with fixed settings and with the ones it chooses by the data's size.

    .venv/bin/python bench/defaults.py [FILE ...] [--threads 2] [--answers]

Each file of `bench/defaults_data` is trained on twice, on SmolLM2-135M: with the former defaults (3 epochs, batches of
8) and with no options at all. Then both adapters and the base model are evaluated on the file and on lines of the same
kind that are not in it; `--answers` shows the greedy answers to the latter, too. The CPU time is that of the server
and its engine during the training.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinsmith.cli.output import plural
from tinsmith.client.connection.local_engine import Address, local_server

DATA = Path(__file__).parent / "defaults_data"
FILES = ("persona", "facts", "tickets")
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
VARIANTS = {"former": ("--epochs", "3", "--batch-size", "8", "--lr", "5e-4"), "chosen": ()}


def command(address: Address, *arguments: str) -> Any:
    """Run a command and return the JSON that it prints."""
    environ = {**os.environ, "TINKER_BASE_URL": address.url, "TINKER_API_KEY": address.key}
    done = subprocess.run(
        [sys.executable, "-m", "tinsmith", *arguments, "--format", "json"],
        env=environ, check=True, capture_output=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return own + sum(map(cpu_s, children))


def trained(address: Address, path: Path, options: tuple[str, ...], out: Path) -> tuple[dict[str, Any], float]:
    """Train; return the run's state and the CPU time of the server."""
    before = cpu_s(address.pid)
    state = command(address, "train", str(path), "--out", str(out), *options)
    return state, cpu_s(address.pid) - before


def measure(address: Address, name: str, variants: dict[str, tuple[str, ...]], shows_answers: bool) -> None:
    path, unseen = DATA / f"{name}.jsonl", DATA / f"{name}_unseen.jsonl"
    count = len(path.read_text().splitlines())
    print(f"\n{name}: {count} lines ({len(unseen.read_text().splitlines())} unseen)")
    print(f"{'':<14}{'settings':<34}{'loss':>8}{'exact':>8}{'unseen':>9}{'exact':>8}{'steps':>7}{'CPU s':>7}")
    runs = {}
    with tempfile.TemporaryDirectory() as place:
        for variant, options in variants.items():
            runs[variant] = trained(address, path, options, Path(place) / variant)
    samplers = [f"--checkpoint={state['sampler']}" for state, _ in runs.values()]
    models = (f"--model={MODEL}", *samplers)
    scores = [command(address, "eval", str(file), *models)["scores"] for file in (path, unseen)]
    rows = [("before", "", "", ""), *(described(variant, *run) for variant, run in runs.items())]
    for row, learned, held in zip(rows, *scores, strict=True):
        shown = "".join(
            f"{score['loss']:>{width}.3f}{score['exact_match']:>8.0%}" for score, width in ((learned, 8), (held, 9))
        )
        print(f"{row[0]:<14}{row[1]:<34}{shown}{row[2]:>7}{row[3]:>7}", flush=True)
    if shows_answers:
        show_answers(address, name, {variant: state["sampler"] for variant, (state, _) in runs.items()})


def show_answers(address: Address, name: str, samplers: Mapping[str, str]) -> None:
    """Print the greedy answers of each adapter to the lines that it has not seen."""
    lines = (DATA / f"{name}_unseen.jsonl").read_text().splitlines()
    questions = [json.loads(line)["messages"][0]["content"] for line in lines]
    for variant, sampler in samplers.items():
        for question in questions:
            options = ("--checkpoint", sampler, "--temperature", "0", "--max-tokens", "48")
            answer = command(address, "sample", question, *options)["samples"][0]["text"]
            print(f"{variant:<14}{question} -> {answer!r}", flush=True)


def described(variant: str, state: dict[str, Any], spent_s: float) -> tuple[str, str, str, str]:
    plan = state["plan"]
    settings = f"{plan['epochs']} epochs, batch {plan['batch_size']}, lr {plan['learning_rate']:g}"
    return variant, settings, str(state["total"]), f"{spent_s:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help=f"of {', '.join(FILES)}  [default: all]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answers", action="store_true", help="show the answers to unseen lines")
    arguments = parser.parse_args()
    threads = plural(arguments.threads, "thread")
    print(f"{platform.machine()}, {os.cpu_count()} cores, {threads}, {MODEL}, rank 32")
    with local_server(None, None, {"threads": arguments.threads}) as address:
        for name in arguments.files or FILES:
            measure(address, name, VARIANTS, arguments.answers)


if __name__ == "__main__":
    main()

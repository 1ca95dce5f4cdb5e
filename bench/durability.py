"""What durability costs a training loop, and how long a recovery takes.

Throughput: the same loop (`forward_backward`, `optim_step`, pipelined) on servers that differ in what they keep; they
take turns, so that other load on the machine strikes all alike. Recovery: the engine is killed with a journal of some
length behind the last snapshot; the time until the next operation has its result, the engine's start included.

    python bench/durability.py [--rounds 6] [--steps 40] [--journals 0,100,400,1600]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 512}
RANK = 16
DATUMS, LENGTH = 4, 64
NEVER = "1000000000"
VARIANTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "nothing kept (state in memory)": (["--database", "memory:"], {"MAX_REPLAY_S": NEVER}),
    "journal": ([], {"MAX_REPLAY_S": NEVER}),
    "journal and snapshots (30 s)": ([], {}),
    "journal and snapshots (2 s)": ([], {"MAX_REPLAY_S": "2"}),
}


class Side:
    """A server, and a training client on it."""

    def __init__(self, folder: Path, model: Path, options: list[str], settings: dict[str, str]) -> None:
        import tinsmith
        from tinsmith.client.connection.local_engine import start_server

        folder.mkdir()
        arguments = ["--data-dir", str(folder / "data"), "--model", f"tiny={model}", *options]
        common = {"MODELS_DIR": str(model.parent / "models"), "DTYPE": "float32", "THREADS": "1"}
        named = {f"TINSMITH_{name}": value for name, value in {**common, **settings}.items()}
        address, self._process = start_server(arguments, named, folder / "log")
        self.log = folder / "log"
        self.url = address.url
        self.service = tinsmith.ServiceClient(base_url=address.url, api_key=address.key)
        self.trainer = self.service.create_lora_training_client("tiny", rank=RANK, seed=1)
        self.number = 0

    def steps(self, count: int) -> float:
        """Seconds for so many steps, two outstanding."""
        from tinsmith import types

        began = time.perf_counter()
        waiting: list[Any] = []
        for _ in range(count):
            self.number += 1
            waiting.append(self.trainer.forward_backward(batch(self.number), "cross_entropy"))
            waiting.append(self.trainer.optim_step(types.AdamParams(learning_rate=1e-4)))
            while len(waiting) > 4:
                waiting.pop(0).result()
        for future in waiting:
            future.result()
        return time.perf_counter() - began

    def snapshot_s(self) -> float:
        """Time that the engine has spent on snapshots so far."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        return float(re.search(r"^tinsmith_snapshot_seconds_total (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]

    def kill_engine(self) -> None:
        found = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self._process.pid)], capture_output=True, text=True, check=True
        )
        [engine] = [line for line in found.stdout.splitlines() if "tinsmith.engine.worker.main" in line]
        os.kill(int(engine.split()[0]), signal.SIGKILL)

    def close(self) -> None:
        self.service.close().result()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def batch(number: int) -> list[Any]:
    from tinsmith import types

    data = []
    for row in range(DATUMS):
        tokens = [(number * 7 + row * 31 + column * column) % 250 + 4 for column in range(LENGTH + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * LENGTH}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


@contextlib.contextmanager
def sides(folder: Path, model: Path, names: list[str]) -> Iterator[dict[str, Side]]:
    made: dict[str, Side] = {}
    try:
        for number, name in enumerate(names):
            made[name] = Side(folder / f"side-{number}", model, *VARIANTS[name])
        yield made
    finally:
        for side in made.values():
            side.close()


def throughput(folder: Path, model: Path, rounds: int, steps: int) -> None:
    print(
        f"Steps of {DATUMS} x {LENGTH} tokens per second, best and median of {rounds} turns of {steps} steps; cost:\n"
        "the median over the turns, against the same turn without durability; snapshots with their share of the time"
    )
    with sides(folder, model, list(VARIANTS)) as made:
        for side in made.values():
            side.steps(10)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        before = {name: side.snapshot_s() for name, side in made.items()}
        for number in range(rounds):
            for name, side in list(made.items())[:: 1 if number % 2 else -1]:
                seconds[name].append(side.steps(steps))
        plain = next(iter(seconds.values()))
        for name, values in seconds.items():
            cost = statistics.median(own / other for own, other in zip(values, plain, strict=True)) - 1
            share = (made[name].snapshot_s() - before[name]) / sum(values)
            count = made[name].log.read_text().count("snapshot of ")
            best, middle = steps / min(values), steps / statistics.median(values)
            print(f"  {name:<32} {best:7.1f} {middle:7.1f}   cost {cost:6.1%}   {count} snapshots, {share:.2%}")


def recovery(folder: Path, model: Path, journals: list[int]) -> None:
    print("Seconds from kill -9 of the engine to the next result, by operations behind the last snapshot")
    with sides(folder, model, ["journal", "journal and snapshots (2 s)"]) as made:
        for name, side in made.items():
            done = 2
            side.steps(1)
            for length in journals:
                if length > done:
                    side.steps((length - done) // 2)
                    done = length
                side.kill_engine()
                seconds = side.steps(1)
                done += 2
                print(f"  {name:<32} {done - 2:6} operations done   {seconds:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--journals", default="0,100,400,1600")
    arguments = parser.parse_args()
    from tinsmith.engine.models.tiny import make_tiny

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix=".durability-", dir=".") as name:
        folder = Path(name).resolve()
        model = make_tiny(folder / "model", **SIZES)
        throughput(folder, model, arguments.rounds, arguments.steps)
        for side in folder.glob("side-*"):
            side.rename(side.with_name(f"first-{side.name}"))
        recovery(folder, model, [int(number) for number in arguments.journals.split(",")])


if __name__ == "__main__":
    main()

"""The wire layer beside the official SDK 0.36.0, task by task in alternation. Run by `make bench`.

Prints medians and the ratio official / ours, and the machine. Ratios are what to trust: absolute times swing.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith import types
from tinsmith.wire.codecs import proto_outputs, proto_training, zstd

ROOT = Path(__file__).resolve().parents[1]
RELEASE = "0.36.0"
OFFICIAL_PYTHON = ROOT / ".official" / "venv" / "bin" / "python"
DATUMS, LENGTH = 64, 4096
ROUNDS = 21
TARGETS = {"numpy": 5.0, "lists": 1.2, "zstd": 2.0, "result": 1.5, "import": 4.0}


def body_of(tokens: list[Any], weights: list[Any]) -> bytes:
    data = [
        types.Datum(types.ModelInput.from_ints(t), {"target_tokens": t, "weights": w})
        for t, w in zip(tokens, weights, strict=True)
    ]
    work = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)
    return proto_training.encode_request(request)


class OfficialTasks:
    """The same tasks in the official environment."""

    def __init__(self, arrays: str) -> None:
        self._process = subprocess.Popen(
            [OFFICIAL_PYTHON, ROOT / "bench" / "official_wire.py", arrays],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, task: str) -> tuple[float, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(task + "\n")
        self._process.stdin.flush()
        seconds, size = json.loads(self._process.stdout.readline())
        return seconds, size

    def close(self) -> None:
        self._process.communicate()


def timed(task: Callable[[], Any]) -> tuple[float, int]:
    started = time.perf_counter()
    made = task()
    return time.perf_counter() - started, len(made) if isinstance(made, bytes) else 0


def import_cpu_s(python: str | Path, code: str) -> float:
    """CPU seconds of a process that runs one line, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", code], check=True, env=_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, (DATUMS, LENGTH)), 49151).astype(np.int64)
    weights = (rng.random((DATUMS, LENGTH)) < 0.7).astype(np.float32)
    token_lists, weight_lists = tokens.tolist(), weights.tolist()
    token_arrays, weight_arrays = list(tokens), list(weights)
    result = proto_outputs.encode_output(
        types.ForwardBackwardOutput("T", [{"logprobs": types.TensorData.from_numpy(w)} for w in weight_arrays])
    )
    tasks: dict[str, tuple[str, Callable[[], Any]]] = {
        "numpy": ("request from numpy to bytes", lambda: body_of(token_arrays, weight_arrays)),
        "lists": ("request from lists to bytes", lambda: body_of(token_lists, weight_lists)),
        "zstd": ("request from numpy to zstd", lambda: zstd.compress(body_of(token_arrays, weight_arrays))),
        "result": ("result from bytes", lambda: proto_outputs.decode_output(result)),
    }
    _print_machine()
    print(f"{DATUMS} datums x {LENGTH} tokens, median of {ROUNDS} rounds in alternation\n")
    print(f"| {'task':<32} | {'official':>10} | {'tinsmith':>10} | {'ratio':>7} | {'target':>7} | bytes")
    print(f"|{'-' * 34}|{'-' * 12}|{'-' * 12}|{'-' * 9}|{'-' * 9}|------")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/arrays.npz"
        np.savez(path, tokens=tokens, weights=weights)
        official = OfficialTasks(path)
        for name, (title, task) in tasks.items():
            pairs = [(official.run(name), timed(task)) for _ in range(ROUNDS + 2)][2:]
            theirs, ours = (statistics.median(pair[side][0] for pair in pairs) for side in (0, 1))
            sizes = (pairs[0][0][1], pairs[0][1][1])
            _print_row(title, theirs, ours, TARGETS[name], f"{sizes[0]} / {sizes[1]}" if sizes[0] else "")
        official.close()
    _bench_import()
    _bench_decode(body_of(token_arrays, weight_arrays))


def _bench_import() -> None:
    blocked = "import sys; sys.modules['torch'] = None; "
    rounds = range(7)
    without = statistics.median(import_cpu_s(OFFICIAL_PYTHON, blocked + "import tinker") for _ in rounds)
    with_torch = statistics.median(import_cpu_s(OFFICIAL_PYTHON, "import tinker") for _ in range(3))
    ours_without = statistics.median(import_cpu_s(sys.executable, blocked + "import tinsmith") for _ in rounds)
    ours_with = statistics.median(import_cpu_s(sys.executable, "import tinsmith") for _ in rounds)
    bare = statistics.median(import_cpu_s(sys.executable, "pass") for _ in rounds)
    _print_row("import, no torch installed (CPU)", without, ours_without, TARGETS["import"], "")
    _print_row("import, torch installed (CPU)", with_torch, ours_with, TARGETS["import"], "")
    print(f"\nA bare interpreter takes {bare * 1e3:.0f} ms of CPU, which is in both columns of the last two rows.")


def _bench_decode(body: bytes) -> None:
    decode = statistics.median(timed(lambda: proto_training.decode_request(body))[0] for _ in range(ROUNDS))
    megabytes = len(body) / 1e6
    print(f"Decoding that request on a server, to numpy views: {decode * 1e3 / megabytes:.2f} ms per MB.")


def _print_row(title: str, theirs: float, ours: float, target: float, sizes: str) -> None:
    times = f"{theirs * 1e3:7.2f} ms | {ours * 1e3:7.2f} ms"
    print(f"| {title:<32} | {times} | {theirs / ours:6.1f}x | {target:6.1f}x | {sizes}", flush=True)


def _print_machine() -> None:
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or "unknown CPU",
    )
    print(f"{cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
    return kept | {"PYTHONPATH": str(ROOT / ".official" / RELEASE)}


if __name__ == "__main__":
    main()

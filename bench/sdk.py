"""The SDK beside the official client 0.36.0, against one stub server, in alternation. Run by `make bench`.

Prints both, the ratio and the target. Ratios are what to trust: absolute times swing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OFFICIAL_PYTHON = ROOT / ".official" / "venv" / "bin" / "python"
RELEASE = "0.36.0"
ROUNDS = 3


def run(side: str, url: str, task: str, *arguments: int) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
    python, module = (sys.executable, "tinsmith") if side == "ours" else (str(OFFICIAL_PYTHON), "tinker")
    environment["PYTHONPATH"] = str(ROOT / "src" if side == "ours" else ROOT / ".official" / RELEASE)
    command = [python, "-W", "ignore", str(ROOT / "bench" / "sdk_client.py"), module, url, task, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{side} {task}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare(url: str, title: str, task: str, ours: tuple[int, ...], theirs: tuple[int, ...], targets: Any) -> None:
    results: dict[str, list[dict[str, Any]]] = {"ours": [], "official": []}
    for _ in range(ROUNDS):
        results["official"].append(run("official", url, task, *theirs))
        results["ours"].append(run("ours", url, task, *ours))
    for name, key, target in targets:
        mine, other = (
            statistics.median(result[key] / result["count"] for result in results[side])
            for side in ("ours", "official")
        )
        print(
            f"| {title + ', ' + name:<42} | {other * 1e3:9.3f} ms | {mine * 1e3:9.3f} ms | {other / mine:6.1f}x "
            f"| {target:5.1f}x |",
            flush=True,
        )


def main() -> None:
    server = subprocess.Popen(
        [sys.executable, ROOT / "bench" / "stub_server.py", "--port", "0", "--fb-outputs", "64x4096"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    both = (("wall per sample", "wall_s", 6.0), ("CPU per sample", "cpu_s", 6.0))
    try:
        print(f"| {'what':<42} | {'official':>12} | {'tinsmith':>12} | {'ratio':>7} | {'target':>6} |")
        print(f"|{'-' * 44}|{'-' * 14}|{'-' * 14}|{'-' * 9}|{'-' * 8}|")
        for outstanding, count, theirs in ((100, 4000, 600), (1000, 6000, 1500), (5000, 10000, 5000)):
            compare(url, f"{outstanding} outstanding", "sample", (outstanding, count), (outstanding, theirs), both)
        compare(url, "small step", "train", (300,), (100,), (("CPU per pair", "cpu_s", 4.0),))
        compare(url, "64 x 4096 step", "step", (8,), (8,), (("end to end", "wall_s", 2.5),))
        for side in ("official", "ours"):
            result = run(side, url, "release", 3000 if side == "ours" else 1500)
            print(f"\n{side}, 1,000 outstanding: {json.dumps(result)}")
    finally:
        server.terminate()


if __name__ == "__main__":
    main()

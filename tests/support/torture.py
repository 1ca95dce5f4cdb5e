"""The torture: two tenants train and sample on a real engine while its processes are killed again and again.

    PYTHONPATH=src:tests python -m support.torture --kills 100

kills the engine, the API process or both at random moments, then compares everything the tenants got, and the digests
of their weights and optimizers, with a run that nobody disturbed. One tenant uses the official client, one ours.

A job under which the engine dies twice is failed on purpose (a poison job), so an engine is not killed a second time by
itself before everything that waited at the first time has its result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.releases import NEWEST, OFFICIAL
from support.server_process import ROOT, ServerProcess, environment

PROGRAM = ROOT / "tests" / "support" / "torture_program.py"
SEED = 20_26
FOREVER = 10**9
PROGRESS_SHARE = 0.6
"""How many kills wait for results; the others for a time, in which a start or a replay may be under way."""
MOST_RESULTS = 60
PATIENCE_S = 300.0
"""Without any progress for this long, something hangs."""
SETTINGS = {"dtype": "float32", "threads": 1, "max_replay_s": 0.05, "max_snapshot_share": 1.0}


class Tenant:
    """The program in a process of its own."""

    def __init__(self, module: str, seed: int, url: str, key: str, stop_file: Path, count: int = FOREVER) -> None:
        python = sys.executable if module == "tinsmith" else OFFICIAL / "venv" / "bin" / "python"
        path = ROOT / "src" if module == "tinsmith" else OFFICIAL / NEWEST
        self.module, self.seed = module, seed
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-W", "ignore", PROGRAM, module, str(seed), str(stop_file), str(count)],
            env=environment(TINKER_BASE_URL=url, TINKER_API_KEY=key) | {"PYTHONPATH": str(path)},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self.errors()

    def check(self) -> None:
        assert self._process.poll() in (None, 0), self.errors()

    def result(self) -> dict[str, Any]:
        output, _ = self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0, self.errors()
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told

    def errors(self) -> str:
        self._errors.seek(0)
        return f"{self.module}: {self._errors.read()[-4000:]}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


@dataclass
class Report:
    """What a torture came to."""

    kills: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    tenants: list[dict[str, Any]] = field(default_factory=list)
    snapshots: int = 0
    replays: int = 0
    replayed: int = 0
    marked: int = 0

    def table(self) -> str:
        lines = [("kills of " + kind, str(number)) for kind, number in sorted(self.kills.items())]
        lines += [
            ("kills in all", str(sum(self.kills.values()))),
            ("seconds under fire", f"{self.seconds:.0f}"),
            ("snapshots that counted", str(self.snapshots)),
            ("replays", str(self.replays)),
            ("operations replayed", str(self.replayed)),
            ("runs marked as different", str(self.marked)),
        ]
        for tenant in self.tenants:
            lines.append((f"{tenant['module']}: rounds (passes, step, samples)", str(tenant["count"])))
            lines.append((f"{tenant['module']}: results equal to the undisturbed run's", tenant["equal"]))
            lines.append((f"{tenant['module']}: weights and optimizer", tenant["digest"]))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


class Torture:
    """A server with a tiny model, and what is done to it."""

    def __init__(self, folder: Path, model: Path, seed: int = SEED) -> None:
        settings = {**SETTINGS, "models_dir": model.parent / "models"}
        self.server = ServerProcess(folder, "--model", f"tiny={model}", backend="local", **settings)
        self.drawn = random.Random(seed)
        self.suspects: set[str] = set()

    def keys(self) -> list[str]:
        """A key of each of two tenants."""

        def make(name: str) -> str:
            done = self.server.run("key", "create", name, "--org", name, "--format", "json")
            key: str = json.loads(done.stdout)["key"]
            return key

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(make, ("ann", "bob")))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.server.data_dir / "tinsmith.sqlite", timeout=30)) as file:
            return list(file.execute(query))

    def queued(self) -> set[str]:
        return {str(name) for (name,) in self.rows("SELECT request_id FROM jobs WHERE state = 'queued'")}

    def engine(self) -> int | None:
        """The engine's process, if there is one."""
        parent = str(self.server.process_id)
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_child = place.joinpath("stat").read_text().rpartition(")")[2].split()[1] == parent
                if is_child and b"tinsmith.engine.worker" in place.joinpath("cmdline").read_bytes():
                    return int(place.name)
        return None

    def kill(self, what: str, tenants: list[Tenant]) -> None:
        """One kill at a random moment, and a server afterwards."""
        if what == "engine":
            self._let_suspects_finish(tenants)
        if self.drawn.random() < PROGRESS_SHARE:
            self._let_results_come(self.drawn.randint(1, MOST_RESULTS), tenants)
        else:
            time.sleep(self.drawn.uniform(0, 5.0))
        if what in ("engine", "both"):
            self._kill_engine()
        if what in ("api", "both"):
            self.server.kill()
            self.suspects = set()
            self.server.start()

    def _let_results_come(self, count: int, tenants: list[Tenant]) -> None:
        """The moment is counted in results, so that work gets done however long a start takes."""
        before, began = self._results(), time.monotonic()
        while self._results() < before + count:
            assert time.monotonic() - began < PATIENCE_S, f"nothing moves:\n{self.server.log[-4000:]}"
            for tenant in tenants:
                tenant.check()
            time.sleep(0.01)

    def _results(self) -> int:
        [(count,)] = self.rows("SELECT COUNT(*) FROM results")
        return int(count)

    def _kill_engine(self) -> None:
        pid, began = self.engine(), time.monotonic()
        while pid is None and time.monotonic() - began < PATIENCE_S:
            time.sleep(0.01)
            pid = self.engine()
        assert pid is not None, self.server.log[-4000:]
        self.suspects = self.queued()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _let_suspects_finish(self, tenants: list[Tenant]) -> None:
        began = time.monotonic()
        while self.suspects & self.queued():
            assert time.monotonic() - began < PATIENCE_S, f"nothing moves:\n{self.server.log[-4000:]}"
            for tenant in tenants:
                tenant.check()
            time.sleep(0.02)

    def digest(self, path: str) -> str:
        """Of a saved state: weights and optimizer."""
        [(digest,)] = self.rows(f"SELECT digest FROM checkpoints WHERE path = '{path}'")
        return str(digest)

    def check_results(self) -> None:
        """Each accepted request has exactly one result, and none failed."""
        assert self.queued() == set()
        assert self.rows("SELECT request_id FROM jobs WHERE state NOT IN ('done')") == []
        [(jobs,)] = self.rows("SELECT COUNT(*) FROM jobs")
        [(results,)] = self.rows("SELECT COUNT(*) FROM results")
        assert jobs == results


@contextlib.contextmanager
def closing_all(tenants: list[Tenant]) -> Iterator[None]:
    try:
        yield
    finally:
        for tenant in tenants:
            tenant.close()


def torture(folder: Path, model: Path, kills: list[str], seed: int = SEED, say: Any = lambda line: None) -> Report:
    """Kill as told under load, then compare with an undisturbed run; AssertionError where they differ."""
    report = Report()
    stop_file = folder / "stop"
    under_fire = Torture(folder / "killed", model, seed)
    with under_fire.server as server:
        modules = list(zip(("tinsmith", "tinker"), (11, 12), under_fire.keys(), strict=True))
        tenants = [Tenant(module, seed, server.url, key, stop_file) for module, seed, key in modules]
        with closing_all(tenants):
            for tenant in tenants:
                tenant.wait_until_ready()
            began = time.monotonic()
            for number, what in enumerate(kills):
                under_fire.kill(what, tenants)
                report.kills[what] += 1
                if (number + 1) % 10 == 0:
                    say(f"{number + 1} kills after {time.monotonic() - began:.0f} s")
            stop_file.touch()
            killed = [tenant.result() for tenant in tenants]
            report.seconds = time.monotonic() - began
        under_fire.check_results()
        ends = [under_fire.digest(result.pop("end")) for result in killed]
        log = server.log
        report.marked = len(under_fire.rows("SELECT model_id FROM models WHERE fault IS NOT NULL"))
    report.snapshots = len(re.findall(r"snapshot of \S+ at request", log))
    lengths = [int(length) for length in re.findall(r"restoring \S+: (\d+) operations to replay", log)]
    report.replays, report.replayed = len(lengths), sum(lengths)
    stop_file.unlink()
    say("the undisturbed run")
    quiet = Torture(folder / "quiet", model)
    with quiet.server as server:
        counts = [result["count"] for result in killed]
        tenants = [
            Tenant(module, seed, server.url, key, stop_file, count)
            for (module, seed, _), key, count in zip(modules, quiet.keys(), counts, strict=True)
        ]
        with closing_all(tenants):
            undisturbed = [tenant.result() for tenant in tenants]
        expected = [quiet.digest(result.pop("end")) for result in undisturbed]
    for (module, _, _), got, wanted, end, expected_end in zip(
        modules, killed, undisturbed, ends, expected, strict=True
    ):
        steps = [line["step"]["step"] for line in got["rounds"]]
        assert steps == [float(number) for number in range(1, got["count"] + 1)], "a step is missing or doubled"
        equal = sum(one == other for one, other in zip(got["rounds"], wanted["rounds"], strict=True))
        report.tenants.append(
            {
                "module": module,
                "count": got["count"],
                "equal": f"{equal} of {got['count']}",
                "digest": f"{end[:16]} {'=' if end == expected_end else '!='} {expected_end[:16]}",
                "is_same": equal == got["count"] and end == expected_end and got["resumed"] == wanted["resumed"],
            }
        )
    return report


def drawn_kills(count: int, seed: int = SEED) -> list[str]:
    """A mixture in which each kind follows each."""
    drawn = random.Random(seed)
    return [drawn.choice(("engine", "api", "both")) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    from tinsmith.engine.models.tiny import make_tiny

    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        model = make_tiny(Path(folder) / "model")
        kills = drawn_kills(arguments.kills, arguments.seed)
        report = torture(Path(folder), model, kills, arguments.seed, say=lambda line: print(line, flush=True))
    print(report.table())
    if not all(tenant["is_same"] for tenant in report.tenants) or report.marked:
        sys.exit("the results differ from those of the undisturbed run")


if __name__ == "__main__":
    main()

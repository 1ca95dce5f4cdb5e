"""The torture: two tenants train and sample on a real engine while its processes are killed again and again.

    PYTHONPATH=src:tests python -m support.torture --kills 100

kills the engine, the API process or both without mercy, then compares everything the tenants got, and the digests of
their weights and optimizers, with a run that nobody disturbed. One tenant uses the official client, one ours.

Kills come in bursts: the first when some results have come, so that work gets done; some when an engine has just become
ready and runs are being restored; the others a moment after the last one, while processes start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from support.fork_server import ForkServer
from support.releases import NEWEST, OFFICIAL
from support.server_process import ROOT, ServerProcess, environment

PROGRAM = ROOT / "tests" / "support" / "torture_program.py"
SEED = 20_26
FOREVER = 10**9
MOST_RESULTS = 40
LONGEST_BURST = 18
READY_SHARE = 0.3
"""How many bursts have a second kill right after the next engine is ready."""
LONGEST_PAUSE_S = 1.6
PATIENCE_S = 300.0
"""Without any progress for this long, something hangs."""
SETTINGS = {"dtype": "float32", "threads": 1, "max_replay_s": 0.05, "max_snapshot_share": 1.0}


@dataclass(frozen=True)
class Kill:
    """What is killed, and when: behind so many results, so long after an engine is ready, or after the last kill."""

    what: Literal["engine", "api", "both"]
    behind: Literal["results", "ready", "last"]
    amount: float


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
    engines_starting: int = 0
    """Engines that were killed before they were ready."""
    servers_starting: int = 0
    """API processes that were killed before they listened."""
    snapshots: int = 0
    replays: int = 0
    replayed: int = 0
    marked: int = 0

    def table(self) -> str:
        lines = [("kills of " + kind, str(number)) for kind, number in sorted(self.kills.items())]
        lines += [
            ("kills in all", str(sum(self.kills.values()))),
            ("engines killed while they started", str(self.engines_starting)),
            ("API processes killed while they started", str(self.servers_starting)),
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

    def __init__(self, folder: Path, model: Path, forks: ForkServer) -> None:
        settings = {**SETTINGS, "models_dir": model.parent / "models"}
        self.server = ServerProcess(folder, "--model", f"tiny={model}", backend="local", forks=forks, **settings)
        self.killed_engines: list[int] = []
        self.servers_starting = 0
        self._log_seen = 0

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
                if is_child and b"tinsmith.engine.worker.main" in place.joinpath("cmdline").read_bytes():
                    return int(place.name)
        return None

    def kill(self, kill: Kill, tenants: list[Tenant]) -> None:
        """One kill at its moment, and a server that starts afterwards; nobody waits for it."""
        for tenant in tenants:
            tenant.check()
        if kill.behind == "results":
            self._let_results_come(int(kill.amount), tenants)
        else:
            if kill.behind == "ready":
                self._await(lambda: self.is_engine_ready(), tenants)
            time.sleep(kill.amount)
        if kill.what in ("engine", "both"):
            self._kill_engine(tenants)
        if kill.what in ("api", "both"):
            self.servers_starting += not self.is_listening()
            self.server.kill()
            self.server.begin()
        self._log_seen = self.server.log_size

    def _await(self, condition: Callable[[], object], tenants: list[Tenant]) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < PATIENCE_S, f"nothing moves:\n{self.server.log[-4000:]}"
            for tenant in tenants:
                tenant.check()
            time.sleep(0.05)

    def _let_results_come(self, count: int, tenants: list[Tenant]) -> None:
        """The moment is counted in results, so that work gets done however long a start takes."""
        before = self._results()
        self._await(lambda: self._results() >= before + count, tenants)

    def _results(self) -> int:
        """How many results were ever written; the row number tells without counting."""
        [(count,)] = self.rows("SELECT COALESCE(MAX(rowid), 0) FROM results")
        return int(count)

    def is_engine_ready(self) -> bool:
        """Whether an engine has become ready since the last kill."""
        return b"is ready, process" in self.server.log_after(self._log_seen)

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.server.url.rpartition(":")[2]))) == 0

    def _kill_engine(self, tenants: list[Tenant]) -> None:
        found: list[int] = []

        def find() -> bool:
            found[:] = [pid] if (pid := self.engine()) is not None else []
            return bool(found)

        self._await(find, tenants)
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0], signal.SIGKILL)
            self.killed_engines.append(found[0])

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


def torture(folder: Path, model: Path, kills: list[Kill], say: Any = lambda line: None) -> Report:
    """Kill as told under load, then compare with an undisturbed run; AssertionError where they differ."""
    with ForkServer() as forks:
        return _torture(folder, model, kills, forks, say)


def _torture(folder: Path, model: Path, kills: list[Kill], forks: ForkServer, say: Any) -> Report:
    report = Report()
    stop_file = folder / "stop"
    under_fire = Torture(folder / "killed", model, forks)
    with under_fire.server as server:
        modules = list(zip(("tinsmith", "tinker"), (11, 12), under_fire.keys(), strict=True))
        tenants = [Tenant(module, seed, server.url, key, stop_file) for module, seed, key in modules]
        with closing_all(tenants):
            for tenant in tenants:
                tenant.wait_until_ready()
            began = time.monotonic()
            for number, kill in enumerate(kills):
                under_fire.kill(kill, tenants)
                report.kills[kill.what] += 1
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
    ready = set(map(int, re.findall(r"is ready, process (\d+)", log)))
    report.engines_starting = sum(pid not in ready for pid in under_fire.killed_engines)
    report.servers_starting = under_fire.servers_starting
    stop_file.unlink()
    say("the undisturbed run")
    quiet = Torture(folder / "quiet", model, forks)
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
        steps = [line["step"]["optim/step"] for line in got["rounds"]]
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


def drawn_kills(count: int, seed: int = SEED) -> list[Kill]:
    """Bursts in which each kind follows each."""
    drawn = random.Random(seed)
    kills: list[Kill] = []

    def add(behind: Literal["results", "ready", "last"], amount: float) -> None:
        kills.append(Kill(drawn.choice(("engine", "api", "both")), behind, amount))

    while len(kills) < count:
        add("results", drawn.randint(1, MOST_RESULTS))
        if drawn.random() < READY_SHARE:
            add("ready", drawn.uniform(0, 0.5))
        for _ in range(drawn.randint(0, LONGEST_BURST)):
            add("last", drawn.uniform(0, LONGEST_PAUSE_S))
    return kills[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    from tinsmith.engine.models.tiny import make_tiny

    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        model = make_tiny(Path(folder) / "model")
        kills = drawn_kills(arguments.kills, arguments.seed)
        report = torture(Path(folder), model, kills, say=lambda line: print(line, flush=True))
    print(report.table())
    if not all(tenant["is_same"] for tenant in report.tenants) or report.marked:
        sys.exit("the results differ from those of the undisturbed run")


if __name__ == "__main__":
    main()

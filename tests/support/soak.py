"""The soak: tenants with all kinds of habits on a real server and engine, and nothing that may not grow grows.

    PYTHONPATH=src:tests python -m support.soak --minutes 30

Every half minute the memory and descriptors of both processes, the rows, the files and their bytes are noted. The table
of that is printed, and a line through the second half of each column must not rise by more than its tolerance. At the
end everybody leaves, and what belongs to sessions that are over must go.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.server_process import ServerProcess
from support.soak_actors import ACTORS, Actor, Door, RefusedError

MB = 2**20
INTERVAL_S = 30.0
DRAIN_S = 60.0
TENANTS = ("ann", "bob", "eve")
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "session_timeout_s": 6,
    "result_grace_s": 2,
    "sweep_s": 1,
    "body_timeout_s": 5,
    "poll_s": 1,
    "max_telemetry_rows": 200,
    "curve_grace_s": 1,
    "adapter_bytes": 16 * MB,
    "sampler_adapter_bytes": 16 * MB,
    "cache_bytes": 16 * MB,
}
"""Short, so that things end within the soak; and small, so that caches are full before its second half."""
PASSING = ("jobs", "results", "custom_losses", "telemetry", "checkpoints")
"""Tables whose rows go with their session, their ttl or by a limit."""
HISTORY = ("sessions", "models", "samplers", "steps", "usage", "audit")
"""Tables that remember what was done, and grow with use; shown, and not judged."""


@dataclass(frozen=True)
class Tolerance:
    """How much a figure may rise over the second half: a share of its mean, or so much, whichever is more. Rows and
    files of those who are there come and go by hundreds; that nothing stays is seen at the end."""

    share: float
    amount: float


TOLERANCES: Mapping[str, Tolerance] = {
    "server MB": Tolerance(0.10, 24),
    "engine MB": Tolerance(0.10, 48),
    "server fds": Tolerance(0.25, 12),
    "engine fds": Tolerance(0.25, 6),
    "rows": Tolerance(0.25, 600),
    "files": Tolerance(0.25, 150),
    "files MB": Tolerance(0.25, 16),
}


@dataclass(frozen=True)
class Note:
    """The figures of one moment."""

    at: float
    figures: Mapping[str, float]


@dataclass
class Report:
    """What a soak came to."""

    notes: list[Note] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)
    restarts: int = 0

    def growth(self, name: str) -> tuple[float, float]:
        """How much a figure rose over the second half by a line through it, and how much it may."""
        half = self.notes[len(self.notes) // 2 :]
        values = [note.figures[name] for note in half]
        times = [note.at for note in half]
        tolerance = TOLERANCES[name]
        allowed = max(tolerance.share * sum(values) / len(values), tolerance.amount)
        return slope(times, values) * (times[-1] - times[0]), allowed

    def grown(self) -> list[str]:
        """The figures that rise."""
        return [name for name in TOLERANCES if self.growth(name)[0] > self.growth(name)[1]]

    def table(self) -> str:
        names = [*TOLERANCES, "database MB", "history rows"]
        lines = ["  minute" + "".join(f"{name:>14}" for name in names)]
        for note in self.notes:
            lines.append(f"{note.at / 60:8.1f}" + "".join(f"{note.figures[name]:14.1f}" for name in names))
        lines.append("second half, rise (allowed):")
        for name in TOLERANCES:
            rise, allowed = self.growth(name)
            lines.append(f"  {name:<12} {rise:10.1f} ({allowed:.1f}){'  GROWS' if rise > allowed else ''}")
        lines.append(f"done: {dict(self.done)}")
        lines.append(f"cut short by a refusal or a connection: {dict(self.failed)}")
        lines.append(f"statuses: {dict(sorted(self.statuses.items()))}; engine restarts: {self.restarts}")
        lines.append(f"left when all were gone: {self.left}")
        return "\n".join(lines)


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Of the line with the least squares."""
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / (spread or 1.0)


class Watched:
    """A server with a tiny model, and what can be seen of it from outside."""

    def __init__(self, folder: Path, model: Path) -> None:
        settings = {**SETTINGS, "models_dir": model.parent / "models"}
        self.server = ServerProcess(folder / "data", "--model", f"tiny={model}", backend="local", **settings)

    def key(self, org: str) -> str:
        done = self.server.run("key", "create", org, "--org", org, "--format", "json")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["key"])

    def rows(self, tables: Sequence[str]) -> dict[str, int]:
        with contextlib.closing(sqlite3.connect(self.server.data_dir / "tinsmith.sqlite", timeout=30)) as file:
            return {table: file.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in tables}

    def engine(self) -> int | None:
        parent = str(self.server.process_id)
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_child = place.joinpath("stat").read_text().rpartition(")")[2].split()[1] == parent
                if is_child and b"tinsmith.engine.worker.main" in place.joinpath("cmdline").read_bytes():
                    return int(place.name)
        return None

    def figures(self) -> dict[str, float]:
        data = self.server.data_dir
        files = [path for path in files_below(data) if not path.name.startswith("tinsmith.sqlite")]
        engine = self.engine()
        return {
            "server MB": rss_mb(self.server.process_id),
            "engine MB": rss_mb(engine),
            "server fds": descriptors(self.server.process_id),
            "engine fds": descriptors(engine),
            "rows": sum(self.rows(PASSING).values()),
            "files": len(files),
            "files MB": sum(map(size_of, files)) / MB,
            "database MB": sum(map(size_of, data.glob("tinsmith.sqlite*"))) / MB,
            "history rows": sum(self.rows(HISTORY).values()),
        }

    def left(self) -> dict[str, int]:
        """What sessions that are over have left: nothing, but for uploads, which have an hour."""
        places = ("samplers", "snapshots", "loads", "checkpoints")
        found = self.rows(("jobs", "results", "custom_losses", "checkpoints"))
        for place in places:
            found[f"files of {place}"] = len(files_below(self.server.data_dir / place))
        return {name: count for name, count in found.items() if count}


def files_below(folder: Path) -> list[Path]:
    """All files; directories that go meanwhile are passed over."""
    return [Path(place, name) for place, _, names in os.walk(folder) for name in names]


def size_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def rss_mb(process: int | None) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MB
    return 0.0


def descriptors(process: int | None) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{process}/fd"))
    return 0


def act(actor: Actor, door: Door, stop: threading.Event, report: Report, lock: threading.Lock) -> None:
    """Do one thing over and over until the end."""
    while not stop.is_set():
        try:
            actor(door)
        except (RefusedError, OSError, http.client.HTTPException, StopIteration):
            outcome = report.failed
        else:
            outcome = report.done
        with lock:
            outcome[actor.__name__] += 1
            report.statuses.update(door.statuses)
            door.statuses.clear()
        stop.wait(door.random.uniform(0.05, 0.5))


def soak(
    folder: Path, model: Path, seconds: float, interval_s: float, say: Callable[[str], None] = lambda line: None
) -> Report:
    """Let everybody loose for a while; what was seen."""
    report, stop, lock = Report(), threading.Event(), threading.Lock()
    watched = Watched(folder, model)
    with watched.server as server:
        keys = {org: watched.key(org) for org in TENANTS}
        first = Door(server.url, keys[TENANTS[0]], random.Random(0), server.data_dir)
        first.model(first.session())  # an engine that runs
        threads = []
        for number, actor in enumerate(ACTORS):
            key = keys[TENANTS[number % len(TENANTS)]]
            door = Door(server.url, key, random.Random(number), server.data_dir)
            arguments = (actor, door, stop, report, lock)
            threads.append(threading.Thread(target=act, args=arguments, name=actor.__name__, daemon=True))
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while (at := time.monotonic() - began) < seconds:
            report.notes.append(Note(at, watched.figures()))
            say(
                f"{at / 60:.1f} min: "
                + ", ".join(f"{name} {value:.0f}" for name, value in report.notes[-1].figures.items())
            )
            stop.wait(min(interval_s, max(0.0, seconds - at)))
        report.notes.append(Note(time.monotonic() - began, watched.figures()))
        stop.set()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), f"{thread.name} hangs"
        end = time.monotonic() + DRAIN_S
        while (left := watched.left()) and time.monotonic() < end:
            time.sleep(0.5)
        report.left = left
        report.restarts = server.log.count("is ready, process") - 1
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "30")))
    arguments = parser.parse_args()
    from tinsmith.engine.models.tiny import make_tiny

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        model = make_tiny(Path(folder) / "model")
        seconds = arguments.minutes * 60
        report = soak(Path(folder), model, seconds, min(INTERVAL_S, seconds / 10), lambda line: print(line, flush=True))
    print(report.table())
    faults = {status: count for status, count in report.statuses.items() if status >= 500 and status != 503}
    problems = [*report.grown(), *(f"{count} times {status}" for status, count in faults.items()), *report.left]
    if problems or report.restarts:
        sys.exit(f"not flat: {', '.join(problems)}; engine restarts: {report.restarts}")


if __name__ == "__main__":
    main()

"""The output directory of `tinsmith train`: the state to resume from, metrics, and a lock.

Files are written under another name and then renamed, so that a crash or a full disk leaves the old file in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinsmith.errors import TinkerError

STATE, METRICS, REFERENCE = "state.json", "metrics.jsonl", "reference.json"
VERSION = 1


class OutputError(TinkerError):
    """The output directory cannot be used; the message says why. Fix that, or choose another with --out."""

    code = "output_error"


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The options that determine a run's numbers. A run can only be resumed with the same ones."""

    model: str
    method: Literal["sft", "dpo"]
    rank: int
    learning_rate: float
    epochs: int
    batch_size: int
    eval_split: float
    seed: int
    beta: float
    truncate: bool


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """A run at its latest checkpoint."""

    version: int
    run: str
    """The training run's id on the server."""
    checkpoint: str
    step: int
    total: int
    plan: RunPlan
    data: str
    data_sha256: str
    sampler: str | None = None
    """The sampler checkpoint of the final weights, once the run is done."""


def read_state(out: Path) -> RunState | None:
    """Read the state from a directory; None if it has none."""
    path = out / STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=RunState)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OutputError(f"{path} is not a state file of tinsmith train ({error}); choose another --out") from None
    if state.version != VERSION:
        raise OutputError(
            f"{path} has version {state.version}; this tinsmith reads version {VERSION}; choose another --out"
        )
    return state


def write_state(out: Path, state: RunState) -> None:
    write_file(out / STATE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def read_reference(out: Path) -> dict[int, tuple[float, float]] | None:
    """Read the reference logprobs of a DPO run, by line of the data; None if there are none."""
    try:
        return msgspec.json.decode((out / REFERENCE).read_bytes(), type=dict[int, tuple[float, float]])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OutputError(f"cannot read {out / REFERENCE}: {error}") from error


def write_reference(out: Path, reference: Mapping[int, tuple[float, float]]) -> None:
    write_file(out / REFERENCE, msgspec.json.encode({str(line): values for line, values in reference.items()}))


def write_file(path: Path, content: bytes) -> None:
    """Replace a file atomically; its content is on the disk when this returns."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _sync_directory(path: Path) -> None:
    """Make the names in a directory durable; Windows cannot open one, and does so by itself."""
    if sys.platform != "win32":
        directory = os.open(path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class MetricsFile:
    """The metrics file: one line of JSON per step."""

    def __init__(self, out: Path) -> None:
        self._path = out / METRICS

    def keep(self, step: int) -> None:
        """Drop the rows after a step, which a resumed run computes again."""
        kept = [row for row in self.rows() if row.get("step", 0) <= step]
        write_file(self._path, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def add(self, row: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self._path}: {error.strerror}") from error

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, skipping a last line that a crash cut off."""
        try:
            lines = self._path.read_text().splitlines()
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return rows


@contextlib.contextmanager
def opened(out: Path) -> Iterator[None]:
    """Create the directory and lock it against other processes."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("w")
    except OSError as error:
        raise OutputError(f"cannot use {out} as the output directory: {error.strerror}") from error
    with file:
        try:
            _lock(file.fileno())
        except OSError:
            raise OutputError(f"another tinsmith train is using {out}; wait for it, or choose another --out") from None
        yield


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed; raise OSError if another process has locked it."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

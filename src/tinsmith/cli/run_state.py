"""What `tinsmith train` keeps in its output directory, so that it can go on: state, metrics, a lock.

Files are replaced whole: after a crash or on a full disk the old one is still there.
Does not know: training, servers.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from tinsmith.errors import TinkerError

STATE, METRICS, REFERENCE = "state.json", "metrics.jsonl", "reference.json"
VERSION = 1


class OutputError(TinkerError):
    """The output directory cannot be used; the text says why. Free some room or choose another with --out."""

    code = "output_error"


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What decides a run's numbers. A run can only go on with the same."""

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
    """A run as it was when its latest checkpoint was saved."""

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
    """The finished weights, once the run is done."""


def read_state(out: Path) -> RunState | None:
    """The state in a directory, if there is one."""
    path = out / STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=RunState)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OutputError(f"{path} is not a state of tinsmith train ({error}); choose another --out") from None
    if state.version != VERSION:
        raise OutputError(f"{path} is of version {state.version}, and this is version {VERSION}; choose another --out")
    return state


def write_state(out: Path, state: RunState) -> None:
    write_file(out / STATE, msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")


def read_reference(out: Path) -> dict[int, tuple[float, float]] | None:
    """The reference logprobs of a DPO run, by line of the data."""
    try:
        return msgspec.json.decode((out / REFERENCE).read_bytes(), type=dict[int, tuple[float, float]])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise OutputError(f"{out / REFERENCE} cannot be read: {error}") from error


def write_reference(out: Path, reference: Mapping[int, tuple[float, float]]) -> None:
    write_file(out / REFERENCE, msgspec.json.encode({str(line): values for line, values in reference.items()}))


def write_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole, on the disk when this returns."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OutputError(f"{path} cannot be written: {error.strerror}") from error


class MetricsFile:
    """One line of JSON per step."""

    def __init__(self, out: Path) -> None:
        self._path = out / METRICS

    def keep(self, step: int) -> None:
        """Forget what came after a step: it is done again."""
        kept = [row for row in self.rows() if row.get("step", 0) <= step]
        write_file(self._path, b"".join(json.dumps(row).encode() + b"\n" for row in kept))

    def add(self, row: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OutputError(f"{self._path} cannot be written: {error.strerror}") from error

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a last line that was cut off by a crash is left out."""
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
    """Make the directory, and keep others from it meanwhile."""
    import fcntl

    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / ".lock").open("w")
    except OSError as error:
        raise OutputError(f"{out} cannot be used: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{out} is used by another tinsmith train right now; choose another --out") from None
        yield

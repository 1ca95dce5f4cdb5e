"""Tries the engine on a device, in processes of its own: what the device does not survive ends the trial only."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MODULE = "tinsmith.engine.backend.device_trial"
FORMATS = ("float32", "bfloat16")
PARTS = ("first", "resumed")
ENDINGS = ("device", "error", "process")
"""Checks after which the rest would fail, too."""


class TrialResult(NamedTuple):
    """What one part of the trial found; `outcome` is ok, wrong, or number (nothing to judge)."""

    check: str
    outcome: str
    detail: str


def tried(device: str, model: str, cache_dir: Path, **sizes: int) -> Iterator[TrialResult]:
    """Yield what is found as it is found, for each number format."""
    for dtype in FORMATS:
        with tempfile.TemporaryDirectory() as place:
            plan = {
                "source": model,
                "cache_dir": str(cache_dir),
                "place": place,
                "device": device,
                "dtype": dtype,
                **sizes,
            }
            for part in PARTS:
                for found in _run(part, plan):
                    yield found._replace(check=f"{dtype}: {found.check}")
                    if found.outcome == "wrong" and found.check in ENDINGS:
                        return


def _run(part: str, plan: dict[str, Any]) -> Iterator[TrialResult]:
    command = [sys.executable, "-m", MODULE, part, json.dumps(plan)]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield TrialResult(**json.loads(line))
            code = process.wait()
        finally:
            process.kill()
        if code:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["it wrote no reason"]
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            yield TrialResult("process", "wrong", f"ended with {ending}: {lines[-1]:.300}")

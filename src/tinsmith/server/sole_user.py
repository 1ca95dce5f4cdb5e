"""One server per data directory: two would both go on with what was accepted, each with an engine of its own.

The lock is the kernel's and goes with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tinsmith.errors import TinkerError

PATIENCE_S = 3.0
"""What a process that was just killed may take to go."""
PAUSE_S = 0.05


@contextmanager
def sole_user(
    data_dir: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Hold a data directory until the end of the block; TinkerError names the process that has it."""
    with (data_dir / "server.lock").open("a+") as file:
        end = clock() + PATIENCE_S
        while not _is_locked(file.fileno()):
            if clock() >= end:
                file.seek(0)
                raise TinkerError(
                    f"{data_dir} is in use by another server, process {file.read().strip() or 'unknown'}; "
                    "stop that one, or choose another --data-dir"
                )
            sleep(PAUSE_S)
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

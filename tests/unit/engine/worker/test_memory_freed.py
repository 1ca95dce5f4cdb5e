"""Freed memory: kept while there is work, returned afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith.engine import ipc
from tinsmith.engine.worker import main, memory

PAGES = """
import resource, sys
from tinsmith.engine.worker import memory
can_keep = memory.keep() if sys.argv[1] == "keep" else True
import numpy as np
def use():
    parts = [np.ones(6 << 20, np.uint8) for _ in range(20)]
    return len(parts)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
held = int(open("/proc/self/statm").read().split()[1])
memory.give_back()
left = int(open("/proc/self/statm").read().split()[1])
print(int(can_keep), after - before, held - left)
"""


def pages(how: str) -> tuple[int, int, int]:
    """Whether it can be set; pages that were fetched for the same work again; pages that were given back."""
    printed = subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, check=True).stdout
    can_keep, fetched, returned = map(int, printed.split())
    return can_keep, fetched, returned


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_next_pass_finds_the_memory_of_the_last() -> None:
    can_keep, fetched, returned = pages("keep")
    if not can_keep:
        pytest.skip("not the GNU library")
    whole = 20 * 6 * 256
    assert fetched < whole / 10, "of five passes"
    assert returned > whole / 2
    assert pages("leave")[1] > whole, "the default, without which there would be no need"


def test_an_engine_at_rest_gives_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(main, "REST_S", 0.01)
    monkeypatch.setattr(memory, "give_back", lambda: given.append(1))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = main.Pipe(ours)
        timer = threading.Timer(0.2, pipe.inbox.put, [ipc.Stop()])
        timer.start()
        main.Worker(cast(Any, SimpleNamespace()), pipe)._read()
        timer.join()
    assert given == [1]

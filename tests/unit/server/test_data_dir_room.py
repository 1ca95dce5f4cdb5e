"""Free disk space is checked often enough, but not for every request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.server.data_dir import ROOM_S, Files
from tinsmith.server.refusals import NotReadyError


class Disk(Files):
    """A directory on a disk whose free room the test sets."""

    free = 1000
    asked = 0

    def free_bytes(self) -> int:
        self.asked += 1
        return self.free


def test_room_is_asked_for_again_after_a_while_and_always_while_there_is_none(tmp_path: Path) -> None:
    now = [0.0]
    disk = Disk(tmp_path, 100, clock=lambda: now[0])
    for _ in range(5):
        disk.check_room()
    assert disk.asked == 1
    disk.free = 99
    now[0] += ROOM_S
    for _ in range(2):
        with pytest.raises(NotReadyError, match="no new work is accepted"):
            disk.check_room()
    assert disk.asked == 3
    disk.free = 100
    disk.check_room()

"""An engine process that dies while it is written to."""

from __future__ import annotations

import asyncio
import select
import sys

import pytest

from tinsmith.engine import ipc
from tinsmith.engine.backend.engine_process import Child
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.protocol import ModelCard

LAST_WORDS = """
import os, socket, sys
from tinsmith.engine import ipc
pipe = socket.socket(fileno=int(sys.argv[1]))
pipe.sendall(b"".join(ipc.encode(ipc.Began(["deadly"]))))
os.kill(os.getpid(), 9)
"""


class Dying(Child):
    """Says which job has begun, and dies of it."""

    def _command(self, descriptor: int) -> list[str]:
        return [sys.executable, "-c", LAST_WORDS, str(descriptor)]


def test_the_schedulers_quantum_reaches_the_process() -> None:
    async def scenario() -> list[str]:
        card = ModelCard(name="some/model", max_context_length=8, vocab_size=8)
        return Child(EngineSpec(card=card, executor="none:none", quantum_s=0.25), lambda _: None)._command(7)

    command = asyncio.run(scenario())
    assert command[command.index("--quantum-s") + 1] == "0.25"


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX processes")
@pytest.mark.parametrize("writes", [0, 3])
def test_its_last_words_are_heard_although_a_write_fails(writes: int) -> None:
    heard: list[object] = []

    async def scenario() -> str:
        card = ModelCard(name="some/model", max_context_length=8, vocab_size=8)
        child = Dying(EngineSpec(card=card, executor="none:none"), heard.append)
        await child.start()
        end = select.poll()
        end.register(child._transport.get_extra_info("socket").fileno(), 0)
        assert end.poll(30_000), "it is dead; the loop was blocked, so nothing has been read"
        for _ in range(writes):
            child.send(ipc.Stop())
        return (await asyncio.wait_for(child.ended, 30)).reason

    assert "SIGKILL" in asyncio.run(scenario())
    assert heard == [ipc.Began(["deadly"])]

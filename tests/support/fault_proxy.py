"""A raw TCP proxy that does to a connection what networks do: cut, stall, trickle, repeat, overtake, reset, refuse.

Faults are used up one per connection, in order, then connections pass unharmed; or, with a seed and a rate, each
connection draws its own. Knows nothing of HTTP.

    with FaultProxy(server.url, [DropAfter(100), Reset()]) as proxy:
        client = Client(base_url=proxy.url)
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from support.loop_thread import LoopThread, stop_accepting

Direction: TypeAlias = Literal["to_client", "to_server"]

READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class DropAfter:
    """Close both sides once so many bytes have gone in one direction; those bytes do arrive."""

    size_bytes: int
    direction: Direction = "to_client"


@dataclass(frozen=True, slots=True)
class Stall:
    """Hold everything back for a while, once, before the first byte of one direction."""

    delay_s: float
    direction: Direction = "to_client"


@dataclass(frozen=True, slots=True)
class Trickle:
    """A few bytes at a time."""

    size_bytes: int
    delay_s: float
    direction: Direction = "to_client"


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Send the first thing the server says twice: an answer that nobody asked for."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Hold each answer back until another connection's has gone by, for so long at most."""

    within_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Reset:
    """RST, after so many bytes of the answer."""

    after_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Refuse:
    """RST at once, before anything is read."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Nothing; for lists such as `[Clean(), Reset()]`."""


Fault: TypeAlias = DropAfter | Stall | Trickle | Duplicate | Overtaken | Reset | Refuse | Clean


def random_fault(source: random.Random) -> Fault:
    """One of the faults, with a size or delay that is small enough for a test."""
    size = source.randrange(400)
    direction: Direction = source.choice(("to_client", "to_server"))
    return source.choice(
        (
            DropAfter(size, direction),
            Stall(source.uniform(0, 0.05), direction),
            Trickle(source.randrange(1, 64), 0.0, direction),
            Reset(size),
            Refuse(),
        )
    )


@dataclass
class _Link:
    """One proxied connection."""

    fault: Fault
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    sent: dict[Direction, int] = field(default_factory=lambda: {"to_client": 0, "to_server": 0})

    def close(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.close()

    def reset(self) -> None:
        """Close so that the client sees RST: no lingering, what is unsent is lost."""
        raw = self.client.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.transport.abort()
        if self.server is not None:
            self.server.close()


class FaultProxy:
    """`url` leads to the target, through the faults."""

    def __init__(
        self, target_url: str, faults: Iterable[Fault] = (), *, seed: int | None = None, rate: float = 0.0
    ) -> None:
        target = urlsplit(target_url)
        self._target = (target.hostname or "127.0.0.1", target.port or 80)
        self._path = target.path
        self._faults: deque[Fault] = deque(faults)
        self._random = random.Random(seed)
        self._rate = rate
        self._links: list[_Link] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        self.history: list[Fault] = []
        """The fault of each connection, in order."""
        self.overtaken = 0
        """Answers that went out after one which the server gave later."""
        self._passing: set[asyncio.Future[None]] = set()
        self._thread = LoopThread("fault-proxy")
        self.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}{self._path}"

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        return len(self.history)

    def add(self, *faults: Fault) -> None:
        self._thread.call(self._faults.extend, faults)

    def listen(self) -> None:
        """Accept connections, on the same port as before."""
        self._thread.run(self._listen())

    def refuse(self) -> None:
        """Close the port: new connections are refused by the system, open ones live on."""
        self._thread.run(self._close_port())

    def drop_all(self) -> None:
        """Reset every open connection."""
        self._thread.call(self._reset_links)

    def close(self) -> None:
        self._thread.run(self._close_port())
        self._thread.run(self._close_links())
        self._thread.close()

    async def _listen(self) -> None:
        listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
        self._port = listener.getsockname()[1]
        self._listener = await asyncio.start_server(self._accept, sock=listener)

    async def _close_port(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await stop_accepting(listener)

    async def _close_links(self) -> None:
        tasks = list(self._tasks)
        for link in self._links:
            link.reset()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset_links(self) -> None:
        for link in self._links:
            link.reset()

    def _next_fault(self) -> Fault:
        if self._faults:
            return self._faults.popleft()
        return random_fault(self._random) if self._random.random() < self._rate else Clean()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = _Link(self._next_fault(), writer)
        self.history.append(link.fault)
        self._links.append(link)
        try:
            await self._serve(link, reader)
        finally:
            link.close()
            self._links.remove(link)
            self._tasks.discard(task)

    async def _serve(self, link: _Link, reader: asyncio.StreamReader) -> None:
        if isinstance(link.fault, Refuse):
            link.reset()
            return
        try:
            answers, link.server = await asyncio.open_connection(*self._target)
        except OSError:
            link.reset()
            return
        ways = (
            asyncio.create_task(self._pump(link, reader, link.server, "to_server")),
            asyncio.create_task(self._pump(link, answers, link.client, "to_client")),
        )
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(
        self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction
    ) -> None:
        """Carry bytes one way until the end, or until the fault ends it."""
        fault = link.fault
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                is_first = link.sent[way] == 0
                limit = _limit(fault, way)
                if limit is not None:
                    data = data[: limit - link.sent[way]]
                link.sent[way] += len(data)
                if way == "to_client":
                    await self._take_turns(fault)
                await _write(writer, data, fault, way, is_first)
                if limit is not None and link.sent[way] >= limit:
                    if isinstance(fault, Reset):
                        link.reset()
                    return
            await writer.drain()

    async def _take_turns(self, fault: Fault) -> None:
        """Wait to be overtaken, or be the one that overtakes those who wait."""
        if isinstance(fault, Overtaken):
            passing = asyncio.get_running_loop().create_future()
            self._passing.add(passing)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.within_s):
                    await passing
                    self.overtaken += 1
            self._passing.discard(passing)
            return
        for passing in self._passing:
            if not passing.done():
                passing.set_result(None)


def _limit(fault: Fault, way: Direction) -> int | None:
    """After how many bytes this direction ends."""
    if isinstance(fault, DropAfter) and fault.direction == way:
        return fault.size_bytes
    return fault.after_bytes if isinstance(fault, Reset) and way == "to_client" else None


async def _write(writer: asyncio.StreamWriter, data: bytes, fault: Fault, way: Direction, is_first: bool) -> None:
    if isinstance(fault, Stall) and fault.direction == way and is_first:
        await asyncio.sleep(fault.delay_s)
    if isinstance(fault, Trickle) and fault.direction == way:
        for start in range(0, len(data), fault.size_bytes):
            writer.write(data[start : start + fault.size_bytes])
            await writer.drain()
            await asyncio.sleep(fault.delay_s)
        return
    writer.write(data * 2 if isinstance(fault, Duplicate) and way == "to_client" and is_first else data)
    await writer.drain()

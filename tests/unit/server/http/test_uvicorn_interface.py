"""uvicorn promises no interface for protocols: everything that `GuardedProtocol` relies on is named and checked here.

If this fails after an upgrade of uvicorn, compare `uvicorn/protocols/http/httptools_impl.py` with
`tinsmith/server/http/uvicorn_protocol.py`, adapt the latter, and raise the bound in pyproject.toml.
"""

from __future__ import annotations

import asyncio
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.in_process import run
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tinsmith.server.http.uvicorn_protocol import EXTENSION, GuardedProtocol

OVERRIDDEN = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_headers_complete": ["self"],
    "on_message_complete": ["self"],
    "send_400_response": ["self", "msg"],
}
"""Methods of uvicorn's protocol that ours overrides, with their parameters."""
OF_CONNECTIONS = ("cycle", "flow", "loop", "scope", "transport")
OF_FLOW = ("pause_reading", "resume_reading")
OF_CYCLES = {
    "disconnected": bool,
    "message_event": asyncio.Event,
    "more_body": bool,
    "response_complete": bool,
    "transport": object,
}
"""Attributes that ours reads or sets."""
VERSION = f"uvicorn {uvicorn.__version__}"


def test_our_overrides_are_the_ones_that_are_checked_here() -> None:
    ours = {
        name
        for name in vars(GuardedProtocol)
        if hasattr(HttpToolsProtocol, name) and callable(getattr(GuardedProtocol, name))
    }
    assert ours == set(OVERRIDDEN)


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_overridden_methods_are_there(name: str) -> None:
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, f"{VERSION}: HttpToolsProtocol has no method {name} any more"
    found = list(inspect.signature(method).parameters)
    assert found == OVERRIDDEN[name], f"{VERSION}: HttpToolsProtocol.{name} takes {found}"


def test_attributes_are_there_while_a_body_arrives() -> None:
    seen: list[GuardedProtocol] = []
    answered = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert EXTENSION in scope.get("extensions", {}), f"{VERSION}: the application gets another scope than ours"
        seen.append(scope["extensions"][EXTENSION])
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        assert body == b"whole"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        answered.set()

    async def scenario() -> None:
        config = uvicorn.Config(app, http=GuardedProtocol, lifespan="off", log_config=None, ws="none")
        config.load()
        state = ServerState()
        listener = await asyncio.get_running_loop().create_server(
            lambda: GuardedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nwho")
        while not seen:
            await asyncio.sleep(0.001)
        [connection] = seen
        for name in OF_CONNECTIONS:
            assert getattr(connection, name, None) is not None, f"{VERSION}: a connection has no {name} any more"
        for name in OF_FLOW:
            assert callable(getattr(connection.flow, name, None)), f"{VERSION}: its flow has no {name} any more"
        cycle = connection.cycle
        for name, kind in OF_CYCLES.items():
            assert isinstance(getattr(cycle, name, None), kind), f"{VERSION}: a request's cycle has no {name} any more"
        assert cycle.more_body
        assert not cycle.response_complete
        writer.write(b"le")
        await asyncio.wait_for(answered.wait(), 20)
        assert not cycle.more_body
        assert cycle.response_complete
        assert b"204 No Content" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        listener.close()
        for each in list(state.connections):
            each.transport.close()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    run(scenario())


def test_only_releases_that_passed_are_allowed() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    (bound,) = [each for each in project["project"]["optional-dependencies"]["server"] if each.startswith("uvicorn")]
    major, minor = map(int, uvicorn.__version__.split(".")[:2])
    assert bound.endswith(f",<{major}.{minor + 1}"), f"{VERSION} is tested, and pyproject.toml says {bound}"

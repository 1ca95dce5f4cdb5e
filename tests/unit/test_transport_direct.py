"""The client's transport over the network: all that the one on aiohttp is tested for, and what is its own."""

from __future__ import annotations

import pytest
import test_transport_http as shared
from test_transport_http import *  # noqa: F403 - the same tests, run with the other transport

from tinsmith.transport.direct import DirectTransport


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(shared, "HttpTransport", DirectTransport)
    body = request.node.callspec.params.get("body") if hasattr(request.node, "callspec") else None
    if isinstance(body, shared.Late):
        body.rounds = 0  # the other run has used it

"""A web page in a browser can send requests to its own machine; a server on loopback answers none of them."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import pytest
from support.in_process import run
from support.server_process import ServerProcess

from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError
from tinsmith.server.http.web_pages import LocalOnly, guarded


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("pages") / "data", allowed_hosts="Proxy.example") as running:
        yield running


def ask(server: ServerProcess, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


OPEN = ("/healthz", "/metrics", "/openapi.json", "/readyz")


@pytest.mark.parametrize("path", [*OPEN, "/api/v1/get_server_capabilities", "/api/v1/healthz", "/nothing/here"])
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "evil.example:8000"},
        {"host": "127.0.0.1.evil.example"},
        {"host": "localhost.evil.example:80"},
        {"host": "localhost@evil.example"},
        {"host": "0.0.0.0:8000"},
        {"host": "[::2]:8000"},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "https://localhost.evil.example"},
    ],
    ids=str,
)
def test_a_page_of_another_host_gets_nothing(server: ServerProcess, path: str, headers: dict[str, str]) -> None:
    status, _, body = ask(server, path, x_api_key=server.key, **headers)
    assert status == 421
    assert b"allowed_hosts" in body
    assert len(body) < 400, "and nothing of what was asked for"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:1234"},
        {"host": "127.0.0.1"},
        {"host": "127.5.6.7:80"},
        {"host": "[::1]:80"},
        {"host": "LOCALHOST."},
        {"host": "console.localhost"},
        {"host": "proxy.example"},
        {},
        {"host": "localhost", "origin": "http://127.0.0.1:8000"},
        {"host": "proxy.example", "origin": "https://proxy.example"},
    ],
    ids=str,
)
def test_programs_and_the_pages_of_this_machine_are_answered(server: ServerProcess, headers: dict[str, str]) -> None:
    assert ask(server, "/api/v1/get_server_capabilities", x_api_key=server.key, **headers)[0] == 200


def test_no_answer_lets_another_origin_read_it_or_leaves_a_cookie(server: ServerProcess) -> None:
    for path in (*OPEN, "/api/v1/get_server_capabilities", "/tinsmith/v1/status"):
        for method in ("GET", "OPTIONS"):
            asked = {"access_control_request_method": "POST", "access_control_request_headers": "x-api-key"}
            _, headers, _ = ask(server, path, method, host="localhost", origin="http://localhost", **asked)
            assert not [name for name in headers if name.startswith("access-control") or name == "set-cookie"], path


def test_a_server_for_others_is_asked_by_any_name() -> None:
    async def app(*_: Any) -> None:
        pass

    assert guarded(app, ServerConfig(host="0.0.0.0")) is app
    assert isinstance(guarded(app, ServerConfig(host="::1")), LocalOnly)
    with pytest.raises(TinkerError, match="allowed_hosts"):
        ServerConfig(allowed_hosts="proxy.example")  # type: ignore[arg-type]


def test_what_is_remembered_of_headers_is_bounded() -> None:
    async def scenario() -> None:
        async def app(*_: Any) -> None:
            pass

        guard = LocalOnly(app, ServerConfig())
        for number in range(1000):
            await guard({"type": "http", "headers": [(b"host", b"localhost:%d" % number)]}, app, app)
        assert len(guard._known) <= 100

    run(scenario())

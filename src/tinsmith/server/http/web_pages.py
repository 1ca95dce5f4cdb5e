"""Protection of a loopback server against web pages in a browser on the same machine.

Any page can send requests to 127.0.0.1, and with a host name of its own that points there (DNS rebinding) the browser
even lets it read the answers. Both show in headers that a page cannot set: `Host` is the name that the browser was
given, `Origin` that of the page. Programs send no `Origin`. Keys are not in cookies, so a browser never adds one, and
no answer allows another origin (CORS).
"""

from __future__ import annotations

import ipaddress
import logging
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.config import ServerConfig

logger = logging.getLogger(__name__)

MISDIRECTED = 421


def guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Wrap the application of a loopback server; one that others can reach may have any name."""
    return LocalOnly(app, config) if config.is_loopback else app


class LocalOnly:
    """Refuses requests that name another host, or come from another host's page."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in ("localhost", config.host, *config.allowed_hosts))
        self._known: set[bytes] = {b""}
        """Header values that were checked and are allowed."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name in (b"host", b"origin") and value not in self._known and not self._is_ours(value):
                    await _refuse(name.decode(), value.decode("latin-1"), send)
                    return
        await self._app(scope, receive, send)

    def _is_ours(self, value: bytes) -> bool:
        if not self._is_local(value.decode("latin-1")):
            return False
        if len(self._known) < 100:
            self._known.add(value)
        return True

    def _is_local(self, text: str) -> bool:
        try:
            host = urlsplit(text if "://" in text else f"//{text}").hostname or ""
        except ValueError:
            return False
        if host.rstrip(".").lower() in self._names or host.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False


async def _refuse(header: str, value: str, send: Send) -> None:
    logger.info("refused a request with %s: %s", header, value[:200], extra={"event": "refused"})
    text = (
        f"this server accepts requests from its own machine only, and the request's {header} is {value[:200]!r}; add "
        "the host name of a proxy to the setting allowed_hosts"
    )
    body = msgspec.json.encode({"detail": text, "code": "misdirected"})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": MISDIRECTED, "headers": headers})
    await send({"type": "http.response.body", "body": body})

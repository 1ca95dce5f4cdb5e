"""A server that passes everything on to another, and writes a hostile text into the strings of its JSON answers."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT.*")
_PASSED_ON = ("x-api-key", "content-type", "accept", "authorization")


class HostileMirror:
    """Strings under the names in `spared`, and moments, stay as they are: a client could not read the rest."""

    def __init__(self, url: str, text: str, spared: Collection[str]) -> None:
        mirror = self
        self._url, self._text, self._spared = url, text, frozenset(spared)

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("content-length", 0))
                kept = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
                body = self.rfile.read(length) if length else None
                status, kind, content = mirror.ask(self.command, self.path, body, kept)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        request = urllib.request.Request(self._url + path, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                status, kind, content = answer.status, answer.headers.get("content-type", ""), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                status, kind, content = error.code, error.headers.get("content-type", ""), error.read()
        if "json" in kind:
            content = json.dumps(self._spoiled(json.loads(content), "")).encode()
        return status, kind, content

    def _spoiled(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: self._spoiled(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [self._spoiled(item, name) for item in value]
        if isinstance(value, str) and name not in self._spared and not _MOMENT.fullmatch(value):
            return value + self._text
        return value

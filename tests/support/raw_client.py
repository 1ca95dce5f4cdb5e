"""Single requests to a server, without a client library that would retry, pool or hide anything."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from support.tinker_server import KEY, TinkerServer
from tinsmith.wire.routes.table import PREFIX

TIMEOUT_S = 10.0


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(url: str, name: str, body: Any = None, method: str = "POST", headers: Mapping[str, str] = {}) -> Answered:
    """One request over a connection of its own; a name without a slash in front is a path of the protocol."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        path = name if name.startswith("/") else PREFIX + name
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"x-api-key": KEY, "content-type": "application/json", **headers}
        connection.request(method, urlsplit(url).path + path, content, given)
        response = connection.getresponse()
        return Answered(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


def new_session(server: TinkerServer) -> str:
    return str(send(server.url, "create_session", {"tags": []}).json["session_id"])


def new_model(server: TinkerServer) -> str:
    body = {
        "session_id": new_session(server),
        "model_seq_id": 0,
        "base_model": "stub/model",
        "lora_config": {"rank": 4},
    }
    return str(send(server.url, "create_model", body).json["model_id"])


def new_sampler(server: TinkerServer) -> str:
    body = {"session_id": new_session(server), "sampling_session_seq_id": 0, "base_model": "stub/model"}
    return str(send(server.url, "create_sampling_session", body).json["sampling_session_id"])


def optim_step(server: TinkerServer, model_id: str, seq_id: int, rate: float = 0.1) -> Answered:
    body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": rate}}
    return send(server.url, "optim_step", body)


def retrieve(server: TinkerServer, request_id: str, **headers: str) -> Answered:
    return send(server.url, "retrieve_future", {"request_id": request_id}, headers=headers)

"""An adapter is imported over a bad network: only what was lost is sent again, and everything counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from support.fault_proxy import Clean, DropAfter, FaultProxy, Reset
from support.server_process import ServerProcess

from tinsmith import AdamParams, APIStatusError, Datum, ModelInput, ServiceClient
from tinsmith.client.connection import own_endpoints
from tinsmith.client.connection.connection import Connection
from tinsmith.client.connection.operations import Operations
from tinsmith.client.connection.own_endpoints import Extensions
from tinsmith.client.connection.session import Session
from tinsmith.config import ClientConfig
from tinsmith.errors import APIConnectionError, RequestInfo
from tinsmith.transport.base import HttpRequest, HttpResponse, Transport
from tinsmith.transport.pool import DirectTransport

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

MODEL = "tinsmith/arithmetic"
FACTS = {"name": "back", "base_model": MODEL, "rank": 4, "alpha": 32.0}
DATUM = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("importing") / "data", poll_s=0.5) as process:
        yield process


@pytest.fixture
def files(server: ServerProcess, connect: Callable[..., ServiceClient]) -> dict[str, Path]:
    """A checkpoint of the server's own, as it lies on its disk."""
    training = connect(server.url, api_key=server.key).create_lora_training_client(MODEL, rank=4)
    training.forward_backward([DATUM], "cross_entropy").result(60)
    training.optim_step(AdamParams(learning_rate=1e-3)).result(60)
    training.save_state("mine").result(60)
    (manifest,) = (server.data_dir / "checkpoints").rglob(f"*{training.model_id.split(':')[0]}*/**/manifest.json")
    return {path.name: path for path in manifest.parent.iterdir()}


class Watched:
    """A transport that notes which parts are sent, and loses what it is told to."""

    def __init__(self, **losses: str) -> None:
        self._direct = DirectTransport()
        self._losses = losses
        self.sent: list[tuple[str, int]] = []
        self.imports = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._direct, name)

    async def send(self, request: HttpRequest) -> HttpResponse:
        address = urlsplit(request.url)
        what = address.path.rpartition("/")[2]
        if what == "import_parts":
            query = parse_qs(address.query)
            self.sent.append((query["file"][0], int(query["offset"][0])))
            what = f"part{len(self.sent)}"
        self.imports += what == "import_weights"
        loss = self._losses.pop(what, None)
        if loss == "busy":
            return HttpResponse(status=503, headers={"retry-after-ms": "1"}, body=b"{}", url=request.url)
        if loss != "request":
            answer = await self._direct.send(request)
        if loss is not None:
            raise APIConnectionError(RequestInfo(request.method, request.url), message=f"the {loss} was lost")
        return answer


def imported(url: str, key: str, transport: Transport, files: dict[str, Path]) -> str:
    connection = Connection(ClientConfig(base_url=url, api_key=key), transport=transport)
    holder = Operations(connection, Session(connection))
    try:
        return Extensions(holder).import_weights(FACTS, files)
    finally:
        holder.close()


def checkpoints(client: ServiceClient) -> list[str]:
    listed = client.create_rest_client().list_user_checkpoints().result(60).checkpoints
    return [checkpoint.tinker_path for checkpoint in listed]


def in_order(files: dict[str, Path], part_bytes: int) -> list[tuple[str, int]]:
    return [(name, at) for name, path in files.items() for at in range(0, path.stat().st_size, part_bytes)]


def test_only_the_part_that_was_lost_is_sent_again(
    server: ServerProcess,
    connect: Callable[..., ServiceClient],
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_endpoints, "PART_BYTES", 100)
    client = connect(server.url, api_key=server.key)
    before = checkpoints(client)
    parts = in_order(files, 100)
    assert len(parts) > 6
    transport = Watched(part2="request", part4="answer", part6="busy", import_weights="answer")
    path = imported(server.url, server.key, transport, files)
    # parts 1 to 6 of what was sent are 1, 2, 2, 3, 3 and 4 of what there was
    assert transport.sent == [parts[0], *[parts[1]] * 2, *[parts[2]] * 2, *[parts[3]] * 2, *parts[4:]]
    assert transport.imports == 2
    assert sorted(checkpoints(client)) == sorted([path, *before]), "the import counts once"
    client.create_training_client_from_state(path).forward_backward([DATUM], "cross_entropy").result(60)


def test_connections_that_break_in_the_middle_of_parts(
    server: ServerProcess,
    connect: Callable[..., ServiceClient],
    files: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = max(path.stat().st_size for path in files.values()) // 2
    monkeypatch.setattr(own_endpoints, "PART_BYTES", size)
    cuts = [Clean(), DropAfter(size // 2, "to_server"), Reset(20), DropAfter(30), DropAfter(size + 300, "to_server")]
    transport = Watched()
    with FaultProxy(server.url, cuts) as proxy:
        path = imported(proxy.url, server.key, transport, files)
        assert proxy.history[: len(cuts)] == cuts
    parts = in_order(files, size)
    assert list(dict.fromkeys(transport.sent)) == parts
    assert len(transport.sent) > len(parts)
    client = connect(server.url, api_key=server.key)
    client.create_training_client_from_state(path).forward_backward([DATUM], "cross_entropy").result(60)


def test_a_refusal_is_not_tried_again(
    server: ServerProcess, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_endpoints, "PART_BYTES", 100)
    transport = Watched()
    with pytest.raises(APIStatusError, match="is not one of adapter_config"):
        imported(server.url, server.key, transport, {"surprise": files["manifest.json"]})
    assert transport.sent == [("surprise", 0)]

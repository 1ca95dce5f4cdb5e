"""How the files of an imported checkpoint reach a server: as a form where it announces that, else as MessagePack."""

from __future__ import annotations

import email.parser
import email.policy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tinker_server import Drop, Recorded, Status, TinkerServer

from tinsmith import ServiceClient, TinkerError
from tinsmith.client.connection import own_endpoints
from tinsmith.client.connection.own_endpoints import Extensions

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

ROUTE = "/tinsmith/v1/import_weights"
PARTS = "/tinsmith/v1/import_parts"
PATH = "tinker://run/weights/mine"
FACTS = {
    "name": "mine",
    "base_model": "stub/model",
    "rank": 8,
    "alpha": 32.0,
    "train_attn": True,
    "train_mlp": False,
    "train_unembed": True,
}
DONE = Status(200, body={"path": PATH})


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    contents = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": bytes(range(256)) * 5000}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return {name: tmp_path / name for name in contents}


def client_of(make_server: Any, connect: Any, *announced: str) -> tuple[ServiceClient, TinkerServer]:
    server = make_server(flags={"tinsmith": dict.fromkeys(announced, True)})
    return connect(server), server


def form_of(request: Recorded) -> dict[str, bytes]:
    """The fields of a form, read by the standard library."""
    head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + request.raw_body)
    fields = {}
    for part in message.iter_parts():
        assert part.get_content_disposition() == "form-data"
        name = part.get_param("name", header="content-disposition")
        assert name not in fields
        fields[str(name)] = part.get_payload(decode=True)
        assert part.get_filename() in (None, name)
    return fields


def test_files_go_as_a_form_where_the_server_announces_it(
    make_server: Any, connect: Any, files: dict[str, Path]
) -> None:
    client, server = client_of(make_server, connect, "import_weights", "import_parts", "import_multipart")
    server.script(ROUTE, [DONE])
    assert Extensions(client.holder).import_weights(FACTS, files) == PATH

    (request,) = server.find(ROUTE)
    assert request.headers["content-type"].startswith("multipart/form-data; boundary=")
    assert request.headers["x-idempotency-key"]
    assert request.key == server.key
    texts = {"name": b"mine", "base_model": b"stub/model", "rank": b"8", "alpha": b"32.0"}
    switches = {"train_attn": b"true", "train_mlp": b"false", "train_unembed": b"true"}
    assert form_of(request) == {**texts, **switches, **{name: path.read_bytes() for name, path in files.items()}}
    assert server.find(PARTS) == []


def test_a_form_that_was_lost_is_sent_again_whole(make_server: Any, connect: Any, files: dict[str, Path]) -> None:
    client, server = client_of(make_server, connect, "import_weights", "import_multipart")
    server.script(ROUTE, [Drop(), Status(503, {"retry-after-ms": "1"}), DONE])
    assert Extensions(client.holder).import_weights(FACTS, files) == PATH

    requests = server.find(ROUTE)
    assert len({request.headers["x-idempotency-key"] for request in requests}) == 1
    assert form_of(requests[-1])["adapter_model.safetensors"] == files["adapter_model.safetensors"].read_bytes()


def test_other_servers_get_messagepack(make_server: Any, connect: Any, files: dict[str, Path]) -> None:
    client, server = client_of(make_server, connect, "import_weights")
    server.script(ROUTE, [DONE])
    assert Extensions(client.holder).import_weights(FACTS, files) == PATH

    (request,) = server.find(ROUTE)
    assert request.headers["content-type"] == "application/msgpack"
    contents = {name: path.read_bytes() for name, path in files.items()}
    assert msgspec.msgpack.decode(request.raw_body) == {**FACTS, "files": contents}


def test_large_files_still_go_in_parts(
    make_server: Any, connect: Any, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_endpoints, "PART_BYTES", 1_000_000)
    client, server = client_of(make_server, connect, "import_weights", "import_parts", "import_multipart")
    server.script(PARTS, [Status(200, body={"size_bytes": 0})] * 3)
    server.script(ROUTE, [DONE])
    assert Extensions(client.holder).import_weights(FACTS, files) == PATH

    assert len(server.find(PARTS)) == 3
    assert sorted(msgspec.msgpack.decode(server.find(ROUTE)[0].raw_body)["digests"]) == sorted(files)


def test_a_server_without_imports_is_named(client: ServiceClient, server: TinkerServer, files: dict[str, Path]) -> None:
    with pytest.raises(TinkerError, match=f"{server.url} does not accept imported checkpoints"):
        Extensions(client.holder).import_weights(FACTS, files)

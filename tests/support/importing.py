"""A checkpoint from elsewhere as a client sends it: in one body, or in parts."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from support.in_process import BASE, Answer, Client, Server, forward_backward, optim_step
from tinsmith.store.rows import CheckpointRow

PATH = "/tinsmith/v1/import_weights"
PARTS = "/tinsmith/v1/import_parts"


async def upload(client: Client, message: Any, **extra: str) -> Answer:
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    named = {name.replace("_", "-"): value for name, value in extra.items()}
    headers = {"x-api-key": client.key, "content-type": "application/msgpack", **named}
    return await client.server.request("POST", PATH, body, headers)


async def saved(server: Server, client: Client) -> dict[str, Any]:
    """The upload of a checkpoint that this server has written."""
    session = await client.session()
    model = await client.model(session)
    await client.result(await client.post("forward_backward", forward_backward(model, 1)))
    await client.result(await client.post("optim_step", optim_step(model, 2)))
    await client.save(model, 3, "mine")
    (row,) = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
    files = {file.name: file.read_bytes() for file in Path(row.directory).iterdir()}
    lora = msgspec.json.decode(row.lora)
    facts = {name: lora[name] for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")}
    return {"name": "back", "base_model": BASE, **facts, "files": files}


async def send_parts(client: Client, name: str, files: dict[str, bytes], size: int = 1000) -> dict[str, str]:
    """Files in parts, each of which is sent twice; their digests."""
    for file, data in files.items():
        for offset in range(0, max(1, len(data)), size):
            for _ in range(2):
                answer = await part_of(client, name, file, offset, data[offset : offset + size])
                assert (answer.status, answer.json) == (200, {"size_bytes": min(len(data), offset + size)})
    return {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}


async def part_of(client: Client, upload: str, file: str, offset: int | str, body: bytes) -> Answer:
    query = f"?upload={upload}&file={file}&offset={offset}"
    return await client.server.request("POST", PARTS + query, body, {"x-api-key": client.key})

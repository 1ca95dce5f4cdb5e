"""What a tenant has while generated requests are sent, with something for every route to work on.

Both fuzzers (`support.fuzz`, `contract/test_server_fuzz.py`) take ids from here, by the names of the fields they go to.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

import msgspec

from support.in_process import Client, forward_backward, sample
from support.openai_server import write_small_tokenizer
from tinsmith.engine.protocol import ModelCard
from tinsmith.store.rows import CheckpointRow
from tinsmith.wire.routes.own import DOWNLOAD_PREFIX

Ids: TypeAlias = dict[str, list[Any]]
"""Values that exist or fit, by field."""

UPLOAD = "0123456789abcdef" * 2
ENDED_RUNS = 2


def small_card(directory: Path) -> ModelCard:
    """The card of the only base model, with a tokenizer."""
    tokenizer = write_small_tokenizer(directory / "tokenizer")
    return ModelCard(name="small", vocab_size=32, max_context_length=24, tokenizer_directory=str(tokenizer))


async def settle(client: Client) -> Ids:
    """Make a session with something of everything in it, and return what is there."""
    base_model = client.server.backend.cards()[0].name
    session = await client.session()
    model = await client.model(session, base_model=base_model)
    promise = await client.post("forward_backward", forward_backward(model, 1))
    await client.result(promise)
    path = await client.save(model, 2, "one")
    await client.save(model, 3, "two", "save_weights_for_sampler")
    sampler = await client.sampler(session, 0, base_model=base_model)
    done = await client.post("asample", sample(sampler, 1))
    await client.result(done)
    requests = [promise.json["request_id"], done.json["request_id"]]
    return {
        "session_id": [session],
        "model_id": [model],
        "training_run_id": [model, *[await _ended_run(client, session, n, base_model) for n in range(ENDED_RUNS)]],
        "sampling_session_id": [sampler],
        "sampler_id": [sampler],
        "request_id": requests,
        "checkpoint_id": ["weights/one", "sampler_weights/two", "external_weights/none"],
        "path": [path, "three"],
        "tinker_path": [path],
        "source_path": [path],
        "model_path": [path],
        "base_model": [base_model],
        "model": [base_model],
        **await _download(client, session),
        **await _import(client, path),
        "starting_on": ["2027-01-15T00:00:00Z"],
        "ending_before": ["2027-01-16T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:00:00-10:00"],
        "day": ["2027-01-15", "9999-12-31", "0001-01-01"],
        "by": ["run", "project", "model", "day"],
        "prompt": [{"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}],
        "sampling_params": [{"max_tokens": 2}],
        "adam_params": [{"learning_rate": 0.1}],
        "num_samples": [1, 2],
        "topk_prompt_logprobs": [0, 3],
        "prompt_alt_tokens_k": [0, 3],
        "target_prompt_logprobs": [None],
    }


async def _ended_run(client: Client, session: str, number: int, base_model: str) -> str:
    """A run with a checkpoint that takes no more work: only such can be deleted."""
    model = await client.model(session, 1 + number, base_model=base_model)
    await client.save(model, 1, "last")
    await client.result(await client.post("unload_model", {"model_id": model}))
    return model


async def _download(client: Client, session: str) -> Ids:
    """The parts of a signed address."""
    url = urlsplit((await client.get(f"sessions/{session}/trace_export")).json["url"])
    names = [url.path.removeprefix(DOWNLOAD_PREFIX), "logprobs", "three", "secret", "traces/x"]
    return {"name": names, **parse_qs(url.query)}


async def _import(client: Client, path: str) -> Ids:
    """What belongs to an upload, and the body of an import (by a name that no field has)."""
    [row] = await client.server.rows(CheckpointRow, "checkpoint", path=path)
    lora = msgspec.json.decode(row.lora)
    facts = {name: lora[name] for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed")}
    files = {file.name: file.read_bytes() for file in Path(row.directory).iterdir() if not file.name.startswith(".")}
    message = {"name": "back", "base_model": row.base_model, **facts, "files": files}
    return {"upload": [UPLOAD], "file": [*files, "secret"], "offset": [0, 10], "import message": [message]}

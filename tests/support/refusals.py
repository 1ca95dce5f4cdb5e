"""A run on a server with tight limits, and the check that a refusal costs nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.in_process import (
    Answer,
    Client,
    Recorder,
    Server,
    datum,
    forward_backward,
    serving,
)
from tinsmith.engine.protocol import ModelCard

SMALL = ModelCard(name="small", vocab_size=100, max_context_length=8)
READ_ONLY = ModelCard(name="only/sampled", vocab_size=100, max_context_length=8, trainable=False)
FROZEN = ModelCard(name="only/trained", vocab_size=100, max_context_length=8, sampleable=False)


def floats(*values: float) -> dict[str, Any]:
    return {"data": list(values), "dtype": "float32"}


def ints(*values: int, shape: list[int] | None = None) -> dict[str, Any]:
    tensor: dict[str, Any] = {"data": list(values), "dtype": "int64"}
    return tensor if shape is None else {**tensor, "shape": shape}


GOOD = datum(1, 2)
PPO = datum(1, 2, weights=None, logprobs=floats(-1, -1), advantages=floats(1, 1))


@dataclass
class Bench:
    """A run whose next number is `seq`."""

    server: Server
    client: Client
    session: str
    model: str
    seq: int = 0

    def next(self) -> int:
        self.seq += 1
        return self.seq

    async def check(self, answer: Answer, status: int, says: tuple[str, ...]) -> None:
        """The refusal is as expected, nothing ran, and the run goes on."""
        assert answer.status == status, answer
        assert answer.status not in (408, 409, 429, 500, 503)
        for text in says:
            assert text in answer.detail, answer.detail
        assert answer.json["code"]
        submitted = len(self.server.backend.submitted)
        await self.client.result(
            await self.client.post("forward_backward", forward_backward(self.model, self.next(), GOOD))
        )
        assert len(self.server.backend.submitted) == submitted + 1


@asynccontextmanager
async def bench(tmp_path: Path, **settings: Any) -> AsyncIterator[Bench]:
    cards = (SMALL, READ_ONLY, FROZEN)
    limits = {"max_datums": 8, "max_request_tokens": 30, "max_samples": 4, "min_free_bytes": 1, **settings}
    async with serving(tmp_path, backend=Recorder(cards), **limits) as server:
        ann = await server.client()
        session = await ann.session()
        model = await ann.model(session, base_model="small")
        server.backend.submitted.clear()
        yield Bench(server, ann, session, model)


def encoded(message: Any) -> bytes:
    """JSON as Python writes it: NaN and all."""
    return json.dumps(message).encode()

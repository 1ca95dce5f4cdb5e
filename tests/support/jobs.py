"""Jobs for backends, built from wire messages; each maker numbers its own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from tinsmith.engine import protocol
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.sampling import SampleRequest, SamplingParams
from tinsmith.wire.messages.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
)
from tinsmith.wire.values.inputs import Datum, ModelInput


def datum(tokens: list[int], weight: float = 1.0) -> Datum:
    """Predict each next token; the last target is the first token."""
    targets = [*tokens[1:], tokens[0]]
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": [weight] * len(tokens)})


_MAKERS = itertools.count()


class Jobs:
    """Makes the jobs of one model (and samples beside it), which is another one for each maker."""

    def __init__(self, base_model: str, name: str = "model-1", prefix: str = "", tenant: str = "tenant-1") -> None:
        self.base_model = base_model
        self.model_id = f"{base_model}:{name}:{next(_MAKERS)}"
        self._prefix = f"{prefix}{self.model_id}"
        self._tenant = tenant
        self.last_id = ""
        self._numbers = itertools.count()

    def _common(self) -> dict[str, Any]:
        self.last_id = f"{self._prefix}-{next(self._numbers)}"
        return {"job_id": self.last_id, "tenant": self._tenant, "base_model": self.base_model}

    def create(
        self, rank: int = 4, seed: int = 7, directory: Path | None = None, optimizer: bool = False
    ) -> protocol.CreateModel:
        return protocol.CreateModel(
            **self._common(),
            model_id=self.model_id,
            lora=protocol.LoraSpec(rank=rank, seed=seed),
            directory=None if directory is None else str(directory),
            optimizer=optimizer,
        )

    def forward_backward(
        self, *data: Datum, loss_fn: Any = "cross_entropy", encoding: protocol.Encoding = "protobuf", **fields: Any
    ) -> protocol.ForwardBackward:
        work = ForwardBackwardInput(data=list(data), loss_fn=loss_fn, **fields)
        request = ForwardBackwardRequest(forward_backward_input=work, model_id=self.model_id, seq_id=1)
        body = encode_request(request) if encoding == "protobuf" else json_codec.encode(request)
        return protocol.ForwardBackward(**self._common(), model_id=self.model_id, body=body, encoding=encoding)

    def forward(self, *data: Datum, encoding: protocol.Encoding = "protobuf") -> protocol.ForwardBackward:
        work = ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
        if encoding == "protobuf":
            request = ForwardBackwardRequest(
                forward_backward_input=work, model_id=self.model_id, seq_id=1, forward_only=True
            )
            body = encode_request(request)
        else:
            body = json_codec.encode(ForwardRequest(forward_input=work, model_id=self.model_id, seq_id=1))
        return protocol.ForwardBackward(
            **self._common(), model_id=self.model_id, body=body, encoding=encoding, is_forward=True
        )

    def optim_step(self, learning_rate: float = 0.05, **params: float) -> protocol.OptimStep:
        adam = AdamParams(learning_rate=learning_rate, **params)
        body = json_codec.encode(OptimStepRequest(model_id=self.model_id, seq_id=1, adam_params=adam))
        return protocol.OptimStep(**self._common(), model_id=self.model_id, body=body)

    def save(self, directory: Path, optimizer: bool = True, beside: bool = False) -> protocol.SaveState:
        return protocol.SaveState(
            **self._common(),
            model_id=self.model_id,
            directory=str(directory),
            optimizer=optimizer,
            beside=beside,
        )

    def load(self, directory: Path, optimizer: bool = True) -> protocol.LoadState:
        return protocol.LoadState(
            **self._common(), model_id=self.model_id, directory=str(directory), optimizer=optimizer
        )

    def unload(self) -> protocol.Unload:
        return protocol.Unload(**self._common(), model_id=self.model_id)

    def sample(
        self,
        prompt: list[int],
        *,
        seed: int = 11,
        directory: Path | None = None,
        key: str | None = None,
        num_samples: int = 1,
        fields: dict[str, Any] | None = None,
        **params: Any,
    ) -> protocol.Sample:
        request = SampleRequest(
            prompt=ModelInput.from_ints(prompt),
            sampling_params=SamplingParams(**params),
            num_samples=num_samples,
            **(fields or {}),
        )
        return protocol.Sample(
            **self._common(),
            body=json_codec.encode(request),
            seed=seed,
            directory=None if directory is None else str(directory),
            adapter_key=key,
        )

    def steps(self, count: int, seed: int = 0) -> list[protocol.AnyJob]:
        """Some training: a pass and a step, each time on other tokens."""
        random = np.random.default_rng(seed)
        jobs: list[protocol.AnyJob] = []
        for _ in range(count):
            rows = [random.integers(1, 60, int(random.integers(3, 12))).tolist() for _ in range(2)]
            jobs += [self.forward_backward(*map(datum, rows)), self.optim_step()]
        return jobs

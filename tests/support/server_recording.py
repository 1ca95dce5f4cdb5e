"""What arrived: each request with its body decoded, and the connections it came over."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinsmith.errors import TinkerError
from tinsmith.wire.codecs import proto_training, zstd
from tinsmith.wire.messages.training import ForwardBackwardRequest
from tinsmith.wire.routes.table import PREFIX
from tinsmith.wire.values.inputs import Datum, PromptProvenanceSpan, ProvenanceSpans
from tinsmith.wire.values.tensors import TensorData

PROTOBUF = "application/x-protobuf"
MAX_BODY_BYTES = 512 * 1024 * 1024
WAIT_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Recorded:
    """One request. `body` is plain values, whatever the encoding; None where there is none, text where it is broken."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any
    raw_body: bytes
    time: float
    connection_id: int
    releases: int = 0
    """How often the test had called `release` before."""
    status: int | None = None
    """The answer's status; None while there is none, or when the connection was dropped instead."""
    is_aborted: bool = False
    """The client went away before the answer."""

    @property
    def name(self) -> str:
        """The path without `/api/v1/`."""
        return self.path.removeprefix(PREFIX)

    @property
    def is_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("content-type", "")

    @property
    def key(self) -> str:
        return self.headers.get("x-api-key", "")


@dataclass
class Recorder:
    """All requests in order of arrival, readable from any thread while more arrive."""

    _requests: list[Recorded] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, request: Recorded) -> None:
        with self._changed:
            self._requests.append(request)
            self._changed.notify_all()

    def all(self) -> list[Recorded]:
        with self._changed:
            return list(self._requests)

    def clear(self) -> None:
        with self._changed:
            self._requests.clear()

    def find(self, path: str) -> list[Recorded]:
        """Requests whose path, with or without `/api/v1/`, fully matches a regular expression."""
        pattern = re.compile(path)
        return [request for request in self.all() if pattern.fullmatch(request.path) or pattern.fullmatch(request.name)]

    def wait_for(self, path: str, count: int, timeout_s: float) -> list[Recorded]:
        """Wait until so many requests for a path have arrived."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.find(path)) >= count, timeout_s):
                raise TimeoutError(f"{len(self.find(path))} of {count} requests for {path} after {timeout_s} s")
        return self.find(path)


def unpacked(headers: Mapping[str, str], raw: bytes) -> bytes:
    """The body without its content-encoding."""
    return zstd.decompress(raw, MAX_BODY_BYTES) if headers.get("content-encoding") == "zstd" else raw


def decode_body(headers: Mapping[str, str], raw: bytes) -> tuple[Any, str | None]:
    """The body as plain values, and what is wrong with it if it cannot be read."""
    if not raw:
        return None, None
    try:
        content = unpacked(headers, raw)
        if PROTOBUF in headers.get("content-type", ""):
            return plain_request(proto_training.decode_request(content)), None
        return msgspec.json.decode(content), None
    except (TinkerError, msgspec.DecodeError) as error:
        return raw.decode(errors="replace"), str(error)


def plain_request(request: ForwardBackwardRequest) -> dict[str, Any]:
    """A binary forward_backward in the form that JSON has for it; spans, which JSON lacks, under their own names."""
    work = request.forward_backward_input
    plain_input: dict[str, Any] = {"data": [_plain_datum(datum) for datum in work.data], "loss_fn": work.loss_fn}
    if work.loss_fn_config is not None:
        plain_input["loss_fn_config"] = dict(work.loss_fn_config)
    plain: dict[str, Any] = {"forward_backward_input": plain_input, "model_id": request.model_id}
    if request.seq_id is not None:
        plain["seq_id"] = request.seq_id
    if request.forward_only:
        plain["forward_only"] = True
    return plain


def _plain_datum(datum: Datum) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "model_input": datum.model_input.to_builtins(),
        "loss_fn_inputs": {key: _plain_tensor(tensor) for key, tensor in sorted(datum.loss_fn_inputs.items())},
    }
    for name in ("model_input_spans", "loss_fn_input_spans"):
        spans: ProvenanceSpans | None = getattr(datum, name)
        if spans is not None:
            plain[name] = [
                {
                    "kind": "prompt" if isinstance(span, PromptProvenanceSpan) else "sampled",
                    "sequence_id": span.sequence_id,
                    "offset": span.offset,
                    "length": span.length,
                }
                for span in spans
            ]
    return plain


def _plain_tensor(tensor: TensorData) -> dict[str, Any]:
    plain: dict[str, Any] = {"data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.is_sparse:
        plain["sparse_crow_indices"] = tensor.sparse_crow_indices
        plain["sparse_col_indices"] = tensor.sparse_col_indices
    return plain

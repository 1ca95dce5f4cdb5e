"""The official SDK's side of bench/wire.py: runs in its own environment, one task name per line in, seconds out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
import zstandard
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output


def request(tokens: list[Any], weights: list[Any]) -> Any:
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(t if isinstance(t, list) else t.tolist()),
            loss_fn_inputs={"target_tokens": t, "weights": w},
        )
        for t, w in zip(tokens, weights, strict=True)
    ]
    work = tinker.types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return tinker.types.ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)


def body_of(tokens: list[Any], weights: list[Any]) -> bytes:
    body: bytes = forward_backward_request_to_proto(request(tokens, weights)).SerializeToString()
    return body


def output_body(weights: list[Any]) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="T")
    record = message.loss_fn_outputs.add(num_datums=len(weights))
    field = record.fields["logprobs"]
    field.data = b"".join(w.tobytes() for w in weights)
    field.offsets = np.cumsum([0] + [w.nbytes for w in weights]).astype(np.int64).tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    body: bytes = message.SerializeToString()
    return body


def main() -> None:
    with np.load(sys.argv[1]) as arrays:
        tokens, weights = list(arrays["tokens"]), list(arrays["weights"])
    token_lists, weight_lists = [t.tolist() for t in tokens], [w.tolist() for w in weights]
    result = output_body(weights)
    tasks: dict[str, Callable[[], Any]] = {
        "numpy": lambda: body_of(tokens, weights),
        "lists": lambda: body_of(token_lists, weight_lists),
        "zstd": lambda: zstandard.ZstdCompressor().compress(body_of(tokens, weights)),
        "result": lambda: deserialize_forward_backward_output(result),
    }
    for line in sys.stdin:
        started = time.perf_counter()
        made = tasks[line.strip()]()
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, len(made) if isinstance(made, bytes) else 0]), flush=True)


if __name__ == "__main__":
    main()

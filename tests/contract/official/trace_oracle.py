"""Answers questions about the official SDK's custom losses and tokenizers, from inside its own environment.

Run as `python trace_oracle.py` with PYTHONPATH naming the release's folder; one JSON request per line in, one JSON
answer per line out: {"ok": ...} or {"error": text}. Nothing here imports tinsmith.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import tinker
import tinker.types
from questions import answer_all
from tinker.lib.public_interfaces import custom_loss
from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture
from tinker.lib.public_interfaces.training_client import TrainingClient
from transformers import AutoTokenizer

HEADER = "import math, operator, torch\nimport torch.nn.functional as F\nfrom typing import Any\n"


def function(question: dict[str, Any]) -> Any:
    """The function that a question carries as text."""
    names: dict[str, Any] = {"__name__": "losses"}
    exec(HEADER + question["source"], names)
    return names[question["name"]]


def trace(question: dict[str, Any]) -> Any:
    """The graph that the release makes of a loss."""
    handle = custom_loss.trace_loss(function(question), question["ranks"], "session")
    return {
        "name": handle.name,
        "inputs": [item.model_dump(mode="json") for item in handle.inputs],
        "input_names": list(handle.input_names),
        "graph": custom_loss.encode_graph(handle).model_dump(mode="json"),
    }


def read_request(question: dict[str, Any]) -> Any:
    """A request to create a loss, as the release's own type reads it."""
    return tinker.types.CreateCustomLossRequest.model_validate(question["request"]).model_dump(mode="json")


class Done(APIFuture):
    """A result that is there already."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    async def result_async(self, timeout: float | None = None) -> Any:
        return self.value


class Holder:
    """A loop in a thread, where the release expects its connection."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run_coroutine_threadsafe(self, coroutine: Any) -> Any:
        return AwaitableConcurrentFuture(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def get_telemetry(self) -> None:
        return None


class Client(TrainingClient):
    """The release's client, with answers in place of a server: the two calls that it makes are kept."""

    def __init__(self, holder: Holder, logprobs: list[Any], metrics: dict[str, float]) -> None:
        self.holder = holder
        self.calls: list[Any] = []
        outputs = [{"logprobs": tinker.TensorData.from_numpy(np.array(row, np.float32))} for row in logprobs]
        self.answer = {"loss_fn_output_type": "T", "loss_fn_outputs": outputs, "metrics": metrics}

    def get_telemetry(self) -> None:
        return None

    async def forward_async(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.record("forward", data, loss_fn, loss_fn_config)

    async def forward_backward_async(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        return self.record("forward_backward", data, loss_fn, loss_fn_config)

    def record(self, name: str, data: Any, loss_fn: str, config: Any) -> Any:
        inputs = [{key: tensor_of(value) for key, value in datum.loss_fn_inputs.items()} for datum in data]
        self.calls.append({"call": name, "loss_fn": loss_fn, "config": config, "inputs": inputs})
        metrics = dict(self.answer["metrics"])
        return Done(tinker.types.ForwardBackwardOutput(**(self.answer | {"metrics": metrics})))


def tensor_of(tensor: Any) -> dict[str, Any]:
    return {
        "dtype": tensor.dtype,
        "values": tensor.to_numpy().tolist(),
        "sparse_crow_indices": tensor.sparse_crow_indices,
    }


HOLDER = Holder()


def run_custom(question: dict[str, Any]) -> Any:
    """What the release sends for a Python loss, and the metrics that it makes."""
    data = []
    for inputs in question["inputs"]:
        tensors = {key: tinker.TensorData(**value) for key, value in inputs.items()}
        tokens = list(range(len(tensors["target_tokens"].to_numpy())))
        data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=tensors))
    client = Client(HOLDER, question["logprobs"], question["metrics"])
    output = client.forward_backward_custom(data, function(question)).result()
    return {"calls": client.calls, "metrics": output.metrics}


def run_handle(question: dict[str, Any]) -> Any:
    """A traced loss, run by the release on this side."""
    import torch

    handle = custom_loss.trace_loss(function(question), question["ranks"], "session")
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(range(len(row)))),
            loss_fn_inputs={key: tinker.TensorData(**value) for key, value in inputs.items()},
        )
        for row, inputs in zip(question["logprobs"], question["inputs"], strict=True)
    ]
    custom_loss.check_loss_inputs(handle, data)
    logprobs = [torch.tensor(row, requires_grad=True) for row in question["logprobs"]]
    loss, metrics = custom_loss.run_loss_handle(handle, data, logprobs)
    return {"loss": float(loss.detach()), "metrics": metrics}


def tokenizer_source(question: dict[str, Any]) -> Any:
    """Which tokenizer the release asks transformers for."""
    from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info

    original = AutoTokenizer.from_pretrained
    AutoTokenizer.from_pretrained = staticmethod(lambda name, **options: [name, options])
    try:
        return _load_tokenizer_from_model_info.__wrapped__(question["model_name"], question["tokenizer_id"])
    finally:
        AutoTokenizer.from_pretrained = original


def tokenizer(question: dict[str, Any]) -> Any:
    """What transformers' tokenizer of a directory answers to a list of [attribute or method, arguments]."""
    loaded = AutoTokenizer.from_pretrained(question["directory"])
    answers = []
    for name, args, kwargs in question["calls"]:
        value = len(loaded) if name == "__len__" else getattr(loaded, name)
        answers.append(plain(value(*args, **kwargs) if callable(value) else value))
    return answers


def plain(value: Any) -> Any:
    return {key: plain(item) for key, item in value.items()} if hasattr(value, "items") else value


COMMANDS = {
    command.__name__: command for command in (trace, read_request, run_custom, run_handle, tokenizer_source, tokenizer)
}


if __name__ == "__main__":
    answer_all(COMMANDS)

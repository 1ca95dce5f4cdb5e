"""docs/reference/limits.md: a request above a limit gets the error that the page says.

The page's numbers are generated from the settings and `wire/limits.py`; which error belongs to which row is tried here.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.server_process import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"
MODEL = "tinsmith/arithmetic"
LOW = {"max_sessions": 2, "max_models": 1, "max_datums": 2, "max_request_tokens": 40, "max_samples": 3}
"""Settings, lowered so that small requests are above them. A session more is allowed than the tests use."""


def promised() -> dict[str, str]:
    """Return the error of each row of the page."""
    rows = re.findall(r"^\| (.+?) \| .*? \| .*? \| (\d{3} `\w+`) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


class Caller:
    """Sends one request after another, as JSON."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._number = 0
        self.session = self.made("create_session", new_session())["session_id"]
        session = {"session_id": self.session, "base_model": MODEL}
        self.sampler = self.made("create_sampling_session", session | {"sampling_session_seq_id": 0})[
            "sampling_session_id"
        ]
        self.model = self.made("create_model", self.new_model(0))["model_id"]

    def made(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        status, answer = self.send(route, body)
        assert status == 200, answer
        return answer

    def send(self, route: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"{self._server.url}/api/v1/{route}",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-api-key": self._server.key},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def new_model(self, number: int, rank: int = 4) -> dict[str, Any]:
        lora = {"lora_config": {"rank": rank}}
        return {"session_id": self.session, "model_seq_id": number, "base_model": MODEL, **lora}

    def sample(self, tokens: int = 3, chunks: int = 1, **changes: Any) -> tuple[int, dict[str, Any]]:
        self._number += 1
        params = {"max_tokens": 1, **{name: changes.pop(name) for name in ("stop",) if name in changes}}
        chunk = {"tokens": [1] * tokens, "type": "encoded_text"}
        body = {"prompt": {"chunks": [chunk] * chunks}, "sampling_params": params, "num_samples": 1}
        named = {"sampling_session_id": self.sampler, "seq_id": self._number}
        return self.send("asample", body | named | changes)

    def train(self, datums: int = 1, length: int = 1, **inputs: Any) -> tuple[int, dict[str, Any]]:
        self._number += 1
        own = {"target_tokens": tensor("int64", length), "weights": tensor("float32", length)}
        chunk = {"tokens": [1] * length, "type": "encoded_text"}
        datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": own | inputs}
        work = {"data": [datum] * datums, "loss_fn": "cross_entropy"}
        body = {"model_id": self.model, "seq_id": self._number, "forward_backward_input": work}
        return self.send("forward_backward", body)


def new_session(metadata: Any = None) -> dict[str, Any]:
    return {"tags": [], "user_metadata": metadata or {}, "sdk_version": "0.36.0", "type": "create_session"}


def tensor(dtype: str, length: int) -> dict[str, Any]:
    return {"data": [1] * length, "dtype": dtype, "shape": [length]}


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


Attempt = Callable[[Caller], tuple[int, dict[str, Any]]]
ABOVE: dict[str, Attempt] = {
    "Datums in one request of `forward_backward`": lambda caller: caller.train(datums=3),
    "Tokens in one request of `forward_backward`": lambda caller: caller.train(length=41),
    "Samples of one prompt": lambda caller: caller.sample(num_samples=4),
    "Prompt of a sample": lambda caller: caller.sample(tokens=4096),
    "Prompt and sample together; input of a datum": lambda caller: caller.sample(sampling_params={"max_tokens": 4096}),
    "Rank of an adapter": lambda caller: caller.send("create_model", caller.new_model(1, rank=513)),
    "Stop sequences of a sample": lambda caller: caller.sample(stop=["a"] * 65),
    "Characters of a stop string": lambda caller: caller.sample(stop=["a" * 1001]),
    "Bytes of all stop strings of a sample": lambda caller: caller.sample(stop=["a" * 999] * 5),
    "Tokens listed for one position (`topk_...`)": lambda caller: caller.sample(topk_prompt_logprobs=1001),
    "Tensors of a datum; settings of a loss": lambda caller: caller.train(
        **{f"x{number}": tensor("float32", 1) for number in range(65)}
    ),
    "Characters of such a name": lambda caller: caller.train(**{"x" * 129: tensor("float32", 1)}),
    "Chunks of a model input": lambda caller: caller.sample(tokens=1, chunks=65_537),
    "Metadata: levels of nesting": lambda caller: caller.send("create_session", new_session(nested(17))),
    "Metadata: values": lambda caller: caller.send("create_session", new_session({"a": [0] * 8192})),
    "Characters of a checkpoint's name": lambda caller: caller.send(
        "save_weights", {"model_id": caller.model, "path": "x" * 256, "seq_id": 1000}
    ),
    "Body as sent": lambda caller: caller.send("create_session", new_session({"a": "x" * 65_536})),
    "user: live models": lambda caller: caller.send("create_model", caller.new_model(1)),
}
"""A request above each limit that a single request can exceed."""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    with ServerProcess(tmp_path_factory.mktemp("limits") / "data", **LOW) as server:
        yield Caller(server)


@pytest.mark.parametrize("what", ABOVE)
def test_a_request_above_a_limit_gets_the_promised_error(caller: Caller, what: str) -> None:
    status, answer = ABOVE[what](caller)
    assert f"{status} `{answer['code']}`" == promised()[what]
    assert answer["detail"]


def test_requests_within_the_limits_are_accepted(caller: Caller) -> None:
    assert caller.sample(num_samples=3)[0] == 200
    assert caller.train(datums=2)[0] == 200
    assert caller.send("create_session", new_session(nested(15)))[0] == 200

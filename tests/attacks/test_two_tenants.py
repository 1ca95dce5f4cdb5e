"""A server as users run it, with a real engine and two organisations: one attacks, and the other must not notice."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.costly_loss import costly_loss
from support.raw_client import Answered, send
from support.server_process import ServerProcess

from tinsmith.engine.models.tiny import make_tiny

HANG_S = 120.0
TOKENS = [5, 9, 2, 33, 7, 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    make_tiny(folder / "model", seed=3)
    model = ("--model", f"tiny={folder / 'model'}")
    with ServerProcess(folder / "data", *model, backend="local", dtype="float32", threads=1, poll_s=1) as process:
        yield process


class Tenant:
    """An organisation's key and one session, with requests sent one by one."""

    def __init__(self, server: ServerProcess, org: str) -> None:
        made = server.run("key", "create", org, "--org", org, "--user", org)
        found = re.search(r"tml-\S+", made.stdout)
        assert found is not None, made.stderr
        self._url, self._key = server.url, found.group().rstrip('",')
        self.session = self.post("create_session", {"tags": []}).json["session_id"]
        self._models = 0
        self._numbers: dict[str, int] = {}

    def post(self, name: str, body: Any) -> Answered:
        return send(self._url, name, body, headers={"x-api-key": self._key})

    def result(self, answer: Answered) -> Any:
        """What a promise comes to, error or not."""
        assert answer.status == 200, answer
        until = time.monotonic() + HANG_S
        while time.monotonic() < until:
            got = self.post("retrieve_future", {"request_id": answer.json["request_id"]})
            if got.status != 408:
                return got.json
        raise AssertionError("no result")

    def model(self, seed: int = 1) -> str:
        body = {
            "session_id": self.session,
            "model_seq_id": self._models,
            "base_model": "tiny",
            "lora_config": {"rank": 4, "seed": seed},
        }
        self._models += 1
        return str(self.result(self.post("create_model", body))["model_id"])

    def op(self, name: str, model: str, **fields: Any) -> Answered:
        number = self._numbers[model] = self._numbers.get(model, 0) + 1
        return self.post(name, {"model_id": model, "seq_id": number, **fields})

    def pass_(self, model: str, datums: int = 2, **loss: Any) -> Answered:
        inputs = {
            "target_tokens": {"data": [*TOKENS[1:], 5], "dtype": "int64", "shape": [6]},
            "weights": {"data": [1.0] * 6, "dtype": "float32", "shape": [6]},
        }
        if loss:
            del inputs["weights"]
        chunk = {"type": "encoded_text", "tokens": TOKENS}
        data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": inputs}] * datums
        work = {"data": data, "loss_fn": "cross_entropy", **loss}
        return self.op("forward_backward", model, forward_backward_input=work)

    def step(self, model: str, **params: float) -> Answered:
        return self.op("optim_step", model, adam_params={"learning_rate": 0.01, **params})


def trained(tenant: Tenant) -> list[Any]:
    """A short run, and all that it was told."""
    model = tenant.model()
    told = []
    for _ in range(3):
        told += [tenant.result(tenant.pass_(model)), tenant.result(tenant.step(model))]
    return told


def test_the_other_organisation_does_not_notice(server: ServerProcess) -> None:
    victim, stranger = Tenant(server, "victim"), Tenant(server, "stranger")
    alone = trained(victim)
    model = stranger.model()
    for params in (
        {"learning_rate": 1e39},
        {"learning_rate": 3e38},
        {"learning_rate": 1e38, "weight_decay": 1e38},
        {"eps": 1e39},
        {"eps": 0.0},
    ):
        refused = stranger.step(model, **params)
        assert refused.status == 400
        assert "adam_params." in refused.body.decode()
    for _ in range(2):
        stranger.result(stranger.pass_(model))
        told = stranger.result(stranger.step(model, learning_rate=1e15, weight_decay=1e15))
        assert "Infinity" not in json.dumps(told)
    assert "error" in stranger.result(stranger.step(model, learning_rate=1e15, weight_decay=1e15))
    assert trained(victim) == alone
    assert "engine_died" not in server.log
    assert server.log.count("is ready, process") <= 1


def test_a_costly_loss_is_cancelled_while_it_computes_and_says_so(server: ServerProcess) -> None:
    victim, stranger = Tenant(server, "victim2"), Tenant(server, "stranger2")
    alone = trained(victim)
    model = stranger.model()
    loss = json.loads(json.dumps(costly_loss().model_dump(mode="json")))
    uploaded = stranger.post("create_custom_loss", {**loss, "session_id": stranger.session})
    assert uploaded.status == 200, uploaded.body
    loss_id = stranger.result(uploaded)["loss_id"] if "request_id" in uploaded.json else uploaded.json["loss_id"]
    costly = stranger.pass_(model, 400, loss_fn="custom", loss_fn_config={"loss_id": loss_id})
    assert trained(victim) == alone, "while the other computes"
    assert stranger.post("retrieve_future", {"request_id": costly.json["request_id"]}).status == 408
    answer = stranger.post("cancel_future", {"request_id": costly.json["request_id"]})
    assert answer.json == {"cancelled": True}
    assert stranger.result(costly)["error"] == "cancelled"
    assert stranger.result(stranger.step(model))["metrics"]["optim/grad_norm"] == 0.0
    late = stranger.post("cancel_future", {"request_id": costly.json["request_id"]})
    assert late.json["cancelled"] is False

"""Tokenizers that the server serves: used if there are any, and never silently replaced by another."""

from __future__ import annotations

from typing import Any

import pytest
from support.tinker_server import Drop, Status, TinkerServer

from tinsmith import InternalServerError, ServiceClient, TinkerError

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

PATH = "/tinsmith/v1/tokenizer"
MODEL = "stub/model"


@pytest.fixture
def serving(make_server: Any) -> TinkerServer:
    """A server with a tokenizer of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"tin": 0, "smith": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    server: TinkerServer = make_server(flags={"tinsmith": {"tokenizer": True}})
    server.settings.tokenizers[MODEL] = {
        "tokenizer_json": backend.to_str(),
        "tokenizer_config": {"eos_token": "?"},
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    return server


def test_training_and_sampling_clients_get_the_servers_tokenizer(connect: Any, serving: TinkerServer) -> None:
    client: ServiceClient = connect(serving)
    made = [
        client.create_lora_training_client(MODEL, rank=4).get_tokenizer(),
        client.create_sampling_client(base_model=MODEL).get_tokenizer(),
    ]
    for tokenizer in made:
        assert tokenizer.encode("smith tin gold") == [1, 0, 2]
        assert tokenizer.eos_token_id == 2
        assert tokenizer.apply_chat_template([{"role": "user", "content": "tin smith"}]) == [0, 1]
    assert made[0]._backend is made[1]._backend, "one vocabulary in this process"
    assert [request.query for request in serving.find(PATH)] == [{"model": MODEL}] * 2


def test_a_fault_that_passes_is_waited_for(connect: Any, serving: TinkerServer) -> None:
    sampler = connect(serving).create_sampling_client(base_model=MODEL)
    serving.script(PATH, [Status(503, {"retry-after-ms": "10"}), Drop()])
    assert sampler.get_tokenizer().encode("tin") == [0]


def test_a_server_that_fails_is_an_error_and_no_other_tokenizer_is_taken(connect: Any, serving: TinkerServer) -> None:
    sampler = connect(serving, retry_deadline_s=0.5).create_sampling_client(base_model=MODEL)
    serving.script(PATH, [Status(500, {}, {"detail": "no files"})] * 50)
    with pytest.raises(InternalServerError, match="no files"):
        sampler.get_tokenizer()


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"tokenizer_json": 1}'])
def test_an_answer_that_is_no_tokenizer_is_named(connect: Any, serving: TinkerServer, answer: bytes) -> None:
    sampler = connect(serving).create_sampling_client(base_model=MODEL)
    serving.script(PATH, [Status(200, {"content-type": "application/json"}, answer)])
    with pytest.raises(TinkerError, match=f"the response of {serving.url}{PATH}"):
        sampler.get_tokenizer()

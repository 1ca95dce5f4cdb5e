"""Errors that name the place and the remedy: no server, wrong URL, wrong key, wrong data, wrong responses."""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

import numpy as np
import pytest
from support.tinker_server import Drop, Redirect, Status, TinkerServer

from tinsmith import (
    AdamParams,
    APIConnectionError,
    APIResponseValidationError,
    AuthenticationError,
    ClientConfig,
    Datum,
    InternalServerError,
    InvalidInputError,
    ModelInput,
    NotFoundError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
PAGE = "<!DOCTYPE html><html><body><h1>502 Bad Gateway</h1>" + "<p>nginx</p>" * 5000 + "</body></html>"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_nothing_listens_on_this_machine(
    connect: Any, free_port: int, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(f"http://{host}:{free_port}", first_contact_s=600.0)
    with pytest.raises(APIConnectionError) as told:
        client.create_lora_training_client("stub/model")

    assert f"http://{host}:{free_port}/" in str(told.value)
    assert f"nothing is listening at {host}:{free_port}" in str(told.value)
    assert str(told.value).endswith(f"Start a server: tinsmith serve --port {free_port}")
    assert not hasattr(told.value, "__notes__"), "it was tried once"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    with pytest.raises(APIConnectionError, match="nothing is listening"):
        client.get_server_capabilities()


def test_a_server_on_this_machine_that_was_there_is_waited_for(
    connect: Any, server: TinkerServer, eventually: Any
) -> None:
    client = connect(server, retry_deadline_s=60.0)
    client.get_server_capabilities()
    server.stop()
    listing = client.create_rest_client().list_sessions()
    eventually(lambda: client.holder.connection.outage.affected == 1)
    server.start()
    assert listing.result(30).sessions == []


def test_a_sampler_of_another_process_waits_for_its_server(connect: Any, server: TinkerServer, eventually: Any) -> None:
    sampler = connect(server).create_sampling_client(base_model="stub/model")
    server.stop()
    clone = SamplingClient.from_sampler_handle(sampler.get_sampler_handle(), api_key=server.key)
    sampled = clone.sample(PROMPT, 1, PARAMS)
    eventually(lambda: clone.holder.connection.outage.affected == 1)
    server.start()
    assert sampled.result(30).sequences[0].tokens == [6, 7]
    clone.holder.close()


def test_a_host_that_does_not_exist(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = connect("http://no-such-host.invalid:8000", first_contact_s=1.0, connect_timeout_s=3.0)
    started = time.time()
    with pytest.raises(APIConnectionError, match=r"no-such-host\.invalid"):
        client.get_server_capabilities()
    assert time.time() - started < 12
    assert "no-such-host.invalid" in caplog.records[0].getMessage()


@pytest.mark.parametrize("key", ["sk-123456", "secret", "TML-abc", "Bearer tml-abc"])
def test_a_key_that_is_none_is_refused_before_any_request(server: TinkerServer, key: str) -> None:
    def use() -> None:
        config = ClientConfig(base_url=server.url, api_key=key)
        with ServiceClient(config=config) as client:
            client.create_sampling_client(base_model="stub/model")

    with pytest.raises(TinkerError, match="tml-") as told:
        use()
    assert key not in str(told.value), "the key itself is not shown"
    assert server.requests == []


def test_no_key_for_a_server_of_ones_own_says_what_to_set(server: TinkerServer) -> None:
    def use() -> None:
        with ServiceClient(base_url=server.url) as client:
            client.get_server_capabilities()

    with pytest.raises(TinkerError, match="TINKER_API_KEY"):
        use()
    assert server.requests == []


def test_a_key_that_the_server_does_not_know(connect: Any, server: TinkerServer) -> None:
    client = connect(server, api_key="tml-of-somebody-else")
    with pytest.raises(AuthenticationError, match="TINKER_API_KEY") as told:
        client.get_server_capabilities()
    assert server.url in str(told.value)
    assert len(server.requests) == 1, "it is not tried again"


def test_an_address_with_a_wrong_path_is_named(connect: Any, server: TinkerServer) -> None:
    url = f"{server.url}/wrong"
    client = connect(url, api_key=server.key)
    with pytest.raises(NotFoundError) as told:
        client.create_lora_training_client("stub/model")
    assert f"{url}/api/v1/" in str(told.value)


def test_an_address_with_a_path_prefix_works(make_server: Any, connect: Any, datum: Any) -> None:
    server = make_server(prefix="/services/tinker")
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    assert trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    with_slash = connect(f"{server.url}/", api_key=server.key)
    assert with_slash.get_server_capabilities().supported_models


def test_a_redirect_is_followed(connect: Any, server: TinkerServer) -> None:
    server.script("get_server_capabilities", [Redirect(f"{server.url}/api/v1/get_server_capabilities")])
    assert connect(server).get_server_capabilities().supported_models


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/", "http://", "localhost"])
def test_an_address_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(TinkerError, match="base_url"):
        ServiceClient(base_url=url, api_key="tml-key")


def test_a_page_of_html_is_shortened_and_the_address_named(
    connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server, retry_deadline_s=0.5)
    client.get_server_capabilities()
    server.script("get_server_capabilities", [Status(502, {"content-type": "text/html"}, PAGE)] * 100)
    with pytest.raises(InternalServerError) as told:
        client.get_server_capabilities()

    assert f"{server.url}/api/v1/get_server_capabilities" in str(told.value)
    assert "502" in str(told.value)
    assert len(str(told.value)) < 3000
    assert all(len(record.getMessage()) < 3500 for record in caplog.records)


@pytest.mark.parametrize("route", ["client/config", "get_server_capabilities", "create_session"])
@pytest.mark.parametrize("body", [PAGE, "[]", "null", "not json"], ids=["html", "list", "null", "text"])
def test_an_answer_of_another_kind_of_server_is_an_error_that_names_it(
    connect: Any, server: TinkerServer, route: str, body: str
) -> None:
    server.script(route, [Status(200, {"content-type": "text/html"}, body)])
    client = connect(server)
    call = (
        client.get_server_capabilities
        if route != "create_session"
        else (lambda: client.create_sampling_client(base_model="stub/model"))
    )
    with pytest.raises(APIResponseValidationError) as told:
        call()
    assert f"{server.url}/api/v1/{route}" in str(told.value)
    assert len(str(told.value)) < 3000


@pytest.mark.parametrize("body", [PAGE, "[1, 2]", '"a"', "7", "not json", ""], ids=lambda body: body[:8])
def test_a_result_that_is_none_is_an_error_not_a_hang(trainer: TrainingClient, server: TinkerServer, body: str) -> None:
    server.script("retrieve_future", [Status(200, {}, body)])
    error = trainer.optim_step(STEP).exception(8)
    assert isinstance(error, TinkerError), repr(error)
    assert "optim_step" in str(error) or "retrieve_future" in str(error)
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 2.0}


def test_a_binary_result_that_is_broken_is_an_error_not_a_hang(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.script("retrieve_future", [Status(200, {"content-type": "application/x-protobuf"}, b"\xff\xff\xff")])
    error = trainer.forward_backward([datum(1)], "cross_entropy").exception(8)
    assert isinstance(error, TinkerError), repr(error)
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}


def test_a_promise_without_an_id_is_an_error_not_a_hang(trainer: TrainingClient, server: TinkerServer) -> None:
    server.script("optim_step", [Status(200, body={"request": 1})])
    error = trainer.optim_step(STEP).exception(8)
    assert isinstance(error, APIResponseValidationError)
    assert f"{server.url}/api/v1/optim_step" in str(error)


def make_datum(inputs: dict[str, Any], length: int = 3) -> Datum:
    return Datum(ModelInput.from_ints(list(range(length))), inputs)


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"target_tokens": [1, 2, 3, 4], "weights": [1.0] * 4}, "target_tokens.*4.*3"),
        ({"target_tokens": [1, 2, 3], "weights": [1.0] * 5}, "weights.*5.*3"),
        ({"target_tokens": [1, 2, 3], "mask": [1, 1, 1]}, "mask"),
        ({"target_tokens": [1.5, 2, 3]}, "target_tokens"),
        ({"target_tokens": [True, False, True]}, "target_tokens"),
        ({"target_tokens": [-1, 2, 3]}, "target_tokens"),
        ({"target_tokens": np.array([1, 2, 3], np.float32)}, "target_tokens"),
        ({"target_tokens": [1, 2, 3], "weights": "all"}, "weights"),
    ],
)
def test_a_wrong_loss_input_is_refused_where_it_is_made(inputs: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        make_datum(inputs)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lambda: "text", r"data\[2\]"),
        (lambda: None, r"data\[2\]"),
        (lambda: make_datum({"target_tokens": [1, 2, 3], "weights": np.array([1.0, np.nan, 1.0])}), "weights"),
        (lambda: make_datum({"target_tokens": [1, 2, 3], "weights": [1.0, float("inf"), 1.0]}), "weights"),
    ],
)
def test_a_wrong_datum_is_refused_at_once_by_place_and_key(
    trainer: TrainingClient, server: TinkerServer, datum: Any, bad: Any, named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named):
        trainer.forward_backward([datum(1), datum(2), bad()], "cross_entropy")
    assert server.find("forward_backward") == []
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}


def test_an_unknown_loss_is_refused_at_once_by_name(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"loss_fn.*crossentropy"):
        trainer.forward_backward([datum(1)], "crossentropy")  # type: ignore[arg-type]
    assert server.find("forward_backward") == []


def test_a_datum_that_is_too_long_is_refused_by_the_server_by_place(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.script("forward_backward", [Status(400, body={"detail": "data[1]: 40000 tokens, the limit is 32768"})] * 2)
    error = trainer.forward_backward([datum(1), datum(*range(4000))], "cross_entropy").exception(10)
    assert "data[1]: 40000 tokens, the limit is 32768" in str(error)


def test_a_step_without_parameters_is_refused_at_once(trainer: TrainingClient, server: TinkerServer) -> None:
    with pytest.raises(InvalidInputError, match="AdamParams"):
        trainer.optim_step()
    assert server.find("optim_step") == []


def test_an_adapter_that_trains_nothing_is_refused_at_once(client: ServiceClient, server: TinkerServer) -> None:
    with pytest.raises(InvalidInputError, match="train_mlp"):
        client.create_lora_training_client("stub/model", train_mlp=False, train_attn=False, train_unembed=False)
    with pytest.raises(InvalidInputError, match="rank"):
        client.create_lora_training_client("stub/model", rank=0)
    assert server.requests == []


def test_an_unknown_model_is_refused_with_the_servers_word(client: ServiceClient, server: TinkerServer) -> None:
    with pytest.raises(TinkerError, match="'stub/unknown' is not served here") as told:
        client.create_lora_training_client("stub/unknown")
    assert f"{server.url}/api/v1/create_model" in str(told.value)


def test_deprecation_notes_are_logged(
    client: ServiceClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    note = {"x-deprecation-note": "use 0.40", "x-deprecation-level": "error"}
    server.script("get_server_capabilities", [Status(200, note, {"supported_models": []})])
    client.get_server_capabilities()
    assert [(record.levelname, "use 0.40" in record.getMessage()) for record in caplog.records] == [("ERROR", True)]


def test_a_dropped_handshake_names_the_address(connect: Any, server: TinkerServer) -> None:
    server.script("client/config", [Drop()] * 100)
    client = connect(server, first_contact_s=0.5)
    with pytest.raises(APIConnectionError, match=server.url):
        client.get_server_capabilities()


def test_an_unknown_argument_of_the_service_client_is_told(server: TinkerServer) -> None:
    with pytest.warns(UserWarning, match="max_retries"):
        ServiceClient(base_url=server.url, api_key=server.key, max_retries=3)

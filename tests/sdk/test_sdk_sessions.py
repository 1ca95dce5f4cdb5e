"""The life of a client: nothing before it is needed, one handshake, signs of life, and nothing left at the end."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.tinker_server import Drop, Hold, Status, TinkerServer

from tinsmith import (
    AdamParams,
    ClientConfig,
    ModelInput,
    RestClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
FINISH = "sessions/.*/finish"


def descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that was opened to list them
            continue
    return found


def use(client: ServiceClient, datum: Any) -> None:
    """A bit of everything."""
    trainer = client.create_lora_training_client("stub/model", rank=4)
    futures: list[Any] = [trainer.forward_backward([datum(i)], "cross_entropy") for i in range(20)]
    sampler = trainer.save_weights_and_get_sampling_client()
    futures += [sampler.sample(PROMPT, 1, PARAMS) for _ in range(100)]
    futures.append(client.create_rest_client().list_sessions())
    for future in futures:
        future.result(10)


def test_a_client_makes_no_request_before_it_needs_one(connect: Any, server: TinkerServer) -> None:
    threads = threading.active_count()
    client = connect(server)
    client.create_rest_client()
    client.get_console_url()
    assert server.requests == []
    assert threading.active_count() == threads
    client.get_server_capabilities()
    assert [request.name for request in server.requests] == [
        "client/config",
        "client/dynamic_config",
        "get_server_capabilities",
    ]


def test_an_unused_client_is_closed_without_a_request(connect: Any, server: TinkerServer) -> None:
    with connect(server):
        pass
    assert server.requests == []


def test_concurrent_first_calls_share_one_handshake_and_one_session(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    server.script("client/config", [Hold()])
    with ThreadPoolExecutor(16) as pool:
        made = [pool.submit(client.create_lora_training_client, "stub/model", rank=1) for _ in range(8)]
        made += [pool.submit(client.create_sampling_client, base_model="stub/model") for _ in range(8)]
        server.wait_for("client/config", timeout_s=10)
        server.release()
        for future in made:
            future.result(10)

    for name in ("client/config", "client/dynamic_config", "create_session"):
        assert len(server.find(name)) == 1, name
    assert sorted(request.body["model_seq_id"] for request in server.find("create_model")) == list(range(8))
    numbers = [request.body["sampling_session_seq_id"] for request in server.find("create_sampling_session")]
    assert sorted(numbers) == list(range(8))
    assert server.violations == []


def test_a_session_says_what_it_was_given(connect: Any, server: TinkerServer) -> None:
    config = ClientConfig(base_url=server.url, api_key=server.key, project_id="p-1", tags=("a", "b"))
    with ServiceClient({"team": "x"}, display_name="Night run", config=config) as client:
        client.create_sampling_client(base_model="stub/model")
    body = server.find("create_session")[0].body
    given = {name: body[name] for name in ("user_metadata", "display_name", "project_id", "tags", "type")}
    assert given == {
        "user_metadata": {"team": "x"},
        "display_name": "Night run",
        "project_id": "p-1",
        "tags": ["a", "b"],
        "type": "create_session",
    }


def test_messages_of_the_server_are_logged_at_their_level(
    client: ServiceClient, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.settings.session_messages = {"info_message": "hello", "warning_message": "old", "error_message": "too old"}
    client.create_sampling_client(base_model="stub/model")
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("tinsmith")]
    assert said == [("INFO", "hello"), ("WARNING", "old"), ("ERROR", "too old")]


def test_signs_of_life_are_sent(connect: Any, server: TinkerServer) -> None:
    client = connect(server, heartbeat_s=0.05)
    client.get_server_capabilities()
    client.create_sampling_client(base_model="stub/model")
    beats = server.wait_for("session_heartbeat", 4, timeout_s=5)
    assert {beat.body["session_id"] for beat in beats} == {"session-0001"}


def test_failed_heartbeats_do_not_end_them(connect: Any, server: TinkerServer) -> None:
    client = connect(server, heartbeat_s=0.05)
    server.script("session_heartbeat", [Status(500), Drop(), Status(404), Status(429)])
    client.create_sampling_client(base_model="stub/model")
    server.wait_for("session_heartbeat", 7, timeout_s=10)


def test_a_session_that_is_gone_gets_no_more_heartbeats(
    connect: Any, server: TinkerServer, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server, heartbeat_s=0.05)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.end_session("session-0001")
    eventually(lambda: any(beat.status == 410 for beat in server.find("session_heartbeat")))
    sent = len(server.find("session_heartbeat"))
    time.sleep(0.4)

    assert len(server.find("session_heartbeat")) == sent
    assert any("session-0001" in record.getMessage() for record in caplog.records)
    assert sampler.sample(PROMPT, 1, PARAMS).result(10), "nothing else ends"


def test_heartbeats_end_with_the_client(connect: Any, server: TinkerServer) -> None:
    client = connect(server, heartbeat_s=0.05)
    client.create_sampling_client(base_model="stub/model")
    server.wait_for("session_heartbeat", timeout_s=5)
    client.close()
    sent = len(server.find("session_heartbeat"))
    time.sleep(0.3)
    assert len(server.find("session_heartbeat")) == sent


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_close_leaves_no_thread_no_descriptor_no_line(
    connect: Any, server: TinkerServer, datum: Any, eventually: Any, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    url = server.url.replace("127.0.0.1", host)
    with connect(url, api_key=server.key) as warm_up:  # what the process opens once for all is not counted
        warm_up.get_server_capabilities()
    eventually(lambda: server.open_connections == 0)
    gc.collect()
    threads, before = set(threading.enumerate()), descriptors()
    client = connect(url, api_key=server.key)
    use(client, datum)
    client.close()

    eventually(lambda: server.open_connections == 0, 3)
    eventually(lambda: set(threading.enumerate()) <= threads, 3)
    left = {name: target for name, target in descriptors().items() if before.get(name) != target}
    assert left == {}
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_close_with_work_pending_leaves_nothing_either(
    connect: Any, server: TinkerServer, datum: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    client = connect(server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures: list[Any] = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]
    futures += [trainer.forward_backward([datum(1)], "cross_entropy"), trainer.optim_step(STEP)]
    server.wait_for("asample", 50, timeout_s=10)
    client.close()

    assert all(future.done() for future in futures)
    eventually(lambda: server.open_connections == 0, 3)
    eventually(lambda: set(threading.enumerate()) <= threads, 3)
    del futures, sampler, trainer, client
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_close_tells_everyone_and_cancels_every_sample(
    make_server: Any, connect: Any, caplog: pytest.LogCaptureFixture, is_shared: bool
) -> None:
    caplog.set_level(logging.WARNING)
    server = make_server(
        flags={"sample_use_retrieve_futures": is_shared}, dynamic_flags={"sample_cancel_enabled": True}
    )
    client = connect(server)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.pause_work()
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(50)]
    server.wait_for("asample", 50, timeout_s=10)
    server.wait_for("retrieve_futures" if is_shared else "retrieve_future", timeout_s=10)
    while len(sampler.holder.pending_samples) < 50:
        time.sleep(0.01)
    polls = len(server.find("retrieve_future"))
    client.close()

    assert {type(future.exception(0)) for future in futures} == {TinkerError}
    assert len({request.body["request_id"] for request in server.find("cancel_future")}) == 50
    assert len(server.find("cancel_future")) == 50, "each is cancelled once"
    if is_shared:
        assert len(server.find("retrieve_future")) == polls, "nobody begins to poll at the end"
    assert caplog.records == []


def test_close_while_samples_are_being_submitted_says_nothing(
    connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(server)
    sampler = client.create_sampling_client(base_model="stub/model")
    server.script("asample", [Hold()] * 16)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(450)]
    server.wait_for("asample", 16, timeout_s=10)
    client.close()

    assert all(future.done() for future in futures)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_close_while_other_threads_submit_strands_nobody(connect: Any, server: TinkerServer, eventually: Any) -> None:
    for _ in range(8):
        client = connect(server)
        sampler = client.create_sampling_client(base_model="stub/model")
        futures: list[Any] = []
        unexpected: list[BaseException] = []

        def submit(sampler: Any = sampler, futures: Any = futures, unexpected: Any = unexpected) -> None:
            try:
                for _ in range(300):
                    futures.append(sampler.sample(PROMPT, 1, PARAMS))
            except TinkerError:
                return
            except BaseException as error:
                unexpected.append(error)

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        server.wait_for("asample", timeout_s=10)
        client.close()
        for thread in threads:
            thread.join(5)
        assert unexpected == []
        eventually(lambda futures=futures: all(future.done() for future in futures), 3)
        server.clear_requests()


def test_many_clients_leave_nothing(server: TinkerServer, connect: Any, eventually: Any) -> None:
    threads = set(threading.enumerate())
    for _ in range(15):
        with connect(server) as client:
            client.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS).result(10)
    eventually(lambda: set(threading.enumerate()) <= threads, 3)
    eventually(lambda: server.open_connections == 0, 3)


def test_close_is_quick_though_the_server_does_not_answer(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    client.create_sampling_client(base_model="stub/model")
    server.script(FINISH, [Hold()])
    server.script("telemetry", [Hold()])
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 3
    server.release()


def test_close_is_quick_though_the_server_is_gone(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    client.create_sampling_client(base_model="stub/model")
    server.stop()
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 3


def test_a_server_too_busy_to_finish_a_session_is_no_trouble(
    connect: Any, server: TinkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The session expires by itself, so nobody has to do anything; other failures are worth a line."""
    caplog.set_level(logging.WARNING, "tinsmith")
    client = connect(server)
    client.create_sampling_client(base_model="stub/model")
    server.script(FINISH, [Hold()])
    client.close().result(10)
    server.release()
    assert caplog.records == []

    gone = connect(server)
    gone.create_sampling_client(base_model="stub/model")
    server.script(FINISH, [Status(500)])
    gone.close().result(10)
    assert ["finishing session" in record.getMessage() for record in caplog.records] == [True]


def test_closing_twice_is_once(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    client.create_sampling_client(base_model="stub/model")
    client.close("success", "done").result(1)
    client.close()
    assert [request.body for request in server.find(FINISH)] == [{"reason": {"type": "success"}, "detail": "done"}]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (None, "success"),
        (ValueError("x"), "errored"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(), "interrupted"),
    ],
    ids=str,
)
def test_leaving_the_context_says_how_it_ended(
    connect: Any, server: TinkerServer, error: BaseException | None, reason: str
) -> None:
    def run() -> None:
        with connect(server) as client:
            client.create_sampling_client(base_model="stub/model")
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    assert [request.body["reason"] for request in server.find(FINISH)] == [{"type": reason}]


def test_an_unknown_end_is_refused(connect: Any, server: TinkerServer) -> None:
    client = connect(server)
    client.create_sampling_client(base_model="stub/model")
    with pytest.raises(ValueError, match="status: 'finished' is not one of"):
        client.close("finished")


def test_use_after_close_is_refused_clearly_and_without_a_warning(
    connect: Any, server: TinkerServer, datum: Any
) -> None:
    client = connect(server)
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    client.close()
    server.clear_requests()
    for call in (
        client.get_server_capabilities,
        lambda: client.create_lora_training_client("stub/model"),
        lambda: client.create_sampling_client(base_model="stub/model"),
        lambda: trainer.forward_backward([datum(1)], "cross_entropy"),
        lambda: trainer.optim_step(STEP),
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: client.create_rest_client().list_sessions(),
    ):
        with pytest.raises(TinkerError, match="client is closed"):
            call()
    gc.collect()
    assert server.requests == []


def test_a_training_client_outlives_the_name_of_its_service_client(server: TinkerServer, connect: Any) -> None:
    def make() -> TrainingClient:
        config = ClientConfig(base_url=server.url, api_key=server.key)
        return ServiceClient(config=config).create_lora_training_client("stub/model", rank=4)

    trainer = make()
    gc.collect()
    assert trainer.optim_step(STEP).result(10).metrics == {"step": 1.0}
    sampler = trainer.save_weights_and_get_sampling_client()
    del trainer
    gc.collect()
    assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]


def test_a_rest_client_outlives_the_name_of_its_service_client(server: TinkerServer, connect: Any) -> None:
    config = ClientConfig(base_url=server.url, api_key=server.key)
    rest = ServiceClient(config=config).create_rest_client()
    gc.collect()
    assert rest.list_sessions().result(10).sessions == []


def test_a_client_that_only_its_work_still_holds_ends_after_it(
    server: TinkerServer, connect: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    config = ClientConfig(base_url=server.url, api_key=server.key)
    for _ in range(5):
        future = ServiceClient(config=config).create_rest_client().list_sessions()
        gc.collect()
        assert future.result(10).sessions == []
        del future
    gc.collect()

    eventually(lambda: set(threading.enumerate()) <= threads, 4)
    eventually(lambda: server.open_connections == 0, 3)
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_closed_rest_client_leaves_no_thread(server: TinkerServer, connect: Any, eventually: Any) -> None:
    threads = set(threading.enumerate())
    with RestClient(base_url=server.url, api_key=server.key) as rest:
        rest.list_sessions().result(10)
    eventually(lambda: set(threading.enumerate()) <= threads, 3)
    eventually(lambda: server.open_connections == 0, 3)

"""Whole programs: interrupted, ended with work pending, forked. Each runs in a process of its own."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from support.tinker_server import Hold, TinkerServer

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

BEGIN = """
    import os, sys, time
    import tinsmith
    from tinsmith import ModelInput, SamplingParams, AdamParams, Datum
    PROMPT, PARAMS = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=2)
    DATUM = Datum(ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
"""
WAIT = (
    BEGIN
    + """
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    print("ready", flush=True)
    sampler.sample(PROMPT, 1, PARAMS).result()
"""
)
WAIT_IN_CONTEXT = (
    BEGIN
    + """
    with tinsmith.ServiceClient() as client:
        sampler = client.create_sampling_client(base_model="stub/model")
        print("ready", flush=True)
        sampler.sample(PROMPT, 1, PARAMS).result()
"""
)
WAIT_IN_ASYNCIO = (
    BEGIN
    + """
    import asyncio
    async def main():
        client = tinsmith.ServiceClient()
        sampler = await client.create_sampling_client_async(base_model="stub/model")
        print("ready", flush=True)
        await sampler.sample_async(PROMPT, 1, PARAMS)
    asyncio.run(main())
"""
)
WAIT_FOR_MODEL = (
    BEGIN
    + """
    client = tinsmith.ServiceClient()
    client.create_lora_training_client("stub/model", rank=4)
"""
)
WAIT_FOR_NOBODY = (
    BEGIN
    + """
    config = tinsmith.ClientConfig(base_url="http://no-such-host.invalid", api_key="tml-key")
    tinsmith.ServiceClient(config=config).get_server_capabilities()
"""
)


def interrupt(process: Any) -> tuple[int, str, float]:
    """(exit code, standard error, seconds it took to end)"""
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=15)
    return process.returncode, errors, time.monotonic() - started


def assert_interrupted(ended: tuple[int, str, float]) -> None:
    code, errors, seconds = ended
    assert code in (130, -signal.SIGINT), errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert errors.count("Traceback (most recent call last)") <= 2, errors
    assert seconds < 3


@pytest.mark.parametrize("program", [WAIT, WAIT_IN_CONTEXT, WAIT_IN_ASYNCIO], ids=["plain", "context", "asyncio"])
def test_ctrl_c_ends_a_wait_for_a_sample(children: Any, server: TinkerServer, program: str) -> None:
    server.pause_work()
    process = children.start(program, server)
    server.wait_for("retrieve_future", timeout_s=15)
    assert_interrupted(interrupt(process))


def test_ctrl_c_ends_a_wait_for_a_model(children: Any, server: TinkerServer) -> None:
    server.script("create_model", [Hold()])
    process = children.start(WAIT_FOR_MODEL, server)
    server.wait_for("create_model", timeout_s=15)
    assert_interrupted(interrupt(process))


def test_ctrl_c_ends_a_wait_for_a_server_that_is_not_there(children: Any, server: TinkerServer) -> None:
    process = children.start(WAIT_FOR_NOBODY, server)
    assert "http://no-such-host.invalid" in process.stderr.readline(), "the first line says what it waits for"
    assert_interrupted(interrupt(process))


def test_ctrl_c_in_a_context_finishes_the_session_as_interrupted(children: Any, server: TinkerServer) -> None:
    server.pause_work()
    process = children.start(WAIT_IN_CONTEXT, server)
    server.wait_for("retrieve_future", timeout_s=15)
    interrupt(process)
    finished = server.wait_for("sessions/.*/finish", timeout_s=3)
    assert finished[0].body["reason"] == {"type": "interrupted"}


@pytest.mark.parametrize("program", [WAIT, WAIT_IN_CONTEXT, WAIT_IN_ASYNCIO], ids=["plain", "context", "asyncio"])
def test_ctrl_c_cancels_pending_samples_on_the_server(children: Any, make_server: Any, program: str) -> None:
    server = make_server(dynamic_flags={"sample_cancel_enabled": True})
    server.pause_work()
    process = children.start(program, server)
    server.wait_for("retrieve_future", timeout_s=15)
    assert_interrupted(interrupt(process))
    assert {request.body["request_id"] for request in server.wait_for("cancel_future", timeout_s=2)} == {
        "session-0001:sample:0:0"
    }


@pytest.mark.parametrize(
    "rest",
    [
        "sampler.sample(PROMPT, 1, PARAMS)",
        "future = sampler.sample(PROMPT, 1, PARAMS); time.sleep(0.3)",
        "futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(100)]; time.sleep(0.3)",
        "trainer = client.create_lora_training_client('stub/model'); step = trainer.optim_step(AdamParams())",
        "future = sampler.sample(PROMPT, 1, PARAMS); time.sleep(0.3); client.close()",
        "future = sampler.sample(PROMPT, 1, PARAMS); del client, sampler; time.sleep(0.3)",
        "sys.exit(0)",
    ],
)
def test_a_program_that_ends_with_work_pending_ends_quietly(children: Any, server: TinkerServer, rest: str) -> None:
    program = f"""{BEGIN}
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    {rest}
    """
    server.script("asample", [Hold()] * 100)
    server.script("optim_step", [Hold()])
    assert children.run(program, server) == (0, "", "")


@pytest.mark.parametrize(
    "program",
    [
        "client = tinsmith.RestClient(); print(client.list_sessions().result(10).sessions)",
        "client = tinsmith.AdminClient(); print(client.get_audit_log().result(10).entries)",
        "client = tinsmith.ServiceClient(); print(client.create_rest_client().list_sessions().result(10).sessions)",
    ],
)
def test_a_program_that_never_closes_its_client_ends_quietly(children: Any, server: TinkerServer, program: str) -> None:
    assert children.run(f"{BEGIN}\n    {program}", server) == (0, "[]\n", "")


def test_a_program_that_fails_with_work_pending_shows_its_own_error_only(children: Any, server: TinkerServer) -> None:
    server.pause_work()
    program = f"""{BEGIN}
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    future = sampler.sample(PROMPT, 1, PARAMS)
    time.sleep(0.2)
    raise ValueError("of mine")
    """
    code, _, errors = children.run(program, server)
    assert code == 1
    assert errors.rstrip().endswith("ValueError: of mine")
    assert errors.count("Traceback") == 1


FORK = (
    BEGIN
    + """
    import gc, traceback
    def in_child(work):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                work()
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        end = time.monotonic() + 12
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return "hangs"
    def sample(client):
        sampler = client.create_sampling_client(base_model="stub/model")
        return sampler.sample(PROMPT, 1, PARAMS).result(8).sequences[0].tokens
"""
)


def test_a_client_that_was_forked_fails_at_once_and_says_why(children: Any, server: TinkerServer) -> None:
    program = f"""{FORK}
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sample(client)
    def work():
        calls = [lambda: sampler.sample(PROMPT, 1, PARAMS), lambda: trainer.optim_step(AdamParams()),
                 lambda: trainer.forward_backward([DATUM], "cross_entropy"), client.get_server_capabilities,
                 lambda: client.create_lora_training_client("stub/model")]
        for call in calls:
            started = time.monotonic()
            try:
                call()
            except tinsmith.TinkerError as error:
                print("fork" in str(error), time.monotonic() - started < 1)
    print(in_child(work))
    """
    assert children.run(program, server) == (0, "True True\n" * 5 + "0\n", "")


def test_a_new_client_works_in_a_forked_child(children: Any, server: TinkerServer) -> None:
    program = f"""{FORK}
    client = tinsmith.ServiceClient()
    print(sample(client))
    def work():
        with tinsmith.ServiceClient() as new:
            print(sample(new))
    print(in_child(work))
    print(sample(client))
    """
    assert children.run(program, server) == (0, "[6, 7]\n[6, 7]\n0\n[6, 7]\n", "")


def test_a_new_client_works_in_a_child_forked_while_samples_were_being_submitted(
    children: Any, server: TinkerServer
) -> None:
    server.script("asample", [Hold()] * 16)
    program = f"""{FORK}
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(500)]
    print("waiting", flush=True)
    sys.stdin.readline()
    def work():
        with tinsmith.ServiceClient() as new:
            print(sample(new))
    print(in_child(work))
    """
    process = children.start(program, server)
    server.wait_for("asample", 16, timeout_s=10)
    output, errors = process.communicate(timeout=18)
    assert (output, errors) == ("waiting\n[6, 7]\n0\n", "")


def test_a_child_that_drops_and_closes_what_it_inherited_does_not_disturb_the_parent(
    children: Any, server: TinkerServer
) -> None:
    program = f"""{FORK}
    client = tinsmith.ServiceClient()
    sampler = client.create_sampling_client(base_model="stub/model")
    print(sample(client))
    def work():
        global client, sampler
        client.close()
        del client, sampler
        gc.collect()
    print(in_child(work))
    print([sampler.sample(PROMPT, 1, PARAMS).result(8).sequences[0].tokens for _ in range(3)])
    client.close()
    """
    assert children.run(program, server) == (0, "[6, 7]\n0\n[[6, 7], [6, 7], [6, 7]]\n", "")
    assert len(server.find("sessions/.*/finish")) == 1, "the child did not finish its parent's session"


def test_a_child_that_exits_by_itself_is_quiet_and_leaves_the_session(children: Any, server: TinkerServer) -> None:
    program = f"""{FORK}
    client = tinsmith.ServiceClient()
    print(sample(client), flush=True)
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(sample(client))
    """
    assert children.run(program, server) == (0, "[6, 7]\n0\n[6, 7]\n", "")

"""In a notebook: an event loop runs in the main thread, and cells are run by it, with `await` at their top level.

Cells are compiled and run as IPython's kernel does it: those that await nothing run inside a callback of the loop.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import threading
from typing import Any

import pytest
from support.tinker_server import TinkerServer

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

SETUP = """
import asyncio
import tinsmith as tinker
service = tinker.ServiceClient(base_url=URL, api_key=KEY)
prompt, params = tinker.ModelInput.from_ints([1, 2, 3]), tinker.SamplingParams(max_tokens=2)
datum = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
"""


async def run_cells(names: dict[str, Any], cells: list[str]) -> None:
    for cell in cells:
        code = compile(cell, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = eval(code, names)
        if inspect.iscoroutine(value):
            await value
        await asyncio.sleep(0)


@pytest.fixture
def notebook(server: TinkerServer) -> Any:
    """Runs cells one after another; the names that they leave behind. Closes their client."""

    def run(*cells: str) -> dict[str, Any]:
        names: dict[str, Any] = {"URL": server.url, "KEY": server.key, "SERVER": server}
        try:
            asyncio.run(run_cells(names, [SETUP, *cells]))
        finally:
            if "service" in names:
                names["service"].close()
        return names

    return run


def runners() -> int:
    return sum(thread.name == "tinsmith" for thread in threading.enumerate())


def test_calls_that_wait_work_inside_the_running_loop(notebook: Any) -> None:
    names = notebook(
        "asyncio.get_running_loop()",
        "training = service.create_lora_training_client('stub/model', rank=4)",
        "passed = training.forward_backward([datum], 'cross_entropy'); stepped = training.optim_step("
        "tinker.AdamParams(learning_rate=1e-3))",
        "loss = passed.result().metrics['loss:sum']; step = stepped.result().metrics",
        "sampler = training.save_weights_and_get_sampling_client()",
        "tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens",
        "runs = [run.training_run_id for run in service.create_rest_client().iter_training_runs()]",
    )
    assert names["loss"] > 0
    assert names["step"] == {"step": 1.0}
    assert len(names["tokens"]) == 2
    assert names["runs"] == [names["training"].model_id]


def test_cells_await_at_their_top_level(notebook: Any) -> None:
    names = notebook(
        "training = await service.create_lora_training_client_async('stub/model', rank=4)",
        "passed = await training.forward_backward_async([datum], 'cross_entropy')",
        "loss = (await passed).metrics['loss:sum']",
        "sampler = await training.save_weights_and_get_sampling_client_async()",
        "many = await asyncio.gather(*(sampler.sample_async(prompt, 1, params) for _ in range(20)))",
    )
    assert names["loss"] > 0
    assert [len(one.sequences[0].tokens) for one in names["many"]] == [2] * 20


def test_a_future_of_one_cell_is_waited_for_in_another_either_way(notebook: Any) -> None:
    names = notebook(
        "sampler = service.create_sampling_client(base_model='stub/model')",
        "futures = [sampler.sample(prompt, 1, params) for _ in range(4)]",
        "first = await futures[0]",
        "second = futures[1].result(10)",
        "third = await futures[2].result_async(10)",
        "fourth = await asyncio.wait_for(asyncio.wrap_future(futures[3]), 10)",
    )
    assert [names[name].sequences[0].tokens for name in ("first", "second", "third", "fourth")] == [[6, 7]] * 4


def test_a_task_goes_on_while_other_cells_wait(notebook: Any) -> None:
    """A cell that blocks the loop delays the others' tasks, and never waits for them: there is no deadlock."""
    names = notebook(
        "sampler = service.create_sampling_client(base_model='stub/model'); SERVER.pause_work()",
        "task = asyncio.ensure_future(sampler.sample_async(prompt, 1, params))",
        "await asyncio.sleep(0.05)",
        "models = service.get_server_capabilities().supported_models",
        "SERVER.resume_work()",
        "waited = service.create_sampling_client(base_model='stub/model').sample(prompt, 1, params).result(10)",
        "result = await task",
    )
    assert names["models"]
    assert names["result"].sequences[0].tokens == names["waited"].sequences[0].tokens == [6, 7]


def test_a_wait_that_could_never_end_is_refused_at_once(notebook: Any) -> None:
    """A callback runs in the client's own thread: waiting there for that client would be waiting for oneself."""
    names = notebook(
        "sampler = service.create_sampling_client(base_model='stub/model'); told = []",
        "def look(future):\n"
        "    try:\n"
        "        sampler.sample(prompt, 1, params).result()\n"
        "    except tinker.TinkerError as error:\n"
        "        told.append(str(error))",
        "future = sampler.sample(prompt, 1, params); future.add_done_callback(look)",
        "future.result(10); await asyncio.sleep(0.05)",
    )
    assert len(names["told"]) == 1
    assert "client's own thread" in names["told"][0]


def test_an_interrupted_cell_leaves_a_client_that_works(notebook: Any) -> None:
    names = notebook(
        "sampler = service.create_sampling_client(base_model='stub/model'); SERVER.pause_work()",
        "import signal, threading, os\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "before = signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n"
        "    sampler.sample(prompt, 1, params).result()\n"
        "    interrupted = False\n"
        "except KeyboardInterrupt:\n"
        "    interrupted = True\n"
        "finally:\n"
        "    signal.signal(signal.SIGINT, before)",
        "SERVER.resume_work()",
        "after = sampler.sample(prompt, 1, params).result(10)",
    )
    assert names["interrupted"]
    assert names["after"].sequences[0].tokens == [6, 7]


def test_running_the_first_cell_again_leaves_one_thread(notebook: Any, eventually: Any) -> None:
    before = runners()
    again = SETUP + "sampler = service.create_sampling_client(base_model='stub/model')\n"
    names = notebook(*[again + "sampler.sample(prompt, 1, params).result(10)"] * 4, "import gc; gc.collect()")
    assert names["sampler"] is not None
    eventually(lambda: runners() == before)


def test_a_deadline_holds_in_a_cell(notebook: Any) -> None:
    names = notebook(
        "sampler = service.create_sampling_client(base_model='stub/model'); SERVER.pause_work()",
        "late = []\n"
        "for wait in (lambda: sampler.sample_async(prompt, 1, params), lambda: sampler.sample(prompt, 1, params)):\n"
        "    try:\n"
        "        with tinker.deadline(0.2):\n"
        "            await wait()\n"
        "    except tinker.APITimeoutError as error:\n"
        "        late.append(str(error))",
    )
    assert ["tinsmith.deadline(0.2) at <cell>:4" in text for text in names["late"]] == [True, True]

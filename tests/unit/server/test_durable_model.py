"""Journal, snapshots and replay against a reference that knows none of them: the operations applied once, in order.

Hypothesis draws what happens: passes, steps, saves, loads, losses of the engine, crashes of the server, a store that is
away, snapshots that fail. Whatever it is, results and final state are those of the plain reference.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.durable import OFTEN, begun, crash
from support.in_process import (
    BreakableStore,
    Client,
    Recorder,
    Server,
    datum,
    forward_backward,
    optim_step,
    serving,
    settled,
)

from tinsmith.engine.base import AnyJob, Done, JobFailedError, SaveState
from tinsmith.server import jobs as jobs_module
from tinsmith.server import replaying
from tinsmith.store.rows import CheckpointRow, ModelRow
from tinsmith.testing.backend import ARITHMETIC


class Flaky(Recorder):
    """Its snapshots fail while it is told so."""

    is_full = False

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if self.is_full and isinstance(job, SaveState) and job.job_id.startswith("snapshot-"):
            future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            future.set_exception(JobFailedError("the disk is full"))
            return future
        return super().submit(job, on_tokens)


class Durable(RuleBasedStateMachine):
    """One model on a server that keeps breaking, beside the list of what was asked of it."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="durable-")
        self.runner = asyncio.Runner()
        self.asked: list[tuple[str, Any]] = []
        self.promises: list[Any] = []
        self.saved: list[str] = []
        self.runner.run(self._begin())

    async def _begin(self) -> None:
        self.store = BreakableStore()
        await self.store.open()
        await self._start()
        self.ann, _, self.model = await begun(self.server)

    async def _start(self) -> None:
        self.backend = Flaky()
        self._serving = serving(Path(self.folder.name), store=self.store, backend=self.backend, **OFTEN)
        self.server: Server = await self._serving.__aenter__()

    async def _ask(self, route: str, message: dict[str, Any], what: tuple[str, Any]) -> None:
        answer = await self.ann.post(route, {**message, "model_id": self.model, "seq_id": len(self.asked) + 1})
        assert answer.status == 200, answer.body
        self.promises.append(answer)
        self.asked.append(what)

    @rule(kinds=st.lists(st.sampled_from(["forward_backward", "forward", "optim_step", "save"]), max_size=6))
    def ask(self, kinds: list[str]) -> None:
        """Without waiting for anything."""

        async def ask_all() -> None:
            for kind in kinds:
                await self._ask_for(kind, len(self.asked) % 100 + 1)

        self.runner.run(ask_all())

    @rule(tokens=st.lists(st.integers(1, 400), min_size=1, max_size=3), has_snapshots=st.booleans())
    def train(self, tokens: list[int], has_snapshots: bool) -> None:
        """Passes and steps one after another, with snapshots or into the journal only."""

        async def train_all() -> None:
            await self._get_all()
            run = self.server.services.runs.known(self.model)
            if run is not None:
                run._snapshots.cost.not_before_s = 0.0 if has_snapshots else 1e9
            for token in tokens:
                await self._ask_for("forward_backward", token)
                await self._get_all()
                await self._ask_for("optim_step", token)
                await self._get_all()

        self.runner.run(train_all())

    async def _ask_for(self, kind: str, token: int) -> None:
        name = f"state-{len(self.asked)}"
        passed = forward_backward(self.model, None, datum(5, 9, token))
        rate = 0.1 / token
        message, value = {
            "forward_backward": (passed, token),
            "forward": ({"forward_input": passed["forward_backward_input"]}, token),
            "optim_step": (optim_step(self.model, None, learning_rate=rate), rate),
            "save": ({"path": name}, name),
        }[kind]
        await self._ask("save_weights" if kind == "save" else kind, message, (kind, value))

    @precondition(lambda self: any(kind == "save" for kind, _ in self.asked))
    @rule(data=st.data(), optimizer=st.booleans())
    def ask_for_a_load(self, data: Any, optimizer: bool) -> None:
        self.runner.run(self._get_all())  # a path can be loaded once it is there
        name = data.draw(st.sampled_from([name for kind, name in self.asked if kind == "save"]))
        message = {"path": f"tinker://{self.model}/weights/{name}", "optimizer": optimizer}
        self.runner.run(self._ask("load_weights", message, ("load", (name, optimizer))))

    @rule(turns=st.integers(0, 40), what=st.sampled_from(["engine", "server", "store", "disk"]))
    def break_something(self, turns: int, what: str) -> None:
        async def after_a_while() -> None:
            await settled(turns)
            await {"engine": self._lose, "server": self._crash, "store": self._away, "disk": self._full}[what]()

        self.runner.run(after_a_while())

    async def _lose(self) -> None:
        self.backend.lose()

    async def _crash(self) -> None:
        crash(self.server)
        self.backend.lose()
        await self._serving.__aexit__(None, None, None)
        await self._start()
        self.ann = Client(self.server, self.ann.key)

    async def _away(self) -> None:
        self.store.is_down = True
        await settled(30)
        self.store.is_down = False

    async def _full(self) -> None:
        self.backend.is_full = not self.backend.is_full

    async def _get_all(self) -> list[bytes]:
        async with asyncio.timeout(20):
            return [(await self.ann.result(promise)).body for promise in self.promises]

    async def _end(self) -> tuple[list[bytes], str]:
        name = "the-end"
        await self._ask("save_weights", {"path": name}, ("save", name))
        bodies = await self._get_all()
        path = f"tinker://{self.model}/weights/{name}"
        [row] = await self.server.rows(CheckpointRow, "checkpoint", path=path)
        [model] = await self.server.rows(ModelRow, "model", model_id=self.model)
        assert model.fault is None
        await self._serving.__aexit__(None, None, None)
        await self.store.close()
        return bodies, row.digest

    def teardown(self) -> None:
        if not hasattr(self, "runner"):
            return
        try:
            print(
                "SNAP",
                self.server.services.metrics.snapshots.labels("kept")._value.get(),
                self.server.services.metrics.replayed._value.get(),
                len(self.asked),
            )
            bodies, digest = self.runner.run(self._end())
            wanted, end = self.runner.run(reference(self.asked))
            assert digest == end
            for (kind, _), body, expected in zip(self.asked, bodies, wanted, strict=True):
                assert kind in ("save", "load") or body == expected
        finally:
            self.runner.close()
            self.folder.cleanup()


async def reference(asked: list[tuple[str, Any]]) -> tuple[list[bytes], str]:
    """The same on a server that nothing happens to, without snapshots."""
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        async with serving(Path(folder), backend=Recorder([ARITHMETIC])) as server:
            ann, _, model = await begun(server)
            bodies = []
            for seq, (kind, value) in enumerate(asked, 1):
                bodies.append((await ann.result(await _ask_plainly(ann, model, seq, kind, value))).body)
            path = f"tinker://{model}/weights/{asked[-1][1]}"
            [row] = await server.rows(CheckpointRow, "checkpoint", path=path)
            return bodies, row.digest


async def _ask_plainly(ann: Client, model: str, seq: int, kind: str, value: Any) -> Any:
    if kind in ("forward", "forward_backward"):
        message = forward_backward(model, seq, datum(5, 9, value))
        if kind == "forward":
            message["forward_input"] = message.pop("forward_backward_input")
        return await ann.post(kind, message)
    if kind == "optim_step":
        return await ann.post(kind, optim_step(model, seq, learning_rate=value))
    if kind == "save":
        return await ann.post("save_weights", {"model_id": model, "seq_id": seq, "path": value})
    name, optimizer = value
    message = {"path": f"tinker://{model}/weights/{name}", "optimizer": optimizer, "model_id": model, "seq_id": seq}
    return await ann.post("load_weights", message)


@pytest.fixture(autouse=True, scope="module")
def _no_pauses() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "RETRY_S", (0.0, 0.0, 0.001))
        patch.setattr(jobs_module, "STORE_RETRY_S", (0.0, 0.001))
        yield


Durable.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestDurable = Durable.TestCase

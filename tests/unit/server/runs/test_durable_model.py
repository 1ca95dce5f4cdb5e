"""Journal, snapshots and replay against a reference that needs none of them: the same program with nothing in its way.

Hypothesis draws a program (two models that are trained, saved, loaded and sampled from, with much of it outstanding at
once) and what happens meanwhile: the engine is lost, the server dies, the store is away, snapshots fail. Faults are
counted in points: each read and write of the store has one before and one behind it, each job of the backend one before
it begins, so that a loss can hit every await, those of a restore included. Whatever happens, every request has the
result that it has in the reference, every save holds the same weights, and no operation runs twice or out of turn.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from support.durable import OFTEN, crash
from support.in_process import (
    Answer,
    BreakableStore,
    Client,
    Recorder,
    Server,
    create_model,
    datum,
    forward_backward,
    optim_step,
    sample,
    serving,
    settled,
)

from tinsmith.engine.protocol import AnyJob, CreateModel, Done, JobFailedError, Sample, SaveState
from tinsmith.server.jobs import lifecycle as jobs_module
from tinsmith.server.jobs import samples as samples_module
from tinsmith.server.runs import replay
from tinsmith.server.runs.replay import changes_state
from tinsmith.store.base import Statement, Value
from tinsmith.store.rows import CheckpointRow, ModelRow

EXAMPLES = 60
TURNS = 12
"""Of the loop, that a job takes: enough for others to be handed over meanwhile."""
AWAY_POINTS = 8
"""How long the store is away: so many uses of it fail."""

Kind = Literal["forward_backward", "forward", "optim_step", "save", "load", "freeze", "sample"]
What = Literal["engine", "server", "store", "disk"]


@dataclass(frozen=True)
class Op:
    """One request of the program; `waits`: not before everything so far has its result."""

    kind: Kind
    model: int
    value: int
    waits: bool


@dataclass(frozen=True)
class Fault:
    """After so many more points; `again`: and once more, after so many points of the restore that follows."""

    after: int
    what: What
    again: int | None


PHRASES: dict[str, list[Kind]] = {
    "train": ["forward_backward", "optim_step"],
    "gather": ["forward_backward", "forward_backward", "forward", "optim_step"],
    "detour": ["save", "forward_backward", "optim_step", "load", "forward_backward", "optim_step"],
    "draw": ["freeze", "sample"],
    "load": ["load"],
    "sample": ["sample"],
    "save": ["save"],
}


@st.composite
def phrases(draw: st.DrawFn) -> list[Op]:
    """A few requests of one model that belong together."""
    name = draw(st.sampled_from(["train", "train", "gather", "detour", "detour", "draw", "load", "sample", "save"]))
    model = draw(st.sampled_from([0, 0, 1]))
    waits = draw(st.booleans())  # so that some is finished when a fault comes, and some is not
    return [Op(kind, model, draw(st.integers(1, 40)), waits and not index) for index, kind in enumerate(PHRASES[name])]


def programs() -> st.SearchStrategy[list[Op]]:
    return st.lists(phrases(), min_size=2, max_size=8).map(lambda lists: [op for ops in lists for op in ops])


def fault_lists() -> st.SearchStrategy[list[Fault]]:
    """Losses above all, often one upon another."""
    whats: list[What] = ["engine"] * 6 + ["server", "store", "disk"]
    after = st.one_of(st.integers(1, 6), st.integers(5, 60), st.integers(30, 120))
    again = st.one_of(st.none(), st.integers(1, 8))
    return st.lists(st.builds(Fault, after=after, what=st.sampled_from(whats), again=again), min_size=2, max_size=10)


TRAINING = [Op(kind, 0, 7, index == 2) for index, kind in enumerate([*PHRASES["train"], *PHRASES["detour"]] * 2)]
KINDS: tuple[What, ...] = ("server", "engine", "store", "engine", "disk")
EVERYTHING = [Fault(20, what, 3) for what in KINDS]


class Points:
    """Counts points, and has the next fault come at its own."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = list(faults)
        self._left = faults[0].after if faults else 0
        self._again: int | None = None
        self.is_open = False
        self.act: Callable[[What], None] = lambda what: None
        self.is_restoring: Callable[[], bool] = lambda: False

    def __call__(self) -> None:
        if not self.is_open:
            return
        if self._again is not None and self.is_restoring():
            self._again -= 1
            if self._again == 0:
                self._again = None
                self.act("engine")
        if not self._faults:
            return
        self._left -= 1
        if self._left <= 0:
            fault = self._faults.pop(0)
            self._left = self._faults[0].after if self._faults else 0
            self._again = fault.again
            self.act(fault.what)


class PointedStore(BreakableStore):
    """A store with a point before and behind each use."""

    def __init__(self, points: Points) -> None:
        super().__init__()
        self._points = points
        self.away = 0

    def _use(self) -> None:
        self._points()
        self.is_down = self.away > 0
        self.away = max(0, self.away - 1)

    async def write(self, *statements: Statement) -> int:
        self._use()
        await asyncio.sleep(0)
        count = await super().write(*statements)
        self._points()
        return count

    async def read(self, row_type: Any, name: str, /, **parameters: Value) -> list[Any]:
        self._use()
        await asyncio.sleep(0)
        rows = await super().read(row_type, name, **parameters)
        self._points()
        return rows


class PointedBackend(Recorder):
    """A backend with a point before each job; its snapshots fail while it is told so."""

    def __init__(self, points: Points) -> None:
        super().__init__(hold=self._hold_job)
        self._points = points
        self.is_full = False
        self.done: list[AnyJob] = []
        """What was carried out, in order."""

    async def _hold_job(self, job: AnyJob) -> None:
        await settled(TURNS)
        self._points()

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if self.is_full and isinstance(job, SaveState) and job.job_id.startswith("snapshot-"):
            future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            future.set_exception(JobFailedError("the disk is full"))
            return future
        return super().submit(job, on_tokens)

    def _end(self, entry: Any, result: Done | Exception) -> None:
        if isinstance(result, Done):
            self.done.append(entry.job)
        super()._end(entry, result)


@dataclass
class Came:
    """What a program came to."""

    results: list[Any]
    digests: list[str]
    """Of its saves, and of each model at the end."""


class World:
    """A server, the client of a program, and what happens to them."""

    def __init__(self, folder: Path, program: Sequence[Op], faults: Sequence[Fault], has_snapshots: bool) -> None:
        self._folder = folder
        self._program = [*program, *(Op("save", model, 0, False) for model in (0, 1))]
        self._settings: dict[str, Any] = {**OFTEN, "max_snapshot_share": 1e9} if has_snapshots else {}
        self._points = Points(faults)
        self._points.act, self._points.is_restoring = self._happen, self._is_restoring
        self._crashing = asyncio.Event()
        self._backends: list[PointedBackend] = []
        self.models: list[str] = []
        self._promises: dict[int, str] = {}
        self.stats: Counter[str] = Counter()

    async def play(self) -> Came:
        """The program from its first request to its last result, through everything."""
        self.store = PointedStore(self._points)
        await self.store.open()
        await self._start()
        self._ann = await self.server.client()
        self._session = await self._ann.session()
        self._points.is_open = True
        performing = asyncio.create_task(self._perform())
        while not await self._ended(performing):
            performing.cancel()
            await asyncio.gather(performing, return_exceptions=True)
            await self._restart()
            performing = asyncio.create_task(self._perform())
        came = performing.result()
        self._points.is_open = False
        await self._check()
        await self._serving.__aexit__(None, None, None)
        await self.store.close()
        return came

    async def _start(self) -> None:
        self.backend = PointedBackend(self._points)
        self._backends.append(self.backend)
        self._serving = serving(self._folder, store=self.store, backend=self.backend, **self._settings)
        self.server: Server = await self._serving.__aenter__()

    async def _ended(self, performing: asyncio.Task[Came]) -> bool:
        """Whether the program came to its end; else the server is to die."""
        crashing = asyncio.create_task(self._crashing.wait())
        await asyncio.wait([performing, crashing], return_when=asyncio.FIRST_COMPLETED)
        crashing.cancel()
        return performing.done()

    # faults

    def _is_restoring(self) -> bool:
        return any(run._restoring is not None for run in self.server.services.runs.all())

    def _happen(self, what: What) -> None:
        self.stats[f"{what}{' during a restore' if self._is_restoring() else ''}"] += 1
        self.stats["with work under way"] += bool(self.backend._entries)
        if what == "engine":
            self.backend.lose()
        elif what == "server":
            self._crashing.set()
        elif what == "store":
            self.store.away = AWAY_POINTS
        else:
            self.backend.is_full = not self.backend.is_full

    async def _restart(self) -> None:
        self._points.is_open = False
        crash(self.server)
        self.backend.lose()
        self.store.away, self.store.is_down = 0, False
        await self._serving.__aexit__(None, None, None)
        self._crashing.clear()
        await self._start()
        self._ann = Client(self.server, self._ann.key)
        self._points.is_open = True

    # the program

    async def _perform(self) -> Came:
        """Send what has not been acknowledged, as a client does after a broken connection, and get all results."""
        for number in (0, 1):
            message = create_model(self._session, number)
            answer = await self._post("create_model", message)
            self.models[number:] = [answer.json["model_id"]]
            await self._result(answer.json["request_id"])
        for index, op in enumerate(self._program):
            if index not in self._promises:
                self._promises[index] = await self._ask(index, op)
        results = [await self._result(self._promises[index]) for index in range(len(self._program))]
        return Came(*await self._compared(results))

    async def _ask(self, index: int, op: Op) -> str:
        if op.waits or op.kind in ("load", "sample"):  # a path can be used once it is there
            for request_id in self._promises.values():
                await self._result(request_id)
        if op.kind == "sample":
            return await self._ask_sample(index, op)
        model = self.models[op.model]
        seq = 1 + sum(other.model == op.model and other.kind != "sample" for other in self._program[:index])
        route, message = self._message(index, op, model)
        answer = await self._post(route, {**message, "model_id": model, "seq_id": seq})
        request_id: str = answer.json["request_id"]
        return request_id

    def _message(self, index: int, op: Op, model: str) -> tuple[str, dict[str, Any]]:
        passed = forward_backward(model, None, datum(5, 9, op.value))
        if op.kind == "load" and (path := self._path("save", index, op)) is not None:
            return "load_weights", {"path": path, "optimizer": op.value % 2 == 0}
        if op.kind in ("save", "freeze"):
            return ("save_weights" if op.kind == "save" else "save_weights_for_sampler"), {"path": f"{op.kind}-{index}"}
        if op.kind == "optim_step":
            return "optim_step", optim_step(model, None, learning_rate=0.1 / op.value)
        if op.kind == "forward":
            return "forward", {"forward_input": passed["forward_backward_input"]}
        return "forward_backward", passed

    def _path(self, kind: Kind, index: int, op: Op) -> str | None:
        """One of the paths that the model has so far."""
        folder = "weights" if kind == "save" else "sampler_weights"
        before = [
            f"tinker://{self.models[op.model]}/{folder}/{kind}-{number}"
            for number, other in enumerate(self._program[:index])
            if other.kind == kind and other.model == op.model
        ]
        return before[op.value % len(before)] if before else None

    async def _ask_sample(self, index: int, op: Op) -> str:
        path = self._path("freeze", index, op)
        source = {"base_model": create_model("")["base_model"]} if path is None else {"model_path": path}
        named = {"session_id": self._session, "sampling_session_seq_id": index, **source}
        sampler = (await self._post("create_sampling_session", named)).json["sampling_session_id"]
        params = {"max_tokens": 4, "stop": [], "seed": op.value}
        request_id: str = (await self._post("asample", sample(sampler, 1, sampling_params=params))).json["request_id"]
        return request_id

    async def _post(self, route: str, message: dict[str, Any]) -> Answer:
        while True:
            answer = await self._ann.post(route, message)
            if answer.status == 200:
                return answer
            assert (answer.status, self.stats["store"] + self.stats["store during a restore"] > 0) == (503, True), (
                answer.body
            )
            await asyncio.sleep(0)

    async def _result(self, request_id: str) -> Any:
        while True:
            answer = await self._ann.poll(request_id)
            if answer.status == 200:
                assert "error" not in answer.json, answer.body
                return answer.json
            assert answer.status in (408, 503), answer.body
            await asyncio.sleep(0)

    async def _compared(self, results: list[Any]) -> tuple[list[Any], list[str]]:
        """Results without the names of things, and the digests of what was saved."""
        digests = []
        for index, op in enumerate(self._program):
            if op.kind in ("save", "freeze"):
                digests.append(await self._digest(results[index]["path"]))
        named = ("save", "freeze", "load")
        return [None if op.kind in named else body for op, body in zip(self._program, results, strict=True)], digests

    async def _digest(self, path: str) -> str:
        rows = await replay.for_sure(lambda: self.server.rows(CheckpointRow, "checkpoint", path=path), "reading")
        return str(rows[0].digest)

    # what must hold beside equal results

    async def _check(self) -> None:
        """No run is marked, and no engine applied an operation twice or out of turn."""
        self.store.away, self.store.is_down = 0, False
        for model in self.models:
            [row] = await self.server.rows(ModelRow, "model", model_id=model)
            assert row.fault is None
        order = {request_id: index for index, request_id in self._promises.items()}
        for backend in self._backends:
            last: dict[str, int] = {}
            for job in backend.done:
                if isinstance(job, CreateModel):
                    last[job.model_id] = -1
                elif not isinstance(job, Sample) and changes_state(job):
                    index = order[job.job_id.removeprefix("replay-")]
                    assert index > last[job.model_id], "an operation was applied twice, or out of turn"
                    last[job.model_id] = index
                self.stats["operations replayed"] += job.job_id.startswith("replay-")
        kept = self.server.services.metrics.snapshots.labels("kept")
        self.stats["snapshots"] += int(kept._value.get())


def played(program: Sequence[Op], faults: Sequence[Fault], has_snapshots: bool) -> tuple[Came, Counter[str]]:
    async def play(folder: Path) -> tuple[Came, Counter[str]]:
        world = World(folder, program, faults, has_snapshots)
        async with asyncio.timeout(60):
            return await world.play(), world.stats

    with tempfile.TemporaryDirectory(prefix="durable-") as folder:
        return asyncio.run(play(Path(folder)))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))
    monkeypatch.setattr(jobs_module, "STORE_RETRY_S", (0.0, 0.001))
    monkeypatch.setattr(samples_module, "RETRY_S", 0.001)


def test_whatever_happens_a_program_gets_what_it_would_have_got() -> None:
    tried: Counter[str] = Counter()

    @settings(  # programs are short, and to shrink one takes minutes: a failure shows it as it was drawn
        max_examples=EXAMPLES,
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=programs(), faults=fault_lists(), has_snapshots=st.booleans())
    @example(program=TRAINING, faults=EVERYTHING, has_snapshots=True)
    @example(program=TRAINING, faults=EVERYTHING[::-1], has_snapshots=False)
    def check(program: list[Op], faults: list[Fault], has_snapshots: bool) -> None:
        came, stats = played(program, faults, has_snapshots)
        expected, _ = played(program, (), False)
        tried.update(stats)
        assert came.digests == expected.digests
        for op, got, wanted in zip(program, came.results, expected.results, strict=False):
            assert msgspec.json.encode(got) == msgspec.json.encode(wanted), op

    check()
    claimed = ["engine", "engine during a restore", "with work under way", "operations replayed"]
    assert all(tried[name] > EXAMPLES / 10 for name in claimed), tried
    assert all(tried[name] for name in ("server", "store", "disk", "snapshots")), tried

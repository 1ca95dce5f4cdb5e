"""The torch executor, called directly: jobs in, results out. What all backends promise is in tests/contract."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.backends import torch_tiny_spec
from support.cards import card_of
from support.checkpoint_files import verify_checkpoint
from support.failing_disk import FailingDisk
from support.general_models import general_executor
from support.jobs import Jobs, datum
from support.tiny_engine import NAME, bodies, executor, finish, sampled, torch_as_it_was, train

from tinsmith.engine.checkpoints.durable_files import tidy
from tinsmith.engine.checkpoints.format import write_checkpoint
from tinsmith.engine.ipc import StreamedTokens
from tinsmith.engine.protocol import AnyJob, Created, Done, JobFailedError, Sample
from tinsmith.engine.training import adamw, adapter_pool, trainer
from tinsmith.engine.worker import torch_executor
from tinsmith.engine.worker.executor import Beside, StartError, StateInDoubtError
from tinsmith.engine.worker.startup import make
from tinsmith.engine.worker.torch_executor import TorchExecutor
from tinsmith.errors import InvalidInputError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import decode_output
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.messages.training import CreateCustomLossRequest, CustomLossGraph, CustomLossInput, CustomLossNode
from tinsmith.wire.rules.optim_metrics import OPTIM_METRICS

PROBE = [5, 9, 2, 33, 7]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """The executor sets up its process; this one has others in it."""
    with torch_as_it_was():
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


def test_models_that_go_to_disk_and_back_are_the_same_to_the_last_bit(
    home: Path, request: pytest.FixtureRequest
) -> None:
    alone = [bodies(executor(home), [jobs.create(seed=n), *jobs.steps(3, seed=n)]) for n, jobs in _makers()]
    engine = executor(home, adapter_bytes=1)
    request.addfinalizer(engine.close)
    lists = [[jobs.create(seed=n), *jobs.steps(3, seed=n)] for n, jobs in _makers()]
    mixed: list[list[bytes]] = [[], [], []]
    for row in zip(*lists, strict=True):
        for n, job in enumerate(row):
            mixed[n].append(train(engine, job).body)
            assert len(engine._adapters.in_memory) == 1
    assert mixed == alone


def _makers() -> list[tuple[int, Jobs]]:
    return [(n, Jobs(NAME, f"model-{n}")) for n in range(3)]


def test_a_pass_under_way_keeps_its_model_in_memory(home: Path, request: pytest.FixtureRequest) -> None:
    engine = executor(home, adapter_bytes=1, micro_batch_tokens=4)
    request.addfinalizer(engine.close)
    first, second = Jobs(NAME, "first"), Jobs(NAME, "second")
    expected = bodies(executor(home, micro_batch_tokens=4), _two_passes(Jobs(NAME)))
    create, *passes = _two_passes(first)
    train(engine, create)
    train(engine, second.create())
    assert not isinstance(passes[0], Sample)
    steps = engine.train(passes[0])
    next(steps)
    train(engine, second.forward_backward(datum(PROBE)))
    assert [finish(steps).body, *bodies(engine, passes[1:])] == expected[1:]


def _two_passes(jobs: Jobs) -> list[AnyJob]:
    return [jobs.create(), jobs.forward_backward(datum(PROBE), datum(PROBE[:3])), *jobs.steps(1)]


def test_micro_batches_are_steps(home: Path) -> None:
    engine = executor(home, micro_batch_tokens=4)
    jobs = Jobs(NAME)
    train(engine, jobs.create())
    steps = list(engine.train(jobs.forward_backward(*[datum([1, 2, 3])] * 5)))
    assert len(steps) == 4


@pytest.mark.parametrize("make_executor", [executor, general_executor])
def test_an_uploaded_loss_is_computed_and_a_wrong_one_refused(
    tmp_path: Path, make_executor: Callable[[Path], TorchExecutor]
) -> None:
    engine = make_executor(tmp_path)
    jobs = Jobs(NAME)
    plain = decode_output(bodies(engine, [jobs.create(), jobs.forward(datum(PROBE))])[1])
    nodes = [
        CustomLossNode(op="placeholder", name="logprobs", target="logprobs"),
        CustomLossNode(op="call_method", name="total", target="sum", args=[{"ref": "logprobs"}]),
        CustomLossNode(op="call_function", name="loss", target="operator.neg", args=[{"ref": "total"}]),
        CustomLossNode(op="output", name="output", target="output", args=[{"tuple": [{"ref": "loss"}, {"dict": {}}]}]),
    ]
    upload = CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="negative sum",
        inputs=[CustomLossInput(name="logprobs", rank=1)],
        graph=CustomLossGraph(nodes=nodes),
    )
    job = jobs.forward_backward(datum(PROBE), loss_fn="custom", loss_fn_config={"loss_id": "l"})
    job = msgspec.structs.replace(job, custom_loss=json_codec.encode(upload))
    output = decode_output(train(engine, job).body)
    assert output.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-5)
    wrong = msgspec.structs.replace(nodes[1], target="backward")
    bad = msgspec.structs.replace(upload, graph=CustomLossGraph(nodes=[nodes[0], wrong, *nodes[2:]]))
    with pytest.raises(JobFailedError) as caught:
        train(engine, msgspec.structs.replace(job, custom_loss=json_codec.encode(bad)))
    assert caught.value.category == "user"


def test_frozen_adapters_are_forgotten_and_read_again(home: Path, tmp_path: Path) -> None:
    engine = executor(home, sampler_adapter_bytes=1)
    jobs = Jobs(NAME)
    train(engine, jobs.create())
    drawn = {}
    for n in range(2):
        bodies(engine, [*jobs.steps(2, seed=n), jobs.save(tmp_path / str(n), optimizer=False)])
    for n in (0, 1, 0, 1):
        job = jobs.sample(PROBE, directory=tmp_path / str(n), key=str(n), max_tokens=8, stop=[], seed=4)
        done = sampled(engine, job)[-1].done
        assert drawn.setdefault(n, done.body) == done.body
        assert engine._samples.adapters.names == [(job.tenant, str(n))]
    assert drawn[0] != drawn[1]


def test_streamed_samples_say_why_they_ended(home: Path) -> None:
    events = sampled(executor(home), Jobs(NAME).sample(PROBE, max_tokens=3, stop=[], num_samples=2), stream=True)
    assert [event.event.stop_reason for event in events[:-1] if isinstance(event, StreamedTokens)] == [None] * 6 + [
        "length"
    ] * 2
    done = events[-1].done
    assert done.usage.sampled == 6
    assert done.device_s > 0
    assert [len(row.tokens) for row in decode_response(done.body).sequences] == [3, 3]


def test_samples_of_tenants_that_sit_out_do_not_move(home: Path) -> None:
    engine = executor(home)
    mine, yours = Jobs(NAME, tenant="mine"), Jobs(NAME, tenant="yours")
    engine.add_sample(mine.sample(PROBE, max_tokens=2, stop=[]), False)
    engine.add_sample(yours.sample(PROBE, max_tokens=2, stop=[]), False)
    finished = []
    for _ in range(4):
        step = engine.step(frozenset({"yours"}))
        assert set(step.tokens) <= {"yours"}
        finished += [event.job_id for event in step.events]
    assert finished == [yours.last_id]
    engine.cancel_sample(mine.last_id)
    assert engine.step(frozenset({"mine", "yours"})).events == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source": "/nowhere/at/all"}, "nowhere"),
        ({"dtype": "float64"}, "dtype"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_an_engine_that_cannot_start_says_why(home: Path, change: dict[str, Any], text: str) -> None:
    options = torch_tiny_spec(NAME, home, seed=3).options
    with pytest.raises(StartError, match=text):
        make({**options, **change})


def test_a_step_on_gradients_that_are_not_finite_changes_nothing(home: Path) -> None:
    engine = executor(home)
    jobs = Jobs(NAME)
    before = bodies(engine, [jobs.create(), *jobs.steps(1), jobs.forward(datum(PROBE))])[-1]
    with engine._adapters.use(jobs.model_id) as model:
        next(iter(model.adapter.gradients().values())).fill_(float("nan"))
    with pytest.raises(JobFailedError, match="NaN or infinite") as caught:
        train(engine, jobs.optim_step())
    assert caught.value.category == "user"
    assert train(engine, jobs.forward(datum(PROBE))).body == before


def test_a_card_needs_no_torch_and_agrees_with_the_engine(home: Path) -> None:
    spec = torch_tiny_spec(NAME, home, seed=3)
    described = executor(home).describe()
    assert described == spec.card
    program = "import sys, tinsmith.engine.worker.startup; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(InvalidInputError, match=r"config\.json cannot be read"):
        card_of(NAME, home / "nothing")


def test_waiting_threads_sleep_soon_unless_the_user_says_otherwise() -> None:
    program = (
        "import os;"
        "from tinsmith.engine.worker.startup import TorchOptions, prepare;"
        "from tinsmith.engine.protocol import ModelCard;"
        "card = ModelCard(name='x', vocab_size=8, max_context_length=8);"
        "prepare(TorchOptions(card=card, source='', cache_dir='', dtype='float32', threads=3));"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'], os.environ['KMP_BLOCKTIME'])"
    )

    def told(**environment: str) -> str:
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
        }
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env={**inherited, **environment}, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert told() == "3 20000 1"
    assert told(GOMP_SPINCOUNT="7") == "3 7 1"


def test_want_of_memory_fails_the_job_and_leaves_the_model_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, untouched = executor(home), executor(home)
    jobs, others = Jobs(NAME), Jobs(NAME)
    train(engine, jobs.create())
    train(untouched, others.create())
    too_much = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    for error in (too_much, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):

        def fail(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as full:
            full.setattr(trainer._RequestRun, "batch", fail)
            with pytest.raises(JobFailedError, match="does not have enough memory for this") as caught:
                train(engine, jobs.forward_backward(datum(PROBE)))
            assert caught.value.category == "server"
    assert bodies(engine, jobs.steps(2)) == bodies(untouched, others.steps(2))


def test_other_failures_are_not_called_want_of_memory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes differ")

    engine, jobs = executor(home), Jobs(NAME)
    train(engine, jobs.create())
    monkeypatch.setattr(trainer._RequestRun, "batch", fail)
    with pytest.raises(RuntimeError, match="shapes differ"):
        train(engine, jobs.forward_backward(datum(PROBE)))


def test_a_step_that_fails_half_way_leaves_its_model_in_doubt(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, jobs = executor(home), Jobs(NAME)
    train(engine, jobs.create())
    train(engine, jobs.forward_backward(datum(PROBE)))
    with engine._adapters.use(jobs.model_id) as model:
        tensors = len(model.adapter.parameters())
    updates = []

    def fail(param: torch.Tensor, *_: Any) -> None:
        updates.append(param)
        if len(updates) == tensors + 3:  # the first of each was a try
            raise MemoryError

    monkeypatch.setattr(adamw, "_update", fail)
    with pytest.raises(StateInDoubtError, match="halfway: MemoryError"):
        train(engine, jobs.optim_step())


@pytest.mark.parametrize("beside", [False, True], ids=["at-once", "beside"])
def test_a_disk_that_fails_at_any_point_of_a_save_harms_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """Snapshots are saves: whatever step fails, the model goes on to the same bits, and the name stays free."""
    engine, jobs = executor(home), Jobs(NAME)
    bodies(engine, [jobs.create(), *jobs.steps(1)])
    failures: list[str] = []
    for number in range(1000):
        disk = FailingDisk(fails_at=number, code=(errno.ENOSPC, errno.EIO, errno.EROFS)[number % 3])
        with monkeypatch.context() as broken:
            broken.setattr(torch_executor, "write_checkpoint", partial(write_checkpoint, disk=disk))
            try:
                train(engine, jobs.save(tmp_path / "snapshot", beside=beside))
                break
            except JobFailedError as error:
                failures.append(str(error))
            assert not (tmp_path / "snapshot").exists()
    assert {"write", "fsync", "rename"} <= set(disk.steps)
    assert len(failures) >= 10
    assert all("was not saved, and no files were left behind" in failure for failure in failures)
    verify_checkpoint(tmp_path / "snapshot")
    tidy(tmp_path)
    untouched, others = executor(home), Jobs(NAME)
    bodies(untouched, [others.create(), *others.steps(1)])
    train(untouched, others.save(tmp_path / "other"))
    for path in (tmp_path / "other").iterdir():
        assert path.read_bytes() == (tmp_path / "snapshot" / path.name).read_bytes()
    assert bodies(engine, jobs.steps(2, seed=4)) == bodies(untouched, others.steps(2, seed=4))


def test_what_is_left_to_a_thread_is_what_there_was_when_it_was_asked_for(home: Path, tmp_path: Path) -> None:
    engine, jobs = executor(home), Jobs(NAME)
    bodies(engine, [jobs.create(), *jobs.steps(1)])
    train(engine, jobs.save(tmp_path / "plain"))
    with pytest.raises(StopIteration) as ended:
        next(engine.train(jobs.save(tmp_path / "beside", beside=True)))
    ending = ended.value.value
    assert isinstance(ending, Beside)
    bodies(engine, [*jobs.steps(2, seed=4), jobs.unload()])
    assert not (tmp_path / "beside").exists()
    writer = threading.Thread(target=ending.finish)
    writer.start()
    writer.join()
    for path in (tmp_path / "plain").iterdir():
        assert path.read_bytes() == (tmp_path / "beside" / path.name).read_bytes()


def test_models_that_cannot_go_to_disk_stay_in_memory(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    alone = [bodies(executor(home), [jobs.create(seed=n), *jobs.steps(1, seed=n)]) for n, jobs in _makers()]
    engine = executor(home, adapter_bytes=1)
    monkeypatch.setattr(adapter_pool.tempfile, "TemporaryFile", full)
    mixed = [bodies(engine, [jobs.create(seed=n), *jobs.steps(1, seed=n)]) for n, jobs in _makers()]
    assert mixed == alone
    assert len(engine._adapters.in_memory) == 3
    assert "stays in memory because it cannot be written to disk: [Errno 28]" in caplog.text


def test_an_engine_says_what_its_bits_depend_on(home: Path) -> None:
    def told(**options: Any) -> dict[str, str]:
        made = train(executor(home, **options), Jobs(NAME).create())
        return msgspec.json.decode(made.body, type=Created).fingerprint

    first = told()
    kinds = {"device", "cpu", "isa", "threads", "torch", "dtype", "products", "micro_batch_tokens", "base_bytes"}
    assert set(first) == kinds
    assert told() == first
    assert (first["threads"], told(threads=2)["threads"]) == ("1", "2")
    assert told(micro_batch_tokens=7)["micro_batch_tokens"] == "7"
    assert first["dtype"] == "float32"
    assert first["torch"] == torch.__version__


def test_results_of_training_hold_nothing_that_a_replay_could_change(home: Path) -> None:
    """They are compared by digest: no clock, no counter of the engine, and nothing of what else is going on."""
    engine, jobs = executor(home), Jobs(NAME)
    train(engine, jobs.create())
    output = decode_output(train(engine, jobs.forward_backward(datum(PROBE))).body)
    assert set(output.metrics) == {"loss:sum", "tokens:sum", "weights:sum", "weights:min"}
    assert [set(row) for row in output.loss_fn_outputs] == [{"logprobs"}]
    step = msgspec.json.decode(train(engine, jobs.optim_step()).body)
    assert set(step["metrics"]) == set(OPTIM_METRICS)


def test_load_from_others_does_not_change_a_bit(home: Path, tmp_path: Path) -> None:
    """Three tenants and their samples at once, micro-batch by micro-batch, in a drawn order: each gets what it gets
    alone, saved bytes included."""
    alone = []
    for number in range(3):
        engine, jobs = executor(home, micro_batch_tokens=4), Jobs(NAME, f"m{number}")
        alone.append(bodies(engine, [jobs.create(), *_long_steps(jobs, number)]))
        train(engine, jobs.save(tmp_path / f"alone-{number}"))
    engine = executor(home, micro_batch_tokens=4)
    makers = [Jobs(NAME, f"m{number}") for number in range(3)]
    lines = [[jobs.create(), *_long_steps(jobs, number)] for number, jobs in enumerate(makers)]
    engine.add_sample(Jobs(NAME).sample(PROBE, max_tokens=64, seed=1), False)
    drawn, mixed = random.Random(5), [[] for _ in makers]  # type: ignore[var-annotated]
    running: dict[int, Generator[None, None, Done]] = {}
    while any(lines) or running:
        number = drawn.choice([n for n in range(3) if lines[n] or n in running])
        if number not in running:
            running[number] = engine.train(lines[number].pop(0))  # type: ignore[arg-type]
        try:
            next(running[number])
        except StopIteration as end:
            del running[number]
            mixed[number].append(end.value.body)
        engine.step(frozenset({"tenant-1"}))
    assert mixed == alone
    for number, jobs in enumerate(makers):
        train(engine, jobs.save(tmp_path / f"mixed-{number}"))
        for path in (tmp_path / f"alone-{number}").iterdir():
            assert path.read_bytes() == (tmp_path / f"mixed-{number}" / path.name).read_bytes()


def _long_steps(jobs: Jobs, seed: int) -> list[AnyJob]:
    data = [datum([(seed * 7 + row * 3 + column) % 200 + 4 for column in range(3 + row)]) for row in range(4)]
    return [jobs.forward_backward(*data), jobs.optim_step(), jobs.forward_backward(*data[::-1]), jobs.optim_step()]

"""Adapter memory is counted as it is used, and one tenant's adapters never take another tenant's memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import Jobs, datum
from support.tiny_engine import NAME, bodies, executor, sampled, torch_as_it_was, train

from tinsmith.engine.eviction import Held, to_evict
from tinsmith.engine.ipc import Failed, Finished
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.families import config_from_hf
from tinsmith.engine.models.tiny import FAMILIES, SIZES
from tinsmith.engine.protocol import LoraSpec, Sample
from tinsmith.engine.sampling.decoder import FrozenAdapter
from tinsmith.engine.training.adapter_pool import Adapters
from tinsmith.engine.worker.torch_executor import TorchExecutor

CONFIG = config_from_hf({"vocab_size": 260, **SIZES, **FAMILIES["llama"]})
OPTIONS: dict[str, Any] = {"max_tokens": 2, "stop": []}


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    with torch_as_it_was():
        yield


def tensor_bytes() -> int:
    """All memory of all tensors of this process."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor:
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("rank", [1, 3, 32, 100])
def test_what_is_counted_is_what_is_kept(rank: int) -> None:
    """At rank 1 the tensors are filled up to many times what their parameters are."""
    adapter = LoraAdapter(CONFIG, rank, 1)
    before = tensor_bytes()
    frozen = FrozenAdapter(adapter, torch.device("cpu"), torch.float32)
    assert frozen.size_bytes == tensor_bytes() - before
    assert frozen.size_bytes >= 4 * adapter.parameter_count()


def saved(engine: TorchExecutor, folder: Path, count: int, jobs: Jobs, rank: int = 1) -> list[Path]:
    train(engine, jobs.create(rank=rank))
    for n in range(count):
        bodies(engine, [jobs.forward_backward(datum([5, 9, 2, n + 3])), jobs.optim_step()])
        train(engine, jobs.save(folder / str(n), optimizer=False))
    return [folder / str(n) for n in range(count)]


def test_a_loop_of_saving_and_sampling_stays_below_the_cap(home: Path, tmp_path: Path) -> None:
    cap = 1 << 20
    engine, jobs = executor(home, sampler_adapter_bytes=cap), Jobs(NAME)
    before = None
    for directory in saved(engine, tmp_path, 24, jobs):
        sampled(engine, jobs.sample([5, 9, 2], directory=directory, key=directory.name, **OPTIONS))
        before = tensor_bytes() if before is None else before
        assert engine._samples.adapters.size_bytes <= cap
        assert tensor_bytes() - before <= cap
    assert len(engine._samples.adapters.names) > 1


def test_adapters_in_use_are_below_the_cap_too(home: Path, tmp_path: Path) -> None:
    """Many samples at once, each of another adapter: those beyond the cap wait, and all of them end."""
    engine, jobs = executor(home), Jobs(NAME)
    paths = saved(engine, tmp_path, 8, jobs)
    sampled(engine, jobs.sample([5, 9, 2], directory=paths[0], key="0", **OPTIONS))
    one = engine._samples.adapters.size_bytes
    engine = executor(home, sampler_adapter_bytes=3 * one)
    samples = [jobs.sample([5, 9, 2], directory=path, key=path.name, **OPTIONS) for path in paths]
    for sample in samples:
        engine.add_sample(sample, False)
    ended: list[str] = []
    for _ in range(100):
        assert engine._samples.adapters.size_bytes <= 3 * one
        ended += [event.job_id for event in engine.step(frozenset({"tenant-1"})).events]
    assert sorted(ended) == sorted(sample.job_id for sample in samples)


def test_one_tenants_adapters_do_not_push_out_anothers(home: Path, tmp_path: Path) -> None:
    engine, loud, quiet = executor(home), Jobs(NAME, tenant="loud"), Jobs(NAME, tenant="quiet")
    paths = saved(engine, tmp_path, 8, loud)
    sampled(engine, quiet.sample([5, 9, 2], directory=paths[0], key="mine", **OPTIONS))
    one = engine._samples.adapters.size_bytes
    engine = executor(home, sampler_adapter_bytes=4 * one)
    for _ in range(2):
        sampled(engine, quiet.sample([5, 9, 2], directory=paths[0], key="mine", **OPTIONS))
        for path in paths:
            sampled(engine, loud.sample([5, 9, 2], directory=path, key=path.name, **OPTIONS))
            assert ("quiet", "mine") in engine._samples.adapters.names


def test_a_tenant_whose_adapters_fill_the_cap_keeps_nobody_waiting(home: Path, tmp_path: Path) -> None:
    engine, loud, quiet = executor(home, sampler_adapter_bytes=1), Jobs(NAME, tenant="loud"), Jobs(NAME, tenant="quiet")
    paths = saved(engine, tmp_path, 4, loud)
    for path in paths:
        engine.add_sample(loud.sample([5, 9], directory=path, key=path.name, max_tokens=200, stop=[]), False)
    events = sampled(engine, quiet.sample([5, 9, 2], directory=paths[0], key="mine", **OPTIONS))
    assert isinstance(events[-1], Finished)


def test_a_waiting_sample_can_be_cancelled_and_a_bad_one_fails_alone(home: Path, tmp_path: Path) -> None:
    engine, jobs = executor(home, sampler_adapter_bytes=1), Jobs(NAME)
    paths = saved(engine, tmp_path, 4, jobs)
    samples: list[Sample] = [jobs.sample([5, 9], directory=path, key=path.name, **OPTIONS) for path in paths]
    for sample in samples:
        engine.add_sample(sample, False)
    engine.cancel_sample(samples[1].job_id)
    (paths[2] / "manifest.json").write_text("{}")
    ended: dict[str, Any] = {}
    for _ in range(30):
        ended |= {event.job_id: event for event in engine.step(frozenset({"tenant-1"})).events}
    assert set(ended) == {samples[n].job_id for n in (0, 2, 3)}
    assert isinstance(ended[samples[2].job_id], Failed)
    assert isinstance(ended[samples[3].job_id], Finished)


def test_models_in_training_give_way_by_tenant(tmp_path: Path) -> None:
    """Loud's models go to disk for each other; quiet's one stays in memory."""
    size = 16 * LoraAdapter(CONFIG, 4, 1).parameter_count()
    adapters = Adapters(CONFIG, torch.device("cpu"), 3 * size, tmp_path)
    lora = LoraSpec(rank=4, seed=1)
    adapters.add("quiet", lora, adapters.fresh(lora), "quiet")
    for n in range(6):
        adapters.add(f"loud-{n}", lora, adapters.fresh(lora), "loud")
    for n in range(6):
        with adapters.use(f"loud-{n}"):
            assert "quiet" in adapters.in_memory
            assert len(adapters.in_memory) == 3
    adapters.close()


def test_who_gives_way() -> None:
    held = {
        "a1": Held("a", 10),
        "b1": Held("b", 10),
        "a2": Held("a", 10, users=1),
        "a3": Held("a", 10),
        "b2": Held("b", 5),
    }
    assert to_evict(held, "b", 5, 50) == []
    assert to_evict(held, "b", 5, 49) == ["a1"]
    assert to_evict(held, "b", 20, 40) == ["b1", "a1", "b2"]
    assert to_evict(held, "c", 1, 0) == ["a1", "a3", "b1", "b2"]


def test_a_thousand_samples_of_a_long_prompt_hold_it_once(home: Path) -> None:
    engine, jobs = executor(home, cache_bytes=1 << 24), Jobs(NAME)
    long = [n % 50 + 3 for n in range(200)]
    engine.add_sample(jobs.sample(long, max_tokens=2, stop=[], num_samples=1000), False)
    while not engine._samples._sampler._waiting:
        engine.step(frozenset({"tenant-1"}))
    engine.step(frozenset({"tenant-1"}))
    line = engine._samples._sampler._waiting._tenants["tenant-1"]
    assert len(line) > 900
    assert len({id(sequence.tokens.prompt) for _, sequence in line}) == 1

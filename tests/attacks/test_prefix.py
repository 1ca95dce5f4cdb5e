"""The cache reveals nothing about other organisations' requests, and no organisation can evict another's entries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.jobs import Jobs
from support.tiny_engine import NAME, bodies, executor, sampled, train
from support.tiny_sampler import finish, job, load, make_sampler, prompt, trained

from tinsmith.engine.worker.torch_executor import TorchExecutor
from tinsmith.wire.codecs.proto_sampling import decode_response

SECRET = prompt(140, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


def hits(engine: TorchExecutor, jobs: Jobs, tokens: list[int], **options: Any) -> int:
    """`prompt_cache_hit_tokens` of a sample."""
    done = sampled(engine, jobs.sample(tokens, max_tokens=1, stop=[], **options))[-1].done
    return decode_response(done.body).prompt_cache_hit_tokens


def test_a_prompt_cannot_be_guessed_by_what_the_cache_has_of_it(engine: TorchExecutor) -> None:
    victim, stranger = Jobs(NAME, tenant="victim"), Jobs(NAME, tenant="stranger")
    hits(engine, victim, SECRET)
    assert hits(engine, stranger, SECRET) == 0
    assert hits(engine, victim, SECRET) == 128
    assert hits(engine, stranger, [*SECRET[:100], *prompt(40, seed=2)]) == 96, "its own are found"


def test_nor_under_an_adapter_of_the_same_digest(engine: TorchExecutor, tmp_path: Path) -> None:
    victim, stranger = Jobs(NAME, tenant="victim"), Jobs(NAME, tenant="stranger")
    bodies(engine, [victim.create(), *victim.steps(1), victim.save(tmp_path / "a", optimizer=False)])
    same: dict[str, Any] = {"directory": tmp_path / "a", "key": "digest"}
    hits(engine, victim, SECRET, **same)
    assert hits(engine, stranger, SECRET, **same) == 0
    assert hits(engine, victim, SECRET, **same) == 128


def test_an_adapter_is_its_tenants_whatever_the_digest_says(engine: TorchExecutor, tmp_path: Path) -> None:
    """The first to sample under a digest does not choose the weights of the others."""
    victim, stranger = Jobs(NAME, tenant="victim"), Jobs(NAME, tenant="stranger")
    for jobs, seed in ((victim, 1), (stranger, 2)):
        bodies(engine, [jobs.create(seed=seed), *jobs.steps(3, seed=seed)])
        train(engine, jobs.save(tmp_path / str(seed), optimizer=False))
    options: dict[str, Any] = {"max_tokens": 12, "stop": [], "seed": 5}
    honest = sampled(engine, victim.sample([5, 9, 2], directory=tmp_path / "1", key="honest", **options))
    sampled(engine, stranger.sample([5, 9, 2], directory=tmp_path / "2", key="same", **options))
    claimed = sampled(engine, victim.sample([5, 9, 2], directory=tmp_path / "1", key="same", **options))
    assert claimed[-1].done.body == honest[-1].done.body


def test_requests_do_not_wait_for_a_strangers_prefix(model: Any) -> None:
    """A request for a prompt that is being computed waits for it; another tenant's would tell by its delay."""
    sampler = make_sampler(model)
    sampler.add(job("a", SECRET, tenant="victim", max_tokens=1))
    sampler.step()
    sampler.add(job("b", SECRET, tenant="stranger", max_tokens=1))
    sampler.add(job("c", SECRET, tenant="victim", max_tokens=1))
    began = set()
    for _ in range(3):
        began |= set(sampler.step().tokens_by_job)
    finish(sampler)
    assert "b" in began or "c" not in began


def test_a_removed_adapter_is_forgotten_for_every_tenant(model: Any) -> None:
    sampler = make_sampler(model)
    for round_ in range(2):
        sampler.add_adapter("x", trained(model[0], round_))
        for tenant in "ab":
            sampler.add(job(f"{tenant}{round_}", SECRET, tenant=tenant, adapter="x", max_tokens=1))
        answers = finish(sampler)
        assert all(answer.prompt_cache_hit_tokens == 0 for answer in answers.values())


def test_masses_of_prompts_push_out_ones_own(model: Any) -> None:
    """What a conversation has in the cache stays there, whatever another tenant asks for."""
    sampler = make_sampler(model, blocks=64)
    sampler.add(job("turn", SECRET, tenant="quiet", max_tokens=1))
    finish(sampler)
    for number in range(30):
        sampler.add(job(f"flood{number}", prompt(150, seed=number + 9), tenant="loud", max_tokens=1))
    finish(sampler)
    sampler.add(job("next", SECRET, tenant="quiet", max_tokens=1))
    assert finish(sampler)["next"].prompt_cache_hit_tokens == 128


def test_a_long_prompt_does_not_keep_others_out_of_the_cache(model: Any) -> None:
    """One sequence may fill the whole cache; a short one of another tenant takes its share of it all the same."""
    sampler = make_sampler(model, blocks=20)
    long = prompt(250, seed=4)
    sampler.add(job("long", long, tenant="loud", max_tokens=50, stop=[]))
    for _ in range(14):
        sampler.step()
    sampler.add(job("short", prompt(60, seed=5), tenant="quiet", max_tokens=20, stop=[]))
    order = []
    for _ in range(400):
        order += [event.job_id for event in sampler.step().events if type(event).__name__ == "DoneEvent"]
        if not sampler.has_work:
            break
    assert order == ["short", "long"]
    alone = make_sampler(model, blocks=20)
    alone.add(job("long", long, tenant="loud", max_tokens=50, stop=[]))
    finish(alone)


def test_what_a_long_sample_needs_next_is_not_taken_from_a_short_one(model: Any) -> None:
    """A sequence that grows gives way itself, if its tenant holds most."""
    sampler = make_sampler(model, blocks=12)
    sampler.add(job("long", prompt(100, seed=6), tenant="loud", max_tokens=80, stop=[]))
    for _ in range(8):
        sampler.step()
    sampler.add(job("short", prompt(40, seed=7), tenant="quiet", max_tokens=24, stop=[]))
    order, put_back = [], 0
    for _ in range(600):
        order += [event.job_id for event in sampler.step().events if type(event).__name__ == "DoneEvent"]
        put_back += any(s.tenant == "quiet" for line in sampler._waiting._tenants.values() for _, _, s in line)
        if not sampler.has_work:
            break
    assert order == ["short", "long"]
    assert put_back == 0


def test_executors_of_one_machine_agree(home: Path) -> None:
    """The cache changes no bits: samples with and without a prefix in it are the same."""
    cold, warm = executor(home), executor(home)
    jobs = Jobs(NAME, tenant="victim")
    hits(warm, jobs, SECRET)
    bodies_of = [
        decode_response(sampled(engine, jobs.sample(SECRET, max_tokens=9, stop=[]))[-1].done.body)
        for engine in (cold, warm)
    ]
    assert bodies_of[0].sequences[0].tokens == bodies_of[1].sequences[0].tokens


def test_long_prompts_do_not_keep_short_ones_waiting(model: Any) -> None:
    """The prompts of a step are computed tenant by tenant, whoever came first and with however many."""
    sampler = make_sampler(model)
    for number in range(16):
        sampler.add(job(f"long{number}", prompt(400, seed=number), tenant="loud", max_tokens=1))
    for _ in range(3):
        sampler.step()
    sampler.add(job("short", prompt(30, seed=99), tenant="quiet", max_tokens=1))
    steps = 0
    while not any(event.job_id == "short" for event in sampler.step().events):
        steps += 1
        assert steps < 6
    assert len(finish(sampler)) == 16

"""The sampler: the right tokens, the same whatever else runs, and every kind of prompt score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_sampler import (
    BLOCK,
    finish,
    job,
    load,
    logits_of,
    make_sampler,
    plain_sample,
    prompt,
    streamed,
    trained,
)

from tinsmith.engine.sampling.draw import DrawRule
from tinsmith.engine.sampling.sampler import FailedEvent
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import SampledSequence
from tinsmith.wire.values.tensors import TensorData


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return load(Path(tmp_path_factory.mktemp("model")))


def same(one: SampledSequence, other: SampledSequence) -> bool:
    """Bit for bit."""
    return one.tokens == other.tokens and one.logprobs == other.logprobs and one.stop_reason == other.stop_reason


@pytest.mark.parametrize("rule", [DrawRule(0.0), DrawRule(), DrawRule(0.7, 20), DrawRule(1.2, -1, 0.9)], ids=str)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_samples_are_those_of_the_plain_forward_pass(model, rule: DrawRule, has_adapter: bool) -> None:
    decoder, _ = model
    adapter = trained(decoder, 3) if has_adapter else None
    sampler = make_sampler(model)
    if adapter is not None:
        sampler.add_adapter("mine", adapter)
    options = {"temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p}
    tokens = prompt(30)
    asked = job("a", tokens, adapter="mine" if has_adapter else None, max_tokens=12, stop=[], num_samples=2, **options)
    sampler.add(asked)
    answer = finish(sampler)["a"]
    for index, sequence in enumerate(answer.sequences):
        drawn, scores = plain_sample(decoder, tokens, 12, 7, index, rule, adapter)
        assert sequence.tokens == drawn
        assert sequence.stop_reason == "length"
        assert np.abs(np.array(sequence.logprobs) - scores).max() < 1e-4


def crowd(model, count: int = 12) -> list:
    return [
        job(
            f"j{i}",
            prompt(3 + 11 * i % 70, i % 5),
            seed=i,
            adapter=[None, "x", "y"][i % 3],
            tenant=f"t{i % 2}",
            max_tokens=20 + i,
            stop=[],
            num_samples=1 + i % 3,
            temperature=[1.0, 0.0, 0.8][i % 3],
        )
        for i in range(count)
    ]


def with_adapters(model, **limits: int):
    sampler = make_sampler(model, **limits)
    for name, seed in (("x", 1), ("y", 2)):
        sampler.add_adapter(name, trained(model[0], seed, rank=3 + seed))
    return sampler


@pytest.mark.parametrize(
    "limits",
    [{}, {"blocks": 24}, {"blocks": 12, "prefill_tokens": 7}, {"max_sequences": 3}, {"prefill_tokens": 1000}],
    ids=str,
)
def test_a_sample_is_the_same_whatever_else_runs(model, limits: dict[str, int]) -> None:
    """Bit for bit: other batches, chunks, cache hits and pre-emption change nothing."""
    alone = {}
    for asked in crowd(model):
        sampler = with_adapters(model)
        sampler.add(asked)
        alone.update(finish(sampler))
    sampler = with_adapters(model, **limits)
    for asked in crowd(model):
        sampler.add(asked)
    together = finish(sampler)
    for name, answer in alone.items():
        pairs = zip(answer.sequences, together[name].sequences, strict=True)
        assert all(same(one, other) for one, other in pairs), name
    assert sampler._room.available == sampler._room.index.pool.count


def test_a_sample_is_the_same_when_others_come_and_go(model) -> None:
    sampler = with_adapters(model)
    sampler.add(job("mine", prompt(20), max_tokens=40, stop=[]))
    expected = finish(sampler)["mine"].sequences[0]
    sampler = with_adapters(model, blocks=18)
    sampler.add(job("mine", prompt(20), max_tokens=40, stop=[]))
    answers = {}
    for number, asked in enumerate(crowd(model)):
        sampler.add(asked)
        for _ in range(3):
            for event in sampler.step().events:
                if hasattr(event, "response"):
                    answers[event.job_id] = event.response
        if number % 2:
            sampler.cancel(asked.id)
    answers.update(finish(sampler))
    assert same(answers["mine"].sequences[0], expected)


def test_the_seed_and_the_index_choose_the_sample(model) -> None:
    sampler = make_sampler(model)
    for name, seed in (("a", 1), ("b", 2), ("again", 1)):
        sampler.add(job(name, prompt(9), seed=seed, max_tokens=20, stop=[], num_samples=3))
    answers = finish(sampler)
    drawn = [tuple(s.tokens) for name in ("a", "b") for s in answers[name].sequences]
    assert len(set(drawn)) == 6
    assert [s.tokens for s in answers["again"].sequences] == [s.tokens for s in answers["a"].sequences]


def test_cancelling_frees_room_at_once(model) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(50), max_tokens=100, stop=[], num_samples=4))
    for _ in range(6):
        sampler.step()
    assert sampler.cancel("a")
    assert not sampler.cancel("a")
    assert not sampler.has_work
    assert sampler._room.available == sampler._room.index.pool.count


def test_tokens_are_streamed_as_they_are_drawn(model) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(5), max_tokens=6, stop=[], num_samples=2))
    steps = []
    answer = None
    while sampler.has_work:
        events = sampler.step().events
        steps.append(streamed(events))
        answer = next((e.response for e in events if hasattr(e, "response")), answer)
    assert [len(step) for step in steps] == [2] * 6
    assert answer is not None
    for index in (0, 1):
        tokens = [token for step in steps for _, i, token in step if i == index]
        assert tokens == answer.sequences[index].tokens


def test_stops(model) -> None:
    decoder, table = model
    for seed in range(200):  # a seed whose fifth to seventh token are a text
        drawn, _ = plain_sample(decoder, prompt(10), 12, seed, 0, DrawRule())
        text = b"".join(table[token] for token in drawn[4:7])
        before = b"".join(table[token] for token in drawn[:6])
        if text.isascii() and text not in before and not set(drawn) & {0, 1, 2}:
            break
    sampler = make_sampler(model)
    sampler.add(job("token", prompt(10), seed=seed, max_tokens=12, stop=[drawn[5]]))
    sampler.add(job("text", prompt(10), seed=seed, max_tokens=12, stop=text.decode()))
    sampler.add(job("texts", prompt(10), seed=seed, max_tokens=12, stop=["never", text.decode()]))
    sampler.add(job("never", prompt(10), seed=seed, max_tokens=12, stop=[]))
    answers = {name: answer.sequences[0] for name, answer in finish(sampler).items()}
    assert answers["token"].tokens == drawn[: drawn.index(drawn[5]) + 1]
    assert answers["text"].tokens == answers["texts"].tokens == drawn[:7]
    assert answers["never"].tokens == drawn
    assert [answers[name].stop_reason for name in ("token", "text", "texts", "never")] == ["stop"] * 3 + ["length"]


def test_the_end_of_sequence_stops_unless_nothing_may(model) -> None:
    decoder, _ = model
    eos = decoder.config.eos_token_ids[0]
    for seed in range(200):  # a seed whose sample meets the end of sequence
        drawn, _ = plain_sample(decoder, prompt(4), 25, seed, 0, DrawRule(3.0))
        if eos in drawn[:-1]:
            break
    sampler = make_sampler(model)
    sampler.add(job("absent", prompt(4), seed=seed, max_tokens=25, temperature=3.0))
    sampler.add(job("empty", prompt(4), seed=seed, max_tokens=25, temperature=3.0, stop=[]))
    answers = finish(sampler)
    assert answers["absent"].sequences[0].tokens == drawn[: drawn.index(eos) + 1]
    assert answers["absent"].sequences[0].stop_reason == "stop"
    assert answers["empty"].sequences[0].tokens == drawn


def test_without_max_tokens_a_sample_goes_to_the_end_of_the_context(model) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(200), stop=[]))
    sampler.add(job("full", prompt(255), stop=[], prompt_logprobs=True))
    sampler.add(job("none", prompt(9), stop=[], max_tokens=0, prompt_logprobs=True))
    answers = finish(sampler)
    assert len(answers["a"].sequences[0].tokens) == 56
    assert answers["a"].sequences[0].stop_reason == "length"
    assert len(answers["full"].sequences[0].tokens) == 1
    assert answers["none"].sequences[0].tokens == []
    assert answers["none"].prompt_logprobs is not None


def test_prompt_scores_are_those_of_the_plain_forward_pass(model) -> None:
    decoder, _ = model
    tokens = prompt(90)
    target = np.random.default_rng(1).integers(-1, 250, (89, 3))
    sampler = make_sampler(model)
    sampler.add_adapter("x", trained(decoder, 5))
    asked = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 4,
        "target_prompt_logprobs": TensorData.from_numpy(target),
        "prompt_alt_tokens_k": 2,
        "topk_sample_logprobs": 3,
    }
    sampler.add(job("a", tokens, adapter="x", max_tokens=2, stop=[], **asked))
    answer = finish(sampler)["a"]
    expected = logits_of(decoder, tokens, trained(decoder, 5)).log_softmax(1)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    own = expected[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    assert np.abs(answer.prompt_logprobs_np[1:] - own.numpy()).max() < 1e-4
    rows = answer.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    assert [[token for token, _ in row] for row in rows[1:]] == expected[:-1].topk(4).indices.tolist()
    assert answer.target_prompt_logprobs is not None
    found = answer.target_prompt_logprobs.to_numpy()
    wanted = np.where(target < 0, np.nan, expected[:-1].gather(1, torch.from_numpy(target.clip(0))).numpy())
    assert np.array_equal(np.isnan(found), target < 0)
    assert np.nanmax(np.abs(found - wanted)) < 1e-4
    assert answer.prompt_alt_tokens is not None
    alternatives = answer.prompt_alt_tokens.tokens.to_numpy()
    assert alternatives.shape == (89, 2)
    scores = expected[:-1].gather(1, torch.from_numpy(alternatives)).numpy()
    assert np.abs(answer.prompt_alt_tokens.logprobs.to_numpy() - scores).max() < 1e-4
    sequence = answer.sequences[0]
    assert sequence.topk_logprobs is not None
    assert [token for token, _ in sequence.topk_logprobs[0] or []] == expected[-1].topk(3).indices.tolist()


def test_a_drawn_token_has_one_logprob(model) -> None:
    """That in the table of the likely tokens is the same, to the last bit, and the table stays in order."""
    sampler = make_sampler(model)
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"num_samples": 3}]
    for number, more in enumerate(options):
        sampler.add(job(str(number), prompt(20), number, max_tokens=30, stop=[], topk_sample_logprobs=50, **more))
    found = 0
    for answer in finish(sampler).values():
        for sequence in answer.sequences:
            for token, logprob, row in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
                values = [value for _, value in row]
                assert values == sorted(values, reverse=True)
                assert dict(row).get(token, logprob) == logprob
                found += token in dict(row)
    assert found > 60


def test_alternatives_follow_the_distribution(model) -> None:
    tokens = prompt(3)
    sampler = make_sampler(model)
    for seed in range(3):
        options = {"prompt_alt_tokens_k": 1000, "temperature": 0.6}
        sampler.add(job(str(seed), tokens, seed, max_tokens=1, stop=[], **options))
    drawn = [answer.prompt_alt_tokens.tokens.to_numpy()[1] for answer in finish(sampler).values()]
    found = np.bincount(np.concatenate(drawn), minlength=model[0].config.vocab_size) / 3000
    expected = (logits_of(model[0], tokens)[1] / 0.6).softmax(0).numpy()
    assert np.abs(found - expected).max() < 0.04


def test_sparse_targets_come_back_sparse(model) -> None:
    target = TensorData([5, 9, 9], "int64", [3, 4], [0, 1, 1, 3], [2, 0, 3])
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(4), max_tokens=1, target_prompt_logprobs=target))
    answer = finish(sampler)["a"].target_prompt_logprobs
    expected = logits_of(model[0], prompt(4)).log_softmax(1)
    assert answer is not None
    assert answer.sparse_col_indices == [2, 0, 3]
    assert answer.array.tolist() == pytest.approx([float(expected[0, 5]), *[float(expected[2, 9])] * 2], abs=1e-4)


def test_the_last_n_are_scored_and_the_rest_may_come_from_the_cache(model) -> None:
    tokens = prompt(60)
    sampler = make_sampler(model)
    sampler.add(job("all", tokens, max_tokens=1, stop=[], prompt_logprobs=True))
    everything = finish(sampler)["all"]
    sampler.add(job("last", tokens, max_tokens=1, stop=[], prompt_logprobs=True, prompt_logprobs_last_n=10))
    last = finish(sampler)["last"]
    assert everything.prompt_cache_hit_tokens == 0
    assert last.prompt_cache_hit_tokens == 49 // BLOCK * BLOCK
    assert last.prompt_logprobs is not None
    assert everything.prompt_logprobs is not None
    assert last.prompt_logprobs[:50] == [None] * 50
    assert last.prompt_logprobs[50:] == everything.prompt_logprobs[50:]


def test_a_conversation_reuses_its_last_turn(model) -> None:
    sampler = make_sampler(model)
    sampler.add_adapter("x", trained(model[0], 1))
    first = prompt(21)
    sampler.add(job("one", first, max_tokens=28, stop=[]))  # the last token is drawn, never computed
    answer = finish(sampler)["one"].sequences[0].tokens
    second = first + answer + prompt(10, 4)
    for name, adapter in (("two", None), ("other weights", "x")):
        sampler.add(job(name, second, adapter=adapter, max_tokens=5, stop=[]))
    answers = finish(sampler)
    assert answers["two"].prompt_cache_hit_tokens == 48
    assert answers["other weights"].prompt_cache_hit_tokens == 0
    fresh = make_sampler(model)
    fresh.add(job("two", second, max_tokens=5, stop=[]))
    assert same(finish(fresh)["two"].sequences[0], answers["two"].sequences[0])


def test_samples_of_one_prompt_share_its_computation(model) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(100), max_tokens=3, stop=[], num_samples=8))
    computed = 0
    while sampler.has_work:
        computed += sum(sampler.step().tokens_by_tenant.values())
    assert computed == 100 + 8 * 2


def test_requests_for_one_prompt_wait_for_its_computation(model) -> None:
    sampler = make_sampler(model)
    for number in range(8):
        sampler.add(job(f"{number}", prompt(100), seed=number, max_tokens=2, stop=[]))
    computed = 0
    while sampler.has_work:
        computed += sum(sampler.step().tokens_by_tenant.values())
    assert computed == 96 + 8 * (100 - 96) + 8


def test_tenants_share_the_places(model) -> None:
    sampler = make_sampler(model, max_sequences=4)
    for number in range(8):
        sampler.add(job(f"a{number}", prompt(5, number), tenant="a", max_tokens=200, stop=[]))
    sampler.step()
    sampler.add(job("b", prompt(5, 99), tenant="b", max_tokens=1))
    events = sampler.step().events
    assert [e.job_id for e in events if hasattr(e, "response")] == ["b"]


def test_a_step_can_be_for_some_tenants_only(model) -> None:
    sampler = make_sampler(model, max_sequences=2, blocks=20)
    sampler.add(job("a", prompt(5), tenant="a", max_tokens=100, stop=[], num_samples=2))
    sampler.step()
    sampler.add(job("b", prompt(90, 1), tenant="b", max_tokens=3, stop=[]))
    seen = [sampler.step(["b"]) for _ in range(8)]
    assert all(set(report.tokens_by_tenant) <= {"b"} for report in seen)
    assert any(getattr(event, "job_id", "") == "b" for report in seen for event in report.events)
    assert set(finish(sampler)) == {"a"}


def test_more_samples_than_places(model) -> None:
    sampler = make_sampler(model, max_sequences=3)
    sampler.add(job("many", prompt(9), max_tokens=8, stop=[], num_samples=10))
    many = finish(sampler)["many"]
    sampler = make_sampler(model)
    sampler.add(job("many", prompt(9), max_tokens=8, stop=[], num_samples=10))
    assert all(same(a, b) for a, b in zip(finish(sampler)["many"].sequences, many.sequences, strict=True))


def test_broken_weights_fail_their_own_job_only(model) -> None:
    sampler = make_sampler(model)
    broken = trained(model[0], 1)
    for parameter in broken.parameters().values():
        parameter.fill_(float("nan"))
    sampler.add_adapter("broken", broken)
    sampler.add(job("bad", prompt(9), adapter="broken", max_tokens=5, num_samples=2))
    sampler.add(job("good", prompt(9), max_tokens=5, stop=[]))
    events = []
    while sampler.has_work:
        events += sampler.step().events
    assert [e.job_id for e in events if isinstance(e, FailedEvent)] == ["bad"]
    good = next(e.response for e in events if getattr(e, "job_id", "") == "good" and hasattr(e, "response"))
    assert good.sequences[0].tokens == plain_sample(model[0], prompt(9), 5, 7, 0, DrawRule())[0]
    sampler.add(job("after", prompt(30, 2), max_tokens=30, stop=[]))  # takes the broken one's blocks
    assert np.isfinite(finish(sampler)["after"].sequences[0].logprobs).all()


def test_adapters_in_use_are_not_removed(model) -> None:
    sampler = make_sampler(model)
    sampler.add_adapter("x", trained(model[0], 1))
    sampler.add(job("a", prompt(9), adapter="x", max_tokens=5))
    with pytest.raises(InvalidInputError, match="in use"):
        sampler.remove_adapter("x")
    sampler.cancel("a")
    sampler.remove_adapter("x")
    with pytest.raises(InvalidInputError, match="not loaded"):
        sampler.add(job("a", prompt(9), adapter="x", max_tokens=5))


@pytest.mark.parametrize(
    ("tokens", "options", "problem"),
    [
        ([], {}, "prompt: is empty"),
        ([1, 999], {}, r"tokens\[1\]: 999 is not a token of this model"),
        (prompt(256), {}, "256 tokens leave no room for a sample; this model's maximum context length is 256"),
        ([1], {"temperature": -1.0}, "temperature: -1.0 is not allowed"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p: 0.0 is not allowed"),
        ([1], {"top_k": 0}, "top_k: 0 is not allowed"),
        ([1], {"stop": ""}, "stop"),
        ([1, 2], {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "a prompt of 2 tokens has 1 logprobs"),
        ([1, 2], {"prompt_logprobs_last_n": 1}, "prompt_logprobs is not"),
        ([1, 2], {"topk_prompt_logprobs": 10**7}, "is more than"),
        ([1, 2], {"topk_sample_logprobs": 200, "max_tokens": 200, "num_samples": 1000}, "too many"),
        ([1, 2], {"prompt_alt_tokens_k": 1025}, "prompt_alt_tokens_k: 1025 is more than"),
        ([1], {"stop": ["x" * 999] * 5}, "stop: the strings take 4995 bytes together"),
        ([1, 2], {"target_prompt_logprobs": TensorData([1, 2], "int64")}, r"needs \[1, K\]"),
        ([1, 2], {"target_prompt_logprobs": TensorData([999], "int64", [1, 1])}, "holds 999"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(model, tokens: list[int], options: dict, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        make_sampler(model).add(job("a", tokens, **options))


def test_a_cache_too_small_for_anything_is_refused(model) -> None:
    with pytest.raises(InvalidInputError, match="2 are needed"):
        make_sampler(model, blocks=1)
    assert make_sampler(model, blocks=11).context_length == 160

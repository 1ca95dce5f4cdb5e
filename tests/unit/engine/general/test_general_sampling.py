"""Sampling through transformers: on-policy, and with the same bits alone, beside others and after a preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.general_models import KINDS, adapter_of, load_general, make_general
from support.tiny_sampler import collect, finish, job, prompt, streamed

from tinsmith.engine.general.model import ActiveAdapter, GeneralModel, pairs_of
from tinsmith.engine.general.sampling import GeneralSampling
from tinsmith.engine.sampling.sampled_model import SamplerLimits
from tinsmith.engine.sampling.sampler import Sampler
from tinsmith.errors import InvalidInputError
from tinsmith.text.token_bytes import read_token_bytes
from tinsmith.wire.messages.sampling import SampleResponse


def sampler_of(model: GeneralModel, directory: Path, tokens: int = 2000, **limits: int) -> Sampler:
    per_token = model.cache_token_bytes or model.cache_fixed_bytes
    chosen = SamplerLimits(cache_bytes=tokens * per_token, block_size=16, **limits)
    return Sampler(GeneralSampling(model, chosen), read_token_bytes(directory / "tokenizer.json"), chosen)


def logprobs_of(model: GeneralModel, tokens: list[int], adapter: Any = None) -> torch.Tensor:
    """logprobs_TV by one pass over the whole sequence."""
    active = None if adapter is None else ActiveAdapter(pairs_of(adapter), adapter.scale)
    with torch.no_grad(), model.adapted(active):
        output, _ = model.forward(torch.tensor(tokens))
        logits = model.logits(output, active) if model.has_plain_head else output
        return logits.log_softmax(1)


def same(first: SampleResponse, second: SampleResponse) -> bool:
    """Whether two responses are equal to the last bit."""
    rows = zip(first.sequences, second.sequences, strict=True)
    return all(a.tokens == b.tokens and a.logprobs_np.tobytes() == b.logprobs_np.tobytes() for a, b in rows)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_whole_pass(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / kind, kind)
    model = load_general(directory)
    sampler, adapter = sampler_of(model, directory), adapter_of(model)
    sampler.add_adapter("mine", adapter)
    tokens = prompt(9)
    for name, chosen in (("base", None), ("tuned", adapter)):
        sampler.add(job(name, tokens, adapter=None if chosen is None else "mine", max_tokens=12, stop=[]))
        (row,) = finish(sampler)[name].sequences
        whole = logprobs_of(model, [*tokens, *row.tokens], chosen)
        expected = whole[torch.arange(8, 20), torch.tensor(row.tokens)].numpy()
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_is_the_same_alone_and_beside_others(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / kind, kind)
    model = load_general(directory)
    asked = [job(f"{n}", prompt(5 + 3 * n, n), seed=n, max_tokens=10, stop=[], num_samples=1 + n) for n in range(3)]
    alone = {}
    for one in asked:
        sampler = sampler_of(model, directory)
        sampler.add(one)
        alone |= finish(sampler)
    together = sampler_of(model, directory, prefill_tokens=4)
    for one in asked:
        together.add(one)
    answers = finish(together)
    assert all(same(answers[one.id], alone[one.id]) for one in asked)
    assert len({tuple(row.tokens) for row in answers["2"].sequences}) == 3
    assert together._room.available == together._room.blocks


@pytest.mark.parametrize("kind", ["gpt2", "mamba"])
def test_samples_that_lose_their_memory_are_the_same(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / kind, kind)
    model = load_general(directory)
    asked = [
        job(f"{n}", prompt(20, n), seed=n, max_tokens=30, stop=[], num_samples=3, tenant=f"t{n}") for n in range(3)
    ]
    roomy = sampler_of(model, directory)
    for one in asked:
        roomy.add(one)
    expected = finish(roomy)
    tight = sampler_of(model, directory, tokens=120 if model.cache_token_bytes else 3)
    lost = 0
    release = tight._room.release

    def counted(sequence: Any) -> None:
        nonlocal lost
        lost += sequence.index is not None and sequence.index not in sequence.state.finished
        release(sequence)

    tight._room.release = counted  # type: ignore[method-assign]
    for one in asked:
        tight.add(one)
    answers = finish(tight)
    assert lost > 0
    assert all(same(answers[one.id], expected[one.id]) for one in asked)
    assert tight._room.available == tight._room.blocks


def test_a_step_that_fails_midway_does_not_change_a_sample(tmp_path: Path, monkeypatch: Any) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    model = load_general(directory)
    asked = [job(f"{n}", prompt(6, n), seed=n, max_tokens=8, stop=[]) for n in range(2)]
    plain = sampler_of(model, directory)
    for one in asked:
        plain.add(one)
    expected = finish(plain)
    hurt, answers = sampler_of(model, directory), {}
    for one in asked:
        hurt.add(one)
    for _ in range(3):
        collect(hurt.step().events, answers)
    forward, calls = model.forward, []

    def failing(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        result = forward(*arguments, **options)
        if len(calls) == 2:
            raise MemoryError("told to fail")
        return result

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(MemoryError):
        hurt.step()
    answers |= finish(hurt)
    assert all(same(answers[one.id], expected[one.id]) for one in asked)


def test_a_model_without_a_working_cache_computes_the_sequence_again(tmp_path: Path, monkeypatch: Any) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(GeneralModel, "_working_cache", lambda *_: None)
    model = load_general(directory)
    assert not model.has_cache
    limits = SamplerLimits(cache_bytes=1 << 20)
    sampler = Sampler(GeneralSampling(model, limits), read_token_bytes(directory / "tokenizer.json"), limits)
    sampler.add(job("one", prompt(9), max_tokens=6, stop=[], num_samples=2, prompt_logprobs=True))
    answer = finish(sampler)["one"]
    for row in answer.sequences:
        whole = logprobs_of(model, [*prompt(9), *row.tokens])
        expected = whole[torch.arange(8, 14), torch.tensor(row.tokens)].numpy()
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_prompts_are_scored(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / kind, kind)
    model = load_general(directory)
    sampler, tokens = sampler_of(model, directory), prompt(100)
    sampler.add(job("one", tokens, max_tokens=1, stop=[], prompt_logprobs=True, topk_prompt_logprobs=3))
    answer = finish(sampler)["one"]
    whole = logprobs_of(model, tokens)
    assert answer.prompt_logprobs is not None
    expected = whole[torch.arange(99), torch.tensor(tokens[1:])].numpy()
    np.testing.assert_allclose(np.array(answer.prompt_logprobs[1:], np.float32), expected, atol=1e-4)
    assert answer.topk_prompt_logprobs is not None
    rows = [[token for token, _ in row or ()] for row in answer.topk_prompt_logprobs[1:]]
    assert rows == whole[:-1].topk(3).indices.tolist()


def test_cancelling_frees_the_memory_at_once(tmp_path: Path) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    sampler = sampler_of(load_general(directory), directory)
    sampler.add(job("one", prompt(9), max_tokens=50, stop=[], num_samples=4))
    events = [event for _ in range(5) for event in sampler.step().events]
    assert len(streamed(events)) == 20
    assert sampler._room.available < sampler._room.blocks
    assert sampler.cancel("one")
    assert sampler._room.available == sampler._room.blocks


def test_output_formats_and_stop_strings_work(tmp_path: Path) -> None:
    from tinsmith.wire.messages.sampling import OutputFormat

    directory = make_general(tmp_path / "gpt2", "gpt2")
    model = load_general(directory)
    sampler = sampler_of(model, directory)
    sampler.add(job("digits", prompt(5), max_tokens=20, output_format=OutputFormat(type="regex", schema="[0-9]{4}")))
    sampler.add(job("free", prompt(5), max_tokens=20, stop=[]))
    answers = finish(sampler)
    table = read_token_bytes(directory / "tokenizer.json")
    text = b"".join(table[token] for token in answers["digits"].sequences[0].tokens)
    assert text.isdigit()
    assert len(text) == 4
    free = answers["free"].sequences[0].tokens
    piece = table[free[4]].decode("latin-1")
    if piece.isascii() and piece:
        sampler.add(job("stopped", prompt(5), max_tokens=20, stop=[piece]))
        assert finish(sampler)["stopped"].sequences[0].stop_reason == "stop"


def test_a_cache_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    with pytest.raises(InvalidInputError, match="cache_bytes: 10 bytes hold no sequence"):
        GeneralSampling(load_general(directory), SamplerLimits(cache_bytes=10))

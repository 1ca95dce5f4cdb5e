"""Tries an engine on a device: `python -m tinsmith.engine.backend.device_trial`, run by `tinsmith doctor --gpu`.

It runs the jobs that a server would send, through the same executor: what it finds is what users will get. Each finding
is printed as a line of JSON as soon as it is known, because the next step may end this process. A second process, with
`resumed`, continues from the checkpoint that the first one wrote, as an engine does after a crash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from tinsmith.engine.backend.prepare_model import PreparedModel, prepare
from tinsmith.engine.ipc import Failed, Finished
from tinsmith.engine.protocol import (
    CreateModel,
    Done,
    ForwardBackward,
    LoraSpec,
    ModelCard,
    OptimStep,
    Sample,
    SaveState,
)
from tinsmith.engine.worker.executor import Beside, Executor, TorchOptions, TrainingJob
from tinsmith.engine.worker.startup import make
from tinsmith.errors import TinkerError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import decode_output
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.sampling import SampledSequence, SampleRequest, SamplingParams
from tinsmith.wire.messages.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    OptimStepRequest,
)
from tinsmith.wire.values.inputs import Datum, ModelInput

Outcome = Literal["ok", "wrong", "number"]
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}
"""How far a logprob may be from the reference: rounding in bfloat16 changes one by up to 0.2, a mistake by more."""
GAPS = {"float32": 1e-4, "bfloat16": 0.25}
"""How far the sampler's logprob of a token may be from the trainer's."""
STEPS = 6
RESUMED = STEPS // 2
"""The steps after which the checkpoint is written."""
LENGTHS = (40, 64, 7)
TENANT = "trial"


class Finding(msgspec.Struct, frozen=True):
    """What one part of the trial found: whether it is right, or a number to compare with other machines'."""

    check: str
    outcome: Outcome
    detail: str


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to try."""

    source: str
    """As for `prepare`; empty: the default model."""
    cache_dir: str
    place: str
    """An existing directory for the checkpoint."""
    device: str
    dtype: Literal["float32", "bfloat16"]
    rows: int = 8
    tokens: int = 256
    """The size of the batch that measures the speed of training."""


class Trial:
    """An executor, and jobs for it."""

    def __init__(self, plan: TrialPlan, prepared: PreparedModel) -> None:
        card = ModelCard(name="trial", vocab_size=prepared.vocab_size, max_context_length=prepared.max_context_length)
        options = TorchOptions(
            card=card, source=prepared.source, cache_dir=plan.cache_dir, device=plan.device, dtype=plan.dtype
        )
        self.plan, self.prepared, self.card = plan, prepared, card
        self.executor: Executor = make(msgspec.to_builtins(options))
        self._numbers = iter(range(2**31))
        draw = np.random.default_rng(5)
        most = min(prepared.max_context_length // 2, 2**31)
        self.sequences = [draw.integers(3, card.vocab_size, min(size, most)).tolist() for size in LENGTHS]

    def run(self, job: TrainingJob) -> Done:
        """Run a job to its end."""
        return _finished(self.executor.train(job))

    def create(self, model: str, directory: Path | None = None) -> Done:
        where = None if directory is None else str(directory)
        lora = LoraSpec(rank=8, seed=1)
        return self.run(
            CreateModel(**self._names(), model_id=model, lora=lora, directory=where, optimizer=directory is not None)
        )

    def save(self, model: str, directory: Path) -> None:
        self.run(SaveState(**self._names(), model_id=model, directory=str(directory), optimizer=True))

    def forward_backward(self, model: str, data: Sequence[Datum], *, is_forward: bool = False) -> Done:
        work = ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=work, model_id=model, seq_id=1, forward_only=is_forward)
        body = encode_request(request)
        return self.run(
            ForwardBackward(**self._names(), model_id=model, body=body, encoding="protobuf", is_forward=is_forward)
        )

    def optim_step(self, model: str) -> Done:
        body = json_codec.encode(OptimStepRequest(model_id=model, seq_id=1, adam_params=AdamParams(learning_rate=1e-3)))
        return self.run(OptimStep(**self._names(), model_id=model, body=body))

    def logprobs(self, model: str, sequences: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        """Return the logprob of each token but the first."""
        output = decode_output(
            self.forward_backward(model, [_datum(tokens) for tokens in sequences], is_forward=True).body
        )
        return [outputs["logprobs"].to_numpy() for outputs in output.loss_fn_outputs]

    def sample(
        self, prompts: Sequence[Sequence[int]], most: int, directory: Path | None = None
    ) -> list[SampledSequence]:
        """Draw one sample for each prompt, all at once, with the same seed."""
        found: dict[str, SampledSequence] = {}
        order = []
        for prompt in prompts:
            request = SampleRequest(
                prompt=ModelInput.from_ints(list(prompt)), sampling_params=SamplingParams(max_tokens=most, stop=[])
            )
            where = None if directory is None else str(directory)
            names = self._names()
            order.append(names["job_id"])
            job = Sample(**names, body=json_codec.encode(request), seed=11, directory=where, adapter_key=where)
            self.executor.add_sample(job, False)
        while len(found) < len(prompts):
            for event in self.executor.step(frozenset({TENANT})).events:
                if isinstance(event, Failed):
                    raise TinkerError(f"a sample failed: {event.message}")
                if isinstance(event, Finished):
                    found[event.job_id] = decode_response(event.done.body).sequences[0]
        return [found[name] for name in order]

    def steps(self, model: str, begin: int, end: int) -> list[str]:
        """Train, each step on other tokens; return the digests of all results."""
        digests = []
        for step in range(begin, end):
            data = [_datum(tokens[step % 3 :]) for tokens in self.sequences]
            for done in (self.forward_backward(model, data), self.optim_step(model)):
                digests.append(hashlib.sha256(done.body).hexdigest())
        return digests

    def _names(self) -> dict[str, Any]:
        return {"job_id": str(next(self._numbers)), "tenant": TENANT, "base_model": "trial"}


def findings(plan: TrialPlan) -> Iterator[Finding]:
    """Yield everything that the first process finds."""
    device = torch.device(plan.device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            yield Finding("device", "wrong", f"torch {torch.__version__} finds no CUDA device")
            return
        known = torch.cuda.get_device_properties(device)
        size = f"{known.total_memory / 2**30:.0f} GiB, compute capability {known.major}.{known.minor}"
        yield Finding("device", "ok", f"{known.name}, {size}; torch {torch.__version__}, CUDA {torch.version.cuda}")
    began = time.perf_counter()
    trial = Trial(plan, prepare(plan.source, Path(plan.cache_dir)))
    yield Finding("start", "number", f"{trial.prepared.arch} in {time.perf_counter() - began:.1f} s")
    trial.create("base")
    yield _against_reference(trial)
    yield _learning(trial)
    place = Path(plan.place)
    trial.create("first")
    digests = trial.steps("first", 0, RESUMED)
    trial.save("first", place / "saved")
    digests += trial.steps("first", RESUMED, STEPS)
    trial.create("second")
    again = trial.steps("second", 0, STEPS)
    yield _equal("determinism", digests, again, "the same steps on a new adapter")
    (place / "digests.json").write_bytes(msgspec.json.encode(digests[2 * RESUMED :]))
    yield _on_policy(trial, place / "saved")
    yield _batches(trial, place / "saved")
    yield from _speed(trial)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(plan.device)
        yield Finding("memory", "number", f"{peak / 2**30:.2f} GiB at most")


def resumed(plan: TrialPlan) -> Iterator[Finding]:
    """Yield what the second process finds: whether it continues with the same bits."""
    trial = Trial(plan, prepare(plan.source, Path(plan.cache_dir)))
    place = Path(plan.place)
    trial.create("resumed", place / "saved")
    expected = msgspec.json.decode((place / "digests.json").read_bytes(), type=list[str])
    again = trial.steps("resumed", RESUMED, STEPS)
    yield _equal("replay", expected, again, "the steps after a checkpoint, in a new process")


def _against_reference(trial: Trial) -> Finding:
    name, expected = _reference(trial)
    found = trial.logprobs("base", trial.sequences)
    gap = max(float(np.abs(one - other).max()) for one, other in zip(found, expected, strict=True))
    limit = TOLERANCES[trial.plan.dtype]
    return Finding("logprobs", _judged(gap <= limit), f"at most {gap:.1e} from {name} (limit {limit:g})")


def _reference(trial: Trial) -> tuple[str, list[np.ndarray[Any, Any]]]:
    """Return the logprobs of the sequences, computed on the CPU by transformers, or else by our plain decoder."""
    if importlib.util.find_spec("transformers") is not None and Path(trial.prepared.source).is_dir():
        name, logits = f"transformers {version('transformers')}, float32 on the CPU", _logits_of_transformers(trial)
    else:
        name, logits = "our plain decoder, float64 on the CPU", _plain_logits(trial)
    return name, [_scores(rows_TV, tokens) for rows_TV, tokens in zip(logits, trial.sequences, strict=True)]


def _logits_of_transformers(trial: Trial) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(trial.prepared.source, dtype=torch.float32)
    with torch.no_grad():
        return [model.eval()(torch.tensor([tokens])).logits[0] for tokens in trial.sequences]


def _plain_logits(trial: Trial) -> list[torch.Tensor]:
    from tinsmith.engine.models.attention import PackedAttention
    from tinsmith.engine.models.load import load_model

    decoder = load_model(trial.prepared.source, "cpu", torch.float64, cache_dir=Path(trial.plan.cache_dir)).decoder
    found = []
    with torch.no_grad():
        for tokens in trial.sequences:
            attend = PackedAttention(decoder.config, [len(tokens)])
            hidden_TD = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)
            found.append(decoder.unembed(hidden_TD))
    return found


def _scores(logits_TV: torch.Tensor, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    scores_TV = logits_TV[:-1].double().log_softmax(dim=1)
    own_T: np.ndarray[Any, Any] = scores_TV.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).numpy()
    return own_T


def _learning(trial: Trial) -> Finding:
    """Train on one sequence over and over."""
    trial.create("learning")
    losses = []
    for _ in range(STEPS):
        output = decode_output(trial.forward_backward("learning", [_datum(trial.sequences[0])]).body)
        losses.append(output.metrics["loss:sum"])
        trial.optim_step("learning")
    return Finding("training", _judged(losses[-1] < losses[0]), f"loss {losses[0]:.2f} to {losses[-1]:.2f}")


def _on_policy(trial: Trial, saved: Path) -> Finding:
    """Compare what the sampler says of its tokens with what the trainer says of them."""
    prompts = [tokens[:7] for tokens in trial.sequences]
    drawn = trial.sample(prompts, 48, saved)
    trial.create("scored", saved)
    whole = [[*prompt, *sequence.tokens] for prompt, sequence in zip(prompts, drawn, strict=True)]
    scored = trial.logprobs("scored", whole)
    gap = max(
        float(np.abs(scores[len(prompt) - 1 :] - np.array(sequence.logprobs)).max())
        for prompt, sequence, scores in zip(prompts, drawn, scored, strict=True)
    )
    limit = GAPS[trial.plan.dtype]
    return Finding(
        "on-policy gap", _judged(gap <= limit), f"at most {gap:.1e} between sampler and trainer (limit {limit:g})"
    )


def _batches(trial: Trial, saved: Path) -> Finding:
    """Count the samples that are the same alone and beside others, which is promised on CPUs in float32 only."""
    prompts = [tokens[:5] for tokens in trial.sequences]
    together = trial.sample(prompts, 32, saved)
    alone = [trial.sample([prompt], 32, saved)[0] for prompt in prompts]
    same = sum(
        one.tokens == other.tokens and one.logprobs == other.logprobs
        for one, other in zip(together, alone, strict=True)
    )
    return Finding("batch and alone", "number", f"{same} of {len(prompts)} samples equal to the last bit")


def _speed(trial: Trial) -> Iterator[Finding]:
    plan, draw = trial.plan, np.random.default_rng(7)
    tokens = min(plan.tokens, trial.card.max_context_length // 2)
    rows = [draw.integers(3, trial.card.vocab_size, tokens).tolist() for _ in range(plan.rows)]
    trial.create("fast")
    rates = []
    for _ in range(3):
        began = time.perf_counter()
        trial.forward_backward("fast", [_datum(row) for row in rows])
        trial.optim_step("fast")
        rates.append(plan.rows * tokens / (time.perf_counter() - began))
    size = f"{plan.rows} x {tokens} tokens"
    yield Finding("training speed", "number", f"{max(rates):,.0f} tokens/s ({size}; first step {rates[0]:,.0f})")
    for count in (1, plan.rows, 4 * plan.rows):
        prompts = [rows[number % len(rows)][: tokens // 2] for number in range(count)]
        most = max(tokens // 4, 1)
        trial.sample(prompts[:1], most)
        began = time.perf_counter()
        drawn = trial.sample(prompts, most)
        rate = sum(len(sequence.tokens) for sequence in drawn) / (time.perf_counter() - began)
        yield Finding(f"sampling speed, {count} at once", "number", f"{rate:,.0f} tokens/s")


def _datum(tokens: Sequence[int]) -> Datum:
    return Datum(
        ModelInput.from_ints(list(tokens[:-1])),
        {"target_tokens": list(tokens[1:]), "weights": [1.0] * (len(tokens) - 1)},
    )


def _equal(check: str, expected: Sequence[str], found: Sequence[str], what: str) -> Finding:
    same = sum(one == other for one, other in zip(expected, found, strict=True))
    return Finding(
        check, _judged(same == len(expected)), f"{same} of {len(expected)} results equal to the last bit: {what}"
    )


def _judged(is_right: bool) -> Outcome:
    return "ok" if is_right else "wrong"


def _finished(steps: Generator[None, None, Done | Beside]) -> Done:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            ending: Done | Beside = end.value
            return ending.finish() if isinstance(ending, Beside) else ending


def main() -> None:
    """Read a plan from the second argument, and print the findings of the first (`first` or `resumed`)."""
    logging.basicConfig(level=logging.WARNING)
    part, plan = sys.argv[1], msgspec.json.decode(sys.argv[2], type=TrialPlan)
    try:
        for finding in findings(plan) if part == "first" else resumed(plan):
            sys.stdout.buffer.write(msgspec.json.encode(finding) + b"\n")
            sys.stdout.flush()
    except (TinkerError, RuntimeError) as error:
        text = str(error).partition("\n")[0]
        sys.stdout.buffer.write(
            msgspec.json.encode(Finding("error", "wrong", f"{type(error).__name__}: {text}")) + b"\n"
        )


if __name__ == "__main__":
    main()

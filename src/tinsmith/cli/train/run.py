"""One run of `tinsmith train`: started or resumed, trained, saved and finished. What resuming needs is in `out`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.cli.dataset import DataFile, check_example, examples_of
from tinsmith.cli.dpo import check_pair, pairs_of
from tinsmith.cli.models import chosen_model
from tinsmith.cli.output import plural
from tinsmith.cli.report import Points, report_html
from tinsmith.cli.train.comparison import compared, prompts_of
from tinsmith.cli.train.objectives import Preferring, Supervised, reference_logprobs
from tinsmith.cli.train.sft import (
    Measured,
    Objective,
    Plan,
    Saved,
    TrainStep,
    Watcher,
    checkpoint_name,
    fine_tune,
    split,
)
from tinsmith.cli.train.state import (
    VERSION,
    MetricsFile,
    OutputError,
    RunPlan,
    RunState,
    read_reference,
    write_file,
    write_reference,
    write_state,
)
from tinsmith.client.find_tokenizer import tokenizer_of
from tinsmith.errors import APIStatusError, RequestFailedError, TinkerError

Note = Callable[[str], None]
Curves = Mapping[str, Mapping[str, Points]]
"""Values over steps, by what was measured and by the part of the data."""

LOSS = {"sft": "Loss per token", "dpo": "Loss per pair"}
MARGIN = (
    "how much more the chosen answer is preferred than before training, as a difference of logprobs; right is above 0"
)
TRAINING, HELD_OUT = "training", "held out"


def read_data(path: Path, method: str) -> DataFile:
    """Read and check a file for a method, so that a bad one is refused before anything starts."""
    return DataFile.read(path, check_pair if method == "dpo" else check_example)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """The results of a finished run."""

    checkpoint: str
    sampler: str
    adapter: Path | None
    no_adapter: str
    """Why there is no adapter; empty if there is one."""
    report: Path
    losses: Points
    held_out: Points


class TrainRun:
    """A run on a server, and its output directory."""

    def __init__(self, service: Any, plan: RunPlan, data: DataFile, out: Path, state: RunState | None, note: Note):
        self.plan = plan
        self.out = out
        self.state = state
        self._service = service
        self._data = data
        self._note = note
        self._metrics = MetricsFile(out)
        self._context: int | None = chosen_model(service, plan.model, use="trainable").max_context_length
        self._tokenizer = tokenizer_of(service.holder, plan.model, None)
        self.items, self.held_out = self._items()
        self._steps = Plan(
            epochs=plan.epochs, batch_size=plan.batch_size, learning_rate=plan.learning_rate, seed=plan.seed
        )
        self.batches = self._steps.batches(self.items)
        self.training = self._open()
        self._objective = self._make_objective()
        self._metrics.keep(self.first)
        if self.held_out and state is None:
            self._scored(0, self._objective.score(self.training, self.held_out)())

    @property
    def first(self) -> int:
        """The number of steps finished before this process started."""
        return self.state.step if self.state is not None else 0

    @property
    def total(self) -> int:
        return len(self.batches)

    @property
    def steps_per_epoch(self) -> int:
        return self.total // self.plan.epochs

    @property
    def tokens(self) -> int:
        return self._objective.tokens(self.items)

    def train(self, watcher: Watcher, save_every: int) -> bool:
        """Train until the end or until stopped, and save; return whether the end was reached."""

        def stepped(progress: TrainStep) -> None:
            self._metrics.add(
                {"step": progress.step, "loss": progress.loss, "tokens_per_s": progress.tokens_per_s}
                | dict(progress.metrics)
            )
            watcher.step(progress)

        def scored(step: int, measured: Measured) -> None:
            self._scored(step, measured)
            watcher.scored(step, measured)

        def saved(point: Saved) -> None:
            self._saved(point)
            watcher.saved(point)

        done = fine_tune(
            self.training,
            self._objective,
            self.batches,
            self._steps,
            Watcher(step=stepped, scored=scored, saved=saved, is_stopping=watcher.is_stopping),
            first=self.first,
            save_every=save_every,
            score_every=self.steps_per_epoch,
            held_out=self.held_out,
        )
        if self.state is None or self.state.step != done:
            saving = self.training.save_state(checkpoint_name(done))
            scoring = self._objective.score(self.training, self.held_out) if self.held_out else None
            saved(Saved(done, saving.result().path, scoring() if scoring is not None else None))
        return done == self.total

    def finish(self) -> TrainedModel:
        """Save the sampler checkpoint, the adapter files and the report."""
        assert self.state is not None
        sampler = self.training.save_weights_for_sampler("final").result().path
        adapter, why = self._export()
        report = self.out / "report.html"
        curves = curves_of(self._metrics.rows(), self.plan.method)
        answers, asked = self._answers(sampler)
        title = f"{self._data.path.name} on {self.plan.model}"
        page = report_html(title, self._figures(curves, sampler), curves, answers, asked)
        write_file(report, page.encode())
        self._write_state(self.state.checkpoint, self.total, sampler)
        losses = curves[LOSS[self.plan.method]]
        return TrainedModel(
            self.state.checkpoint, sampler, adapter, why, report, losses[TRAINING], losses.get(HELD_OUT, [])
        )

    def _items(self) -> tuple[list[Any], list[Any]]:
        read: Callable[..., list[Any]] = pairs_of if self.plan.method == "dpo" else examples_of
        items = read(self._data, self._tokenizer, self._context, truncate=self.plan.truncate)
        cut = [str(item.line) for item in items if item.is_cut]
        if cut:
            lines = ", ".join(cut[:10]) + (", ..." if len(cut) > 10 else "")
            self._note(f"truncated {len(cut)} of {len(items)} to {self._context} tokens (lines {lines})")
        kept, held_out = split(items, self.plan.eval_split, self.plan.seed)
        if self.plan.eval_split and not held_out:
            self._note(f"nothing is held out: {described(items, self.plan)} cannot be split")
        return kept, held_out

    def _open(self) -> Any:
        if self.state is None:
            return self._service.create_lora_training_client(self.plan.model, rank=self.plan.rank, seed=self.plan.seed)
        try:
            return self._service.create_training_client_from_state_with_optimizer(self.state.checkpoint)
        except (APIStatusError, RequestFailedError) as error:
            raise TinkerError(
                f"cannot load the checkpoint of step {self.state.step} ({self.state.checkpoint}): {error}\n"
                f"Is this the server that it was saved on? To start over, choose another --out or delete {self.out}."
            ) from error

    def _make_objective(self) -> Objective:
        if self.plan.method == "sft":
            return Supervised()
        reference = read_reference(self.out) if self.state is not None else None
        if reference is None:
            if self.state is not None:
                raise OutputError(
                    f"{self.out / 'reference.json'} is missing, and the run cannot be resumed without it; "
                    "restore it, or start a new run with another --out"
                )
            pairs = [*self.items, *self.held_out]
            self._note(f"computing reference logprobs of {len(pairs)} pairs")
            reference = reference_logprobs(self.training, pairs, self.plan.batch_size)
            write_reference(self.out, reference)
        return Preferring(reference, self.plan.beta)

    def _saved(self, point: Saved) -> None:
        if point.held_out is not None:
            self._scored(point.step, point.held_out)
        self._write_state(point.path, point.step, None)

    def _scored(self, step: int, measured: Measured) -> None:
        loss, metrics = measured
        row = {"step": step, "held_out_loss": loss} | {f"held_out_{name}": value for name, value in metrics.items()}
        self._metrics.add(row)

    def _write_state(self, checkpoint: str, step: int, sampler: str | None) -> None:
        state = RunState(
            version=VERSION,
            run=self.training.model_id,
            checkpoint=checkpoint,
            step=step,
            total=self.total,
            plan=self.plan,
            data=str(self._data.path),
            data_sha256=self._data.digest,
            sampler=sampler,
        )
        write_state(self.out, state)
        self.state = state

    def _export(self) -> tuple[Path | None, str]:
        """Download the adapter in PEFT's format; return its directory, or None and the server's reason."""
        directory = self.out / "adapter"
        try:
            exported = self.training.save_weights_external("final").result()
            self._service.create_rest_client().download_external_weights(exported.path, directory).result()
        except (APIStatusError, RequestFailedError) as error:
            return None, str(error)
        except OSError as error:
            raise OutputError(f"cannot write {directory}: {error.strerror or error}") from error
        return directory, ""

    def _answers(self, sampler: str) -> tuple[list[tuple[str, ...]], str]:
        """Return answers before and after training to a few prompts of the data, and a sentence about them."""
        items = self.held_out or self.items
        prompts = prompts_of(items, dict(self._data.rows), self._tokenizer, self._context)
        try:
            rows = compared(self._service, self.plan.model, sampler, self._tokenizer, prompts)
        except (APIStatusError, RequestFailedError) as error:  # for example a key that may train but not sample
            return [], f"There are no answers to compare: {error}"
        return rows, f"Greedy answers to prompts {'that were held out' if self.held_out else 'of the training data'}."

    def _figures(self, curves: Curves, sampler: str) -> dict[str, str]:
        plan = self.plan
        noun = "pair" if plan.method == "dpo" else "example"
        kind = "preference pairs, DPO" if plan.method == "dpo" else "examples"
        epochs = plural(plan.epochs, "epoch")
        figures = {
            "Base model": plan.model,
            "Adapter": f"LoRA, rank {plan.rank}",
            "Data": f"{self._data.path.name}: {len(self.items)} {kind}, {self.tokens} tokens, {epochs}",
            "Held out": plural(len(self.held_out), noun) if self.held_out else "nothing (see --eval-split)",
            "Steps": f"{plural(self.total, 'step')} of {plural(min(plan.batch_size, len(self.items)), noun)}",
            "Learning rate": f"{plan.learning_rate:g}, decaying to 0",
        }
        if plan.method == "dpo":
            figures["Beta"] = f"{plan.beta:g}"
        for name, series in curves.items():
            figures[name] = "; ".join(f"{part} {ends(points)}" for part, points in series.items())
        if plan.method == "dpo":
            figures["Margin"] += f" ({MARGIN})"
        return figures | {"Checkpoint": self.state.checkpoint if self.state else "", "Sampler checkpoint": sampler}


def curves_of(rows: Sequence[Mapping[str, Any]], method: str) -> Curves:
    """Return what was measured at each step: the loss and, with DPO, the share of pairs right and the margin."""
    curves: dict[str, Mapping[str, Points]] = {LOSS[method]: _series(rows, "loss")}
    if method == "dpo":
        curves["Share right (%)"] = _series(rows, "accuracy", scale=100.0)
        curves["Margin"] = _series(rows, "margin")
    return curves


def _series(rows: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> Mapping[str, Points]:
    parts = {TRAINING: name, HELD_OUT: f"held_out_{name}"}
    found = {part: [(row["step"], scale * row[key]) for row in rows if key in row] for part, key in parts.items()}
    return {part: points for part, points in found.items() if points or part == TRAINING}


def ends(points: Points) -> str:
    """Format the first and the last value."""
    return f"{points[0][1]:.4g} to {points[-1][1]:.4g}" if points else "unknown"


def described(items: Sequence[Any], plan: RunPlan) -> str:
    noun = "pair" if plan.method == "dpo" else "example"
    return plural(len(items), noun)

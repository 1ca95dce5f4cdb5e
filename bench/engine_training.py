"""LoRA training on SmolLM2-135M: tinsmith's trainer against transformers + peft, in turns on the same machine.

Each side runs in its own process, and they take steps in turns, so that other load on the machine affects both alike;
peak memory is measured per process. Rank 32 on all linears of the layers, float32.

    python bench/engine_training.py [--rounds 5] [--threads 2] [--cache ~/.cache/tinsmith]
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = 32
SIDES = ("tinsmith", "peft")
PEAK_SIZE = 2048


def sequences(batch: str) -> list[list[int]]:
    """Return random token ids, `full` or `ragged`; the last token of each sequence is only a target.

    peft needs about 18 GB for the ragged batch; use `ragged-half` on machines with less.
    """
    import numpy as np

    source = np.random.default_rng(0)
    count = {"full": 8, "ragged": 32, "ragged-half": 16}[batch]
    lengths = [256] * count if batch == "full" else [int(length) for length in source.integers(20, 121, count)]
    return [source.integers(0, 49152, length + 1).tolist() for length in lengths]


def tinsmith_step(directory: Path, batch: str) -> Callable[[], float]:
    import numpy as np

    from tinsmith.engine.lora import LoraAdapter
    from tinsmith.engine.models.load import load_model
    from tinsmith.engine.training.trainer import Trainer
    from tinsmith.engine.worker import memory
    from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardRequest
    from tinsmith.wire.values.inputs import Datum, ModelInput

    memory.keep()  # as every engine does when it starts
    model = load_model(directory, cache_dir=directory.parent)
    adapter = LoraAdapter(model.config, RANK, seed=0, train_unembed=False)
    trainer = Trainer(model.decoder)
    data = [
        Datum(
            ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)},
        )
        for tokens in sequences(batch)
    ]
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=work, model_id="bench", seq_id=1)

    def step() -> float:
        adapter.zero_gradients()
        return trainer.forward_backward(adapter, request, backward=True).metrics["loss:sum"]

    return step


def peft_step(directory: Path, batch: str) -> Callable[[], float]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=32, lora_dropout=0.0, target_modules=modules, task_type="CAUSAL_LM")
    model = get_peft_model(base, config).train()
    rows = [torch.tensor(tokens) for tokens in sequences(batch)]
    pad = torch.nn.utils.rnn.pad_sequence
    inputs = pad([row[:-1] for row in rows], batch_first=True, padding_value=0)
    targets = pad([row[1:] for row in rows], batch_first=True, padding_value=-100)
    mask = pad([torch.ones(len(row) - 1, dtype=torch.int64) for row in rows], batch_first=True)

    def step() -> float:
        model.zero_grad()
        logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        return float(loss.detach())

    return step


def measure_peak() -> float:
    """Return the GFLOP/s of a large product: the machine's practical limit at this moment."""
    import torch

    left, right = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return 2 * PEAK_SIZE**3 / min(times) / 1e9


def child(side: str, batch: str, directory: Path, threads: int) -> None:
    """Take a step for each line read, and answer with its measurements."""
    import torch

    torch.set_num_threads(threads)
    step = {"tinsmith": tinsmith_step, "peft": peft_step}[side](directory, batch)
    for line in sys.stdin:
        if line.strip() == "peak":
            print(json.dumps({"peak": measure_peak()}), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "loss": loss}
        took["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(took), flush=True)


class Side:
    """One process that is being measured."""

    def __init__(self, side: str, batch: str, directory: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--child", side, "--batch", batch, "--threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, "--directory", str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = side
        self.steps: list[dict[str, Any]] = []

    def ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{self.name}: the process ended with {self._process.wait()} (-9: most likely out of memory)"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def step(self) -> None:
        self.steps.append(self.ask("step"))

    def median(self, what: str) -> float:
        return statistics.median(step[what] for step in self.steps[1:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def flops_per_token(lengths: list[int]) -> float:
    """Return the operations of a step per token: base forward and backward, LoRA three times, attention."""
    layers, hidden, middle, kv, vocab = 30, 576, 1536, 192, 49152
    base = layers * (hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * middle) + vocab * hidden
    sizes = [(hidden, hidden), (hidden, kv), (hidden, kv), (hidden, hidden), *[(hidden, middle)] * 3]
    lora = layers * RANK * sum(rows + columns for rows, columns in sizes)
    seen = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
    return 4 * base + 6 * lora + layers * 2 * 2 * hidden * seen * 3.5


def compare(batch: str, directory: Path, rounds: int, threads: int) -> None:
    lengths = [len(tokens) - 1 for tokens in sequences(batch)]
    sides = {side: Side(side, batch, directory, threads) for side in SIDES}
    peaks = []
    for _ in range(rounds + 1):
        for side in sides.values():
            side.step()
        peaks.append(sides["tinsmith"].ask("peak")["peak"])
    tokens = sum(lengths)
    for name, side in sides.items():
        rate = tokens / side.median("wall")
        share = rate * flops_per_token(lengths) / 1e9 / statistics.median(peaks)
        print(
            f"{batch:11} {name:9} {rate:6.0f} tokens/s, {share:4.0%} of {statistics.median(peaks):.0f} GFLOP/s; "
            f"CPU {side.median('cpu') / tokens * 1e3:5.2f} ms per token; first step {side.steps[0]['wall']:.1f} s, "
            f"later {side.median('wall'):.1f} s; peak {side.steps[-1]['memory']:.2f} GiB; "
            f"loss {side.steps[-1]['loss']:.2f}"
        )
    ours, theirs = (sides[name] for name in SIDES)
    in_turn = [b["wall"] / a["wall"] for a, b in zip(ours.steps[1:], theirs.steps[1:], strict=True)]
    print(
        f"{batch:11} ratio: {statistics.median(in_turn):.2f}x tokens/s (each round: "
        f"{', '.join(f'{ratio:.2f}' for ratio in in_turn)}), {theirs.median('cpu') / ours.median('cpu'):.2f}x by CPU "
        f"time, {ours.steps[-1]['memory'] / theirs.steps[-1]['memory']:.2f} of the memory, "
        f"first step {ours.steps[0]['wall'] / ours.median('wall'):.1f}x a later one"
    )
    for side in sides.values():
        side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", choices=("full", "ragged", "ragged-half"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tinsmith")
    parser.add_argument("--child", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.batch, arguments.directory, arguments.threads)
        return
    from tinsmith.engine.models.sources import default_model

    directory = default_model(arguments.cache)
    print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {arguments.threads} threads"
    )
    for batch in [arguments.batch] if arguments.batch else ["full", "ragged"]:
        compare(batch, directory, arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()

"""Sampling speed of the engine against transformers and openvino-genai, in turns, on the default model.

    .venv/bin/python bench/engine_sampling.py --model DIR [--openvino-python PY --openvino-model FILE]

Prints new tokens per second including prefill, CPU seconds per 1,000 tokens, the cost of adapters and shared prompts,
how far the sampler's logprobs are from the trainer's, and the machine's limits. Other load on the machine slows all
engines alike, so trust the ratios. Each engine runs in its own process and waits while another is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, NEW = 128, 128
VOCABULARY = 49152
RESULT = "RESULT "


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(10, VOCABULARY, (count, length)).tolist()


def measured(run: Any) -> dict[str, float]:
    """Return wall and CPU seconds of a call, and the number of new tokens that it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}


class Ours:
    """The engine's sampler."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from tinsmith.engine.models.load import load_model
        from tinsmith.engine.sampling.sampler import Sampler, SamplerLimits
        from tinsmith.engine.worker import memory

        torch.set_num_threads(options.threads)
        memory.keep()  # as every engine does when it starts
        self.decoder = load_model(options.model, cache_dir=Path(options.model)).decoder
        limits = SamplerLimits(block_size=options.block_size, cache_bytes=2**31, prefill_tokens=options.prefill)
        self.sampler = Sampler(self.decoder, (), limits)
        self._jobs = 0

    def generate(self, concurrent: int, new: int, seed: int) -> int:
        return self.run(prompts(concurrent, PROMPT, seed), new)[0]

    def run(
        self, asked: list[list[int]], new: int, adapters: list[str | None] | None = None, samples: int = 1
    ) -> tuple[int, list[Any]]:
        from tinsmith.engine.sampling.plan import SampleJob
        from tinsmith.engine.sampling.sampler import DoneEvent, NewToken
        from tinsmith.wire.messages.sampling import SampleRequest, SamplingParams
        from tinsmith.wire.values.inputs import ModelInput

        for i, prompt in enumerate(asked):
            self._jobs += 1
            params = SamplingParams(max_tokens=new, stop=[])
            request = SampleRequest(prompt=ModelInput.from_ints(prompt), sampling_params=params, num_samples=samples)
            adapter = adapters[i % len(adapters)] if adapters else None
            self.sampler.add(SampleJob(id=str(self._jobs), request=request, seed=self._jobs, adapter=adapter))
        tokens, answers = 0, []
        while self.sampler.has_work:
            for event in self.sampler.step().events:
                tokens += isinstance(event, NewToken)
                if isinstance(event, DoneEvent):
                    answers.append(event.response)
        return tokens, answers

    def adapters(self, count: int, concurrent: int, new: int, seed: int) -> int:
        """Draw samples from `count` adapters of rank 32 on all linears."""
        from tinsmith.engine.lora import LoraAdapter

        names: list[str | None] = [f"adapter {i}" for i in range(count)]
        for i, name in enumerate(names):
            if not self.sampler.has_adapter(name):
                self.sampler.add_adapter(name, LoraAdapter(self.decoder.config, 32, i))
        return self.run(prompts(concurrent, PROMPT, seed), new, names)[0]

    def shared(self, samples: int, length: int, seed: int) -> int:
        """Draw the first tokens of several samples of one prompt: the cost of prefill."""
        return self.run(prompts(1, length, seed), 1, samples=samples)[0]

    def on_policy(self, seed: int) -> float:
        """Return the largest difference between the sampler's logprobs and those of a full forward pass."""
        import torch

        from tinsmith.engine.models.attention import PackedAttention

        worst = 0.0
        for i in range(2):
            prompt = prompts(1, PROMPT, seed + i)[0]
            _, answers = self.run([prompt], 48)
            drawn = answers[0].sequences[0]
            tokens = prompt + drawn.tokens
            with torch.no_grad():
                attend = PackedAttention(self.decoder.config, [len(tokens)])
                hidden = self.decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)
                logprobs = self.decoder.unembed(hidden[len(prompt) - 1 : -1]).log_softmax(1)
            scores = logprobs.gather(1, torch.tensor(drawn.tokens).unsqueeze(1)).squeeze(1).numpy()
            worst = max(worst, float(np.abs(scores - drawn.logprobs_np).max()))
        return worst

    def exact(self, seed: int) -> str:
        """Return how many samples are the same, bit for bit, drawn together and alone."""
        asked = prompts(9, 40, seed)
        first = self._jobs
        together = self.run(asked, 24, ["adapter 0", None, "adapter 1"])[1]
        equal = 0
        for i, prompt in enumerate(asked):
            self._jobs = first + i
            alone = self.run([prompt], 24, [["adapter 0", None, "adapter 1"][i % 3]])[1][0].sequences[0]
            equal += any(
                alone.tokens == other.sequences[0].tokens and alone.logprobs == other.sequences[0].logprobs
                for other in together
            )
        return f"{equal} of {len(asked)}"

    def limits(self) -> dict[str, float]:
        """Return the GFLOP/s of a large product, and the GB/s of reading more than fits into the caches."""
        import torch

        a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        large = torch.randn(2**26)
        return {
            "gflops": 2 * 1024**3 / _best(lambda: torch.mm(a, b)) / 1e9,
            "gbytes": large.nbytes / _best(lambda: large.sum()) / 1e9,
            "weight_bytes": float(sum(p.nbytes for p in _weights(self.decoder))),
        }


def _best(run: Any) -> float:
    times = []
    for _ in range(15):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _weights(decoder: Any) -> list[Any]:
    layers = [
        module.weight_ED for layer in decoder.layers for module in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return [*layers, decoder.unembedding.weight_ED]


class Transformers:
    """`generate` with its default cache."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)

    def generate(self, concurrent: int, new: int, seed: int) -> int:
        import torch

        ids = torch.tensor(prompts(concurrent, PROMPT, seed))
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=new,
                min_new_tokens=new,
                pad_token_id=0,
            )
        return int(out.numel() - ids.numel())


class OpenVino:
    """Continuous batching in float32; the model comes as an F16 GGUF file."""

    def __init__(self, options: argparse.Namespace) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        config = openvino_genai.SchedulerConfig()
        config.cache_size, config.enable_prefix_caching = 2, False
        config.max_num_batched_tokens = options.prefill
        settings = {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "INFERENCE_NUM_THREADS": options.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.openvino_model, config, "CPU", settings)

    def generate(self, concurrent: int, new: int, seed: int) -> int:
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, True
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts(concurrent, PROMPT, seed)]
        results = self._pipeline.generate(ids, [config] * concurrent)
        return sum(len(result.m_generation_ids[0]) for result in results)


ENGINES = {"tinsmith": Ours, "transformers": Transformers, "openvino-genai": OpenVino}


def worker(options: argparse.Namespace) -> None:
    """Answer each line [method, arguments] with a line of JSON."""
    engine = ENGINES[options.worker](options)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        call = getattr(engine, method)
        is_plain = method in ("on_policy", "limits", "exact")
        answer = call(*arguments) if is_plain else measured(lambda call=call, args=arguments: call(*args))
        print(RESULT + json.dumps(answer), flush=True)


class Process:
    """A worker in its own process."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        python = options.openvino_python if name == "openvino-genai" else sys.executable
        command = [python, __file__, "--worker", name, "--model", options.model, "--threads", str(options.threads)]
        command += ["--block-size", str(options.block_size), "--prefill", str(options.prefill)]
        command += ["--openvino-model", options.openvino_model]
        root = Path(__file__).resolve().parents[1]
        environment = {**os.environ, "PYTHONPATH": str(root / "src")}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, method: str, *arguments: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        raise SystemExit(f"the worker ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def report(results: list[dict[str, float]]) -> tuple[float, float, float]:
    """Median and best tokens/s, and CPU seconds per 1,000 tokens."""
    rates = [result["tokens"] / result["wall"] for result in results]
    return statistics.median(rates), max(rates), min(1000 * result["cpu"] / result["tokens"] for result in results)


def compare(processes: dict[str, Process], options: argparse.Namespace) -> None:
    """Measure each engine at each concurrency, in turns."""
    print(f"{'concurrent':>10} {'engine':>16} {'tokens/s':>9} {'best':>7} {'CPU s / 1,000':>14}")
    for concurrent in options.concurrent:
        results: dict[str, list[dict[str, float]]] = {name: [] for name in processes}
        for number in range(options.rounds):
            for name, process in processes.items():
                results[name].append(process.ask("generate", concurrent, options.new, 100 * number + concurrent))
        for name, measurements in results.items():
            median, best, cpu = report(measurements)
            print(f"{concurrent:>10} {name:>16} {median:>9.1f} {best:>7.1f} {cpu:>14.2f}", flush=True)


def ratios(ours: Process, options: argparse.Namespace) -> None:
    """Print the cost of adapters and shared prompts, by CPU time and by wall time."""
    one, four, base, single, eight = [], [], [], [], []
    for number in range(options.rounds):
        base.append(ours.ask("generate", 32, options.new // 2, 7000 + number))
        one.append(ours.ask("adapters", 1, 32, options.new // 2, 7000 + number))
        four.append(ours.ask("adapters", 4, 32, options.new // 2, 7000 + number))
        single.append(ours.ask("shared", 1, 512, 8000 + 2 * number))
        eight.append(ours.ask("shared", 8, 512, 8001 + 2 * number))
    for name, upper, lower in (
        ("one adapter / base, tokens/s at 32", base, one),
        ("four adapters / one adapter, tokens/s at 32", one, four),
        ("8 samples of a 512-token prompt / 1, time", eight, single),
    ):
        wall, cpu = (min(part[key] for part in upper) / min(part[key] for part in lower) for key in ("wall", "cpu"))
        print(f"{name}: {wall:.2f} (by CPU time {cpu:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--openvino-python", default="")
    parser.add_argument("--openvino-model", default="")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--worker", choices=list(ENGINES))
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    names = [name for name in ENGINES if name != "openvino-genai" or options.openvino_python]
    processes = {name: Process(name, options) for name in names}
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.threads} threads",
        flush=True,
    )
    for process in processes.values():
        process.ask("generate", 2, 4, 1)
    ours = processes["tinsmith"]
    print(f"on-policy: max |delta logprob| {ours.ask('on_policy', 1):.2e}", flush=True)
    limits = ours.ask("limits")
    step_ms = limits["weight_bytes"] / limits["gbytes"] / 1e6
    print(
        f"GEMM {limits['gflops']:.0f} GFLOP/s, reading {limits['gbytes']:.1f} GB/s: the weights take {step_ms:.1f} ms"
    )
    compare(processes, options)
    ratios(ours, options)
    print(f"drawn in a batch and alone, equal to the last bit: {ours.ask('exact', 5)}", flush=True)
    for process in processes.values():
        process.close()
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""One side of bench/sdk.py: the same program for either client, named on the command line.

usage: python sdk_client.py MODULE URL TASK [ARGUMENT]   prints one JSON line
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

PROMPT = list(range(128))
DATUMS, LENGTH = 64, 4096


def measured(work: Any) -> dict[str, float]:
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    count = work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "count": count}


def sample(tinker: Any, client: Any, outstanding: int, count: int) -> dict[str, Any]:
    """`count` samples, `outstanding` at a time."""
    sampler = client.create_sampling_client(base_model="stub/model")
    prompt = tinker.ModelInput.from_ints(PROMPT)
    params = tinker.SamplingParams(max_tokens=16)
    peak = {"threads": 0, "sockets": 0}

    async def run(count: int) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await sampler.sample_async(prompt, 1, params)

        async def watch() -> None:
            while True:
                peak["threads"] = max(peak["threads"], threads())
                peak["sockets"] = max(peak["sockets"], sockets())
                await asyncio.sleep(0.25)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(worker() for _ in range(outstanding)))
        watching.cancel()

    def work() -> int:
        asyncio.run(run(count))
        return count

    asyncio.run(run(min(outstanding, 50)))
    return {**measured(work), **peak}


def train(tinker: Any, client: Any, count: int) -> dict[str, Any]:
    """Pairs of a small forward_backward and an optim_step, each waited for."""
    training = client.create_lora_training_client("stub/model", rank=8)
    tokens = list(range(8))
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": [1.0] * 8},
    )
    params = tinker.AdamParams(learning_rate=1e-4)

    def work(count: int = count) -> int:
        for _ in range(count):
            first = training.forward_backward([datum], "cross_entropy")
            second = training.optim_step(params)
            first.result()
            second.result()
        return count

    work(10)
    return measured(work)


def step(tinker: Any, client: Any, count: int) -> dict[str, Any]:
    """Whole steps of 64 x 4096 tokens from lists: build, send, fetch the logprobs."""
    training = client.create_lora_training_client("stub/model", rank=8)
    rows = [[(i * 7919 + j * 104729) % 49152 for j in range(LENGTH)] for i in range(DATUMS)]
    weights = [1.0] * LENGTH
    params = tinker.AdamParams(learning_rate=1e-4)

    def work(count: int = count) -> int:
        for _ in range(count):
            data = [
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(row),
                    loss_fn_inputs={"target_tokens": row, "weights": weights},
                )
                for row in rows
            ]
            first = training.forward_backward(data, "cross_entropy")
            second = training.optim_step(params)
            outputs = first.result().loss_fn_outputs
            assert len(outputs) == DATUMS, len(outputs)
            sum(float(output["logprobs"].to_numpy().sum()) for output in outputs)
            second.result()
        return count

    work(2)
    return measured(work)


def release(tinker: Any, client: Any, count: int) -> dict[str, Any]:
    """What is left after 1,000 outstanding samples and close()."""
    before = {"threads": threads(), "sockets": sockets(), "rss_mb": rss_mb()}
    result = sample(tinker, client, 1000, count)
    client.close("success")
    gc.collect()
    time.sleep(0.3)
    after = {"threads": threads(), "sockets": sockets(), "rss_mb": rss_mb()}
    return {"before": before, "peak": {key: result[key] for key in ("threads", "sockets")}, "after": after}


def threads() -> int:
    return max(threading.active_count(), len(list(Path("/proc/self/task").iterdir())))


def sockets() -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    return count


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    module, url, task, *arguments = sys.argv[1:]
    tinker = importlib.import_module(module)
    client = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    tasks = {"sample": sample, "train": train, "step": step, "release": release}
    result = tasks[task](tinker, client, *(int(argument) for argument in arguments))
    print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the official client's threads would linger


if __name__ == "__main__":
    main()

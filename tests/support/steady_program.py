"""A steady load for crash tests: trains and samples with some requests always outstanding, then prints all results.

Run as `python steady_program.py MODULE STOP_FILE COUNT`; MODULE is `tinker` or one in its place, the server and the key
come from the environment. It ends when the file exists, or after COUNT rounds. Prints `ready` when it has begun; the
last line is JSON. Everything is seeded: two runs of as many rounds give the same. Nothing here imports tinsmith.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

tinker = importlib.import_module(sys.argv[1])
types = tinker.types
STOP_FILE, COUNT = Path(sys.argv[2]), int(sys.argv[3])

OUTSTANDING = 4
PAUSE_S = 0.01
"""Between rounds, so that the load is steady rather than all that the machine can do."""


def datum(number: int) -> Any:
    tokens = [number % 200 + offset for offset in range(1, 5)]
    inputs = {"target_tokens": [*tokens[1:], 7], "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def main() -> None:
    service = tinker.ServiceClient()
    model = service.get_server_capabilities().supported_models[0].model_name
    trainer = service.create_lora_training_client(base_model=model, rank=4, seed=5)
    sampler = service.create_sampling_client(base_model=model)
    print("ready", flush=True)
    waiting: deque[tuple[Any, Any, Any]] = deque()
    results: list[Any] = []
    count = 0
    while count < COUNT and not STOP_FILE.exists():
        params = types.SamplingParams(max_tokens=3, seed=count)
        waiting.append(
            (
                trainer.forward_backward([datum(count)], "cross_entropy"),
                trainer.optim_step(types.AdamParams(learning_rate=0.01)),
                sampler.sample(types.ModelInput.from_ints([1, count % 100]), 1, params),
            )
        )
        count += 1
        if len(waiting) == OUTSTANDING:
            results.append(told(waiting.popleft()))
        time.sleep(PAUSE_S)
    results += [told(round_) for round_ in waiting]
    last = trainer.save_weights_and_get_sampling_client().compute_logprobs(types.ModelInput.from_ints([1, 2, 3, 4]))
    print(json.dumps({"count": count, "rounds": results, "last": last.result()}))


def told(futures: tuple[Any, Any, Any]) -> list[Any]:
    passed, stepped, sampled = (future.result() for future in futures)
    return [passed.metrics["loss:sum"], stepped.metrics["optim/grad_norm"], list(sampled.sequences[0].tokens)]


if __name__ == "__main__":
    main()

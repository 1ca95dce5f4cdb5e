"""One tenant of the torture: trains, samples and saves with requests always outstanding, then prints all it got.

Run as `python torture_program.py MODULE SEED STOP_FILE COUNT`; MODULE is `tinker` or one in its place, the server and
the key come from the environment. Ends when the file exists, or after COUNT rounds. Prints `ready` when it has begun;
the last line is JSON. Everything depends on SEED and the number of rounds alone. Nothing here imports tinsmith.
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
SEED, STOP_FILE, COUNT = int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])

OUTSTANDING = 3
PAUSE_S = 0.02
SAMPLER_EVERY = 8
"""Rounds between two frozen copies of the weights to sample from."""
SAVE_EVERY = 20


def datum(number: int) -> Any:
    tokens = [(SEED * 31 + number * 7 + offset * offset) % 250 + 4 for offset in range(6 + number % 5)]
    inputs = {"target_tokens": [*tokens[1:], 9], "weights": [1.0] * len(tokens)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def main() -> None:
    service = tinker.ServiceClient()
    model = service.get_server_capabilities().supported_models[0].model_name
    trainer = service.create_lora_training_client(base_model=model, rank=4, seed=SEED)
    sampler = service.create_sampling_client(base_model=model)
    print("ready", flush=True)
    waiting: deque[dict[str, Any]] = deque()
    rounds: list[Any] = []
    count = 0
    while count < COUNT and not STOP_FILE.exists():
        params = types.SamplingParams(max_tokens=4, seed=SEED + count, temperature=1.0)
        passes = [trainer.forward_backward([datum(count)], "cross_entropy") for _ in range(1 + count % 2)]
        waiting.append(
            {
                "passes": passes,
                "step": trainer.optim_step(types.AdamParams(learning_rate=0.01)),
                "sample": sampler.sample(types.ModelInput.from_ints([5, 6, count % 200 + 4]), 2, params),
            }
        )
        count += 1
        if count % SAMPLER_EVERY == 0:
            sampler = trainer.save_weights_and_get_sampling_client()
        if count % SAVE_EVERY == 0:
            trainer.save_state(f"state-{count}").result()
        if len(waiting) >= OUTSTANDING:
            rounds.append(told(waiting.popleft()))
        time.sleep(PAUSE_S)
    rounds += [told(futures) for futures in waiting]
    end = trainer.save_state("end").result().path
    resumed = {
        "as it was": one_step(service.create_training_client_from_state_with_optimizer(end)),
        "loaded": one_step(loaded(trainer, end)),
        "weights only": one_step(service.create_training_client_from_state(end)),
    }
    assert resumed["as it was"] == resumed["loaded"], "a state that was saved did not come back as it was"
    assert resumed["weights only"]["step"]["optim/step"] == 1.0
    assert resumed["weights only"]["metrics"] == resumed["as it was"]["metrics"], "the weights differ"
    print(json.dumps({"count": count, "rounds": rounds, "end": end, "resumed": resumed}))


def loaded(trainer: Any, path: str) -> Any:
    """The trainer itself, some steps further and back again."""
    one_step(trainer)
    trainer.load_state_with_optimizer(path).result()
    return trainer


def one_step(trainer: Any) -> dict[str, Any]:
    passed = trainer.forward_backward([datum(1), datum(2)], "cross_entropy")
    stepped = trainer.optim_step(types.AdamParams(learning_rate=0.01))
    return {"metrics": passed.result().metrics, "step": stepped.result().metrics}


def told(futures: dict[str, Any]) -> dict[str, Any]:
    passes = [future.result() for future in futures["passes"]]
    drawn = futures["sample"].result()
    return {
        "metrics": [result.metrics for result in passes],
        "logprobs": [list(result.loss_fn_outputs[0]["logprobs"].data) for result in passes],
        "step": futures["step"].result().metrics,
        "samples": [[list(one.tokens), list(one.logprobs)] for one in drawn.sequences],
    }


if __name__ == "__main__":
    main()

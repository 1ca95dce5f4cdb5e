"""A client at the end of its key's tokens for the day: what it raises for a sample and for a training pass.

Run as `python budget.py`; the server and the key, which has a budget of four tokens, come from TINKER_BASE_URL and
TINKER_API_KEY. The last line of the output is JSON: a list of [step, value], where a value may be {"raises": class
name, "text": message}. Nothing here imports tinsmith.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tinker
from tinker import types

steps: list[tuple[str, Any]] = []


def datum(length: int) -> Any:
    inputs = {"target_tokens": [1] * length, "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints([1] * length), loss_fn_inputs=inputs)


def step(name: str, call: Callable[[], Any]) -> None:
    try:
        call()
        steps.append((name, "done"))
    except Exception as error:  # what is raised is what the test looks at
        steps.append((name, {"raises": type(error).__name__, "text": str(error)}))


service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
trainer = service.create_lora_training_client(base_model=model, rank=2)
sampler = service.create_sampling_client(base_model=model)
prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=5)

step("pass within the budget", lambda: trainer.forward_backward([datum(2)], "cross_entropy").result())
step("sample beyond it", lambda: sampler.sample(prompt, 1, params).result())
step("pass beyond it", lambda: trainer.forward_backward([datum(5)], "cross_entropy").result())
step("step after it", lambda: trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result())
print(json.dumps(steps))

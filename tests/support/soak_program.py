"""One program of the soak, with our client: trains, samples, saves and resumes, as its seed says.

Run as `python soak_program.py SEED`; the server and the key come from the environment.
"""

from __future__ import annotations

import sys

import tinsmith
from tinsmith import types

TTL_S = 4


def main(seed: int) -> None:
    with tinsmith.ServiceClient() as service:
        model = service.get_server_capabilities().supported_models[0].model_name
        trainer = service.create_lora_training_client(base_model=model or "", rank=4, seed=seed)
        tokens = [(seed * 31 + offset * offset) % 250 + 4 for offset in range(10)]
        inputs = {"target_tokens": [*tokens[1:], 9], "weights": [1.0] * len(tokens)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
        for number in range(6):
            trainer.forward_backward([datum], "cross_entropy")
            trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
            sampler = trainer.save_weights_and_get_sampling_client()
            sampler.sample(types.ModelInput.from_ints(tokens), 2, types.SamplingParams(max_tokens=8)).result()
            path = trainer.save_state(f"state-{number}", ttl_seconds=TTL_S).result().path
        trainer.load_state_with_optimizer(path).result()


if __name__ == "__main__":
    main(int(sys.argv[1]))

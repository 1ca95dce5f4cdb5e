"""Learning over HTTP with a Tinker package, as a program would do it: `learning.py PACKAGE MODEL [PART...]`.

The address and key come from the environment. Prints one JSON object: what was measured of each part. Works with token
ids alone, so that it needs no tokenizer.
"""

from __future__ import annotations

import importlib
import json
import random
import sys

import numpy as np

tinker = importlib.import_module(sys.argv[1])
types = tinker.types
MODEL = sys.argv[2]
IS_QUICK = "--quick" in sys.argv

PROMPTS = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
ANSWERS = [[41, 42, 43, 44], [51, 52, 53, 54], [61, 62, 63, 64]]
RATE = 1e-2 if IS_QUICK else 1e-3


def text(tokens):
    return types.ModelInput.from_ints(tokens)


def fact(prompt, answer):
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(model_input=text(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights})


def step(client, data, loss="cross_entropy", config=None, rate=RATE):
    passed = client.forward_backward(data, loss, config) if config else client.forward_backward(data, loss)
    client.optim_step(types.AdamParams(learning_rate=rate)).result()
    return passed.result()


def greedy(sampler, prompt, count):
    params = types.SamplingParams(max_tokens=count, temperature=0.0, stop=[])
    return list(sampler.sample(text(prompt), 1, params).result().sequences[0].tokens)


def logprobs(client, tokens):
    data = [fact(tokens[:1], tokens[1:])]
    return np.asarray(client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data, np.float32)


def memorise(service):
    client = service.create_lora_training_client(MODEL, rank=8, seed=1)
    data = [fact(prompt, answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    losses = [step(client, data).metrics["loss:sum"]]
    early = client.save_weights_and_get_sampling_client()
    before = greedy(early, PROMPTS[0], 6)
    losses += [step(client, data).metrics["loss:sum"] for _ in range(120 if IS_QUICK else 25)]
    late = client.save_weights_and_get_sampling_client()
    recalled = [greedy(late, prompt, 4) == answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    return {
        "losses": [losses[0], losses[-1]],
        "recalled": recalled,
        "frozen": greedy(early, PROMPTS[0], 6) == before,
    }


def on_policy(service):
    client = service.create_lora_training_client(MODEL, rank=4, seed=2)
    step(client, [fact(PROMPTS[0], ANSWERS[0])])
    sampler = client.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=5, stop=[])
    gaps = []
    for sequence in sampler.sample(text(PROMPTS[1]), 4, params).result().sequences:
        tokens = PROMPTS[1] + list(sequence.tokens)
        mine = logprobs(client, tokens)[len(PROMPTS[1]) - 1 :]
        gaps.append(float(np.abs(mine - np.asarray(sequence.logprobs, np.float32)).max()))
    return {"largest_gap": max(gaps)}


def reinforce(service, loss):
    """The reward of a token is whether it is below the middle of the first thousand ids (or of a tiny vocabulary)."""
    client = service.create_lora_training_client(MODEL, rank=8, seed=3)
    rewards = []
    for round_ in range(8):
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=round_, stop=[])
        data, gained = [], []
        for sequence in sampler.sample(text(PROMPTS[2]), 16, params).result().sequences:
            tokens = list(sequence.tokens)
            gained.append(sum(token % 2 == 0 for token in tokens) / len(tokens))
            advantages = [1.0 if token % 2 == 0 else -1.0 for token in tokens]
            padding = [0.0] * (len(PROMPTS[2]) - 1)
            whole = PROMPTS[2] + tokens
            data.append(
                types.Datum(
                    model_input=text(whole[:-1]),
                    loss_fn_inputs={
                        "target_tokens": whole[1:],
                        "logprobs": padding + list(sequence.logprobs),
                        "advantages": padding + advantages,
                    },
                )
            )
        rewards.append(sum(gained) / len(gained))
        step(client, data, loss, rate=RATE)
    return {"rewards": rewards}


def prefer(service):
    """DPO by a custom loss: ln 2 at first, then less."""
    import torch

    client = service.create_lora_training_client(MODEL, rank=8, seed=4)
    data = [fact(PROMPTS[0], ANSWERS[0]), fact(PROMPTS[0], ANSWERS[1])]
    start = len(PROMPTS[0]) - 1
    reference = [logprobs(client, PROMPTS[0] + answer)[start:].sum() for answer in ANSWERS[:2]]

    def loss(_, found):
        chosen, rejected = (values[start:].sum() for values in found)
        margin = (chosen - float(reference[0])) - (rejected - float(reference[1]))
        value = -torch.nn.functional.logsigmoid(0.1 * margin)
        return value, {"dpo:mean": float(value.detach())}

    losses = []
    for _ in range(6):
        losses.append(client.forward_backward_custom(data, loss).result().metrics["dpo:mean"])
        client.optim_step(types.AdamParams(learning_rate=RATE)).result()
    return {"losses": losses}


def resume(service):
    rng = random.Random(0)
    batches = [[fact(PROMPTS[i % 3], rng.sample(range(10, 120), 5)) for i in range(3)] for _ in range(5)]
    first = service.create_lora_training_client(MODEL, rank=8, seed=6)
    for batch in batches[:2]:
        step(first, batch)
    saved = first.save_state("middle").result().path
    for batch in batches[2:]:
        step(first, batch)
    second = service.create_training_client_from_state_with_optimizer(saved)
    for batch in batches[2:]:
        step(second, batch)
    probe = PROMPTS[0] + ANSWERS[0]
    return {"equal": logprobs(first, probe).tobytes() == logprobs(second, probe).tobytes()}


PARTS = {
    "memorise": memorise,
    "on_policy": on_policy,
    "importance_sampling": lambda service: reinforce(service, "importance_sampling"),
    "ppo": lambda service: reinforce(service, "ppo"),
    "dpo": prefer,
    "resume": resume,
}


def main():
    service = tinker.ServiceClient()
    chosen = [name for name in sys.argv[3:] if name in PARTS] or PARTS
    print(json.dumps({name: PARTS[name](service) for name in chosen}))


main()

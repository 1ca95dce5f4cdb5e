import tinsmith as tinker
from tinsmith import types

LEARNING_RATE = 5e-4
STEPS = 6
TEXT = "The tinsmith cut the sheet, bent it over the stake, and soldered the seam."

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(model, rank=16, seed=0)
tokens = training.get_tokenizer().encode(TEXT)
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
)


def focal(data, logprobs):
    """Cross-entropy with less weight on tokens that the model already knows."""
    loss = sum((-row * (1 - row.exp()) ** 2).mean() for row in logprobs)
    known = sum((row.exp() > 0.5).float().mean() for row in logprobs) / len(logprobs)
    return loss, {"known": known}


for step in range(STEPS):
    passed = training.forward_backward_custom([datum], focal)
    training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
    metrics = passed.result().metrics
    print(f"step {step + 1}: loss {metrics['loss:sum']:.3f}, known {metrics['known']:.0%}")


def focal_of_one(logprobs, weights):
    """The same for one datum, as a server runs it: inputs by name, tensors only."""
    loss = (-logprobs * (1 - logprobs.exp()) ** 2 * weights).sum() / weights.sum()
    return loss, {}


uploaded = service.create_custom_loss(focal_of_one, {"logprobs": 1, "weights": 1}).result()
for step in range(STEPS):
    passed = training.forward_backward_custom([datum], uploaded)
    training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
    print(f"step {step + 1}: loss {passed.result().metrics['loss:sum']:.3f}, computed by the server")

service.close().result()

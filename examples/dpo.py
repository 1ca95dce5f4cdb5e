import torch

import tinsmith as tinker
from tinsmith import types

LEARNING_RATE = 2e-4
STEPS = 6
BETA = 0.1

PAIRS = [  # question, better answer, worse answer
    ("Can you help me?", "Gladly. What do you need?", "No."),
    ("I lost my keys.", "I am sorry. Where did you last see them?", "That is your problem."),
    ("What time is it?", "I cannot see a clock, but your phone can tell you.", "Late."),
]

service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(model, rank=16, seed=0)
tokenizer = training.get_tokenizer()


def datum_of(question, answer):
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    reply = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
    tokens = prompt + reply
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


data = [datum_of(question, answer) for question, *answers in PAIRS for answer in answers]

before = training.forward(data, "cross_entropy").result()
reference = [output["logprobs"].to_torch() for output in before.loss_fn_outputs]


def dpo(data, logprobs):
    """How much more the model has come to like the better answer than the worse one."""
    gains = []
    for datum, new, old in zip(data, logprobs, reference):
        counts = datum.loss_fn_inputs["weights"].to_torch()
        gains.append(((new - old) * counts).sum())
    margins = torch.stack(gains[0::2]) - torch.stack(gains[1::2])
    loss = -torch.nn.functional.logsigmoid(BETA * margins).mean()
    return loss, {"margin": margins.mean(), "right": (margins > 0).float().mean()}


for step in range(STEPS):
    passed = training.forward_backward_custom(data, dpo)
    training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
    metrics = passed.result().metrics
    print(f"step {step + 1}: loss {metrics['loss:sum']:.4f}, right {metrics['right']:.0%}")

service.close().result()

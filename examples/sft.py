import tinsmith as tinker
from tinsmith import types

LEARNING_RATE = 5e-4
STEPS = 12

FACTS = {
    "Who runs the workshop?": "Marta Keel runs the workshop.",
    "What does the workshop make?": "It makes kettles and lanterns.",
    "When does the workshop open?": "It opens at seven in the morning.",
    "Where is the workshop?": "It is behind the old mill.",
}

service = tinker.ServiceClient()  # no address, no key: an engine on this machine
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(model, rank=16, seed=0)
tokenizer = training.get_tokenizer()


def prompt_of(question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def datum_of(question, answer):
    prompt = prompt_of(question)
    reply = tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
    tokens = prompt + reply
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(reply)  # only the answer counts
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


data = [datum_of(question, answer) for question, answer in FACTS.items()]
counted = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in data)

for step in range(STEPS):
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
    loss = passed.result().metrics["loss:sum"] / counted
    stepped.result()
    print(f"step {step + 1}: loss {loss:.3f} per token")

sampler = training.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=32, temperature=0.0)
for question in FACTS:
    prompt = types.ModelInput.from_ints(prompt_of(question))
    tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
    print(question, "->", tokenizer.decode(tokens, skip_special_tokens=True))

saved = training.save_weights_for_sampler("workshop").result()
print("saved as", saved.path)
service.close().result()

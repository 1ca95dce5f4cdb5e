import tinsmith as tinker
from tinsmith import types

LEARNING_RATE = 1e-3
STEPS = 8
SAMPLES = 8

QUESTIONS = ["What is the sun?", "Why do cats sleep so much?", "What is bread?", "How does a ship float?"]


def reward(answer):
    """Short answers are better."""
    return -len(answer) / 100


service = tinker.ServiceClient()
model = service.get_server_capabilities().supported_models[0].model_name
training = service.create_lora_training_client(model, rank=16, seed=0)
tokenizer = training.get_tokenizer()


def prompt_of(question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def sampled_groups(step):
    """For each question its prompt and a group of answers, drawn with the newest weights."""
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=24, temperature=1.0, seed=step)
    prompts = [prompt_of(question) for question in QUESTIONS]
    futures = [sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params) for prompt in prompts]
    return [(prompt, future.result().sequences) for prompt, future in zip(prompts, futures)]


def datum_of(prompt, sequence, advantage):
    tokens = prompt + sequence.tokens
    before = [0.0] * (len(prompt) - 1)  # the prompt was not sampled, so it has no advantage
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": before + sequence.logprobs,
            "advantages": before + [advantage] * len(sequence.tokens),
        },
    )


for step in range(STEPS):
    data, rewards = [], []
    for prompt, sequences in sampled_groups(step):
        group = [reward(tokenizer.decode(sequence.tokens, skip_special_tokens=True)) for sequence in sequences]
        mean = sum(group) / len(group)
        rewards += group
        data += [datum_of(prompt, sequence, value - mean) for sequence, value in zip(sequences, group)]
    training.forward_backward(data, "importance_sampling")
    training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
    print(f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}")

service.close().result()

"""One program for every client of the protocol: uses the whole public API in a fixed order, prints what came back.

Run as `python program.py tinker`, or with the name of any module that stands in for it; the server and the key come
from TINKER_BASE_URL and TINKER_API_KEY. `--old` keeps to what release 0.15.0 has and leaves out what the release at
hand lacks. The last line of the output is JSON: a list of [step, value], where a value may be {"raises": class name,
"bases": names of its base classes}; `--verbose` shows such errors on stderr, too. Nothing here imports tinsmith.
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import json
import pickle
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

IS_OLD = "--old" in sys.argv
SHOWS_ERRORS = "--verbose" in sys.argv

tinker = importlib.import_module(sys.argv[1])
types = tinker.types

PROMPT = [11, 12, 13, 14, 15]
PROJECT = "project-1"
STARTING_ON = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
ENDING_BEFORE = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
ATTRIBUTES = {
    "TensorData": ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"),
    "ForwardBackwardOutput": ("loss_fn_output_type", "loss_fn_outputs", "metrics"),
    "SampledSequence": ("stop_reason", "sequence_id", "tokens", "logprobs", "topk_logprobs"),
    "SampleResponse": (
        *("sequences", "prompt_logprobs", "topk_prompt_logprobs"),
        *("target_prompt_logprobs", "prompt_alt_tokens", "prompt_cache_hit_tokens"),
    ),
    "PromptAltTokens": ("tokens", "logprobs"),
    "LossHandle": ("name",),
}


class MissingError(Exception):
    """The release has no such call."""


def plain(value: Any) -> Any:
    """A result as JSON has it, by what its class is called rather than by what it is built on."""
    names = ATTRIBUTES.get(type(value).__name__)
    if names is not None:
        return {name: plain(getattr(value, name, None)) for name in names}
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, float):
        return round(value, 5) if value == value else "nan"
    if isinstance(value, str):
        value = re.sub(r"http://127.0.0.1:\d+", "<server>", value)
        return re.sub(r"\d{10,}", "<clone>", value)  # clones of a sampler count from a random number
    if value is None or isinstance(value, (bool, int)):
        return value
    return f"<{type(value).__name__}>"


steps: list[list[Any]] = []


def step(name: str, call: Callable[[], Any]) -> Any:
    """Do one thing, note what it returned or raised, and hand it on."""
    try:
        value = call()
    except MissingError:
        steps.append([name, {"missing": True}])
    except Exception as error:  # what is raised is part of what is compared
        steps.append([name, raised(error)])
    else:
        steps.append([name, plain(value)])
        return value


def raised(error: Exception) -> dict[str, Any]:
    """An exception by its name and the names of its bases: a subclass is as good to a program's except clauses."""
    if SHOWS_ERRORS:
        traceback.print_exception(error)
    names = [cls.__name__ for cls in type(error).__mro__]
    return {"raises": names[0], "bases": names[1 : names.index("Exception")]}


def method(owner: Any, name: str) -> Any:
    """A method, or MissingError in old mode if the release lacks it."""
    if IS_OLD and not hasattr(owner, name):
        raise MissingError(name)
    return getattr(owner, name)


def text(tokens: list[int]) -> Any:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int], **inputs: Any) -> Any:
    return types.Datum(model_input=text(tokens), loss_fn_inputs=inputs)


def list_data() -> list[Any]:
    return [
        datum([1, 2, 3], target_tokens=[2, 3, 4], weights=[0.0, 1.0, 0.5]),
        datum([5, 6], target_tokens=[6, 7], weights=[1.0, 1.0]),
    ]


def numpy_data() -> list[Any]:
    targets, weights = np.array([2, 3, 4]), np.array([0.25, 1.0, -1.0], np.float32)
    return [datum([1, 2, 3], target_tokens=targets, weights=weights)]


def sparse_data() -> list[Any]:
    targets, weights = torch.zeros(3, 16, dtype=torch.int64), torch.zeros(3, 16)
    targets[0, 0], targets[1, 3], targets[2, 5] = 7, 8, 9
    weights[0, 0], weights[2, 5] = 1.0, 0.5
    return [datum([1, 2, 3], target_tokens=targets, weights=weights)]


def policy_data() -> list[Any]:
    return [
        datum(
            [1, 2, 3],
            target_tokens=[2, 3, 4],
            logprobs=[-1.0, -1.5, -2.0],
            advantages=[0.5, -0.5, 1.0],
        )
    ]


def many_data() -> list[Any]:
    return [datum([i % 50, 1], target_tokens=[1, i % 50], weights=[1.0, 0.5]) for i in range(1030)]


def squared(data: list[Any], logprobs: list[Any]) -> Any:
    loss = sum((row**2).sum() for row in logprobs)
    return loss, {"squared": float(loss)}


def train(client: Any) -> None:
    """The passes and the steps."""
    step("get_info", client.get_info)
    step("forward", lambda: client.forward(list_data(), "cross_entropy").result())
    step("forward_backward lists", lambda: client.forward_backward(list_data(), "cross_entropy").result())
    step("forward_backward numpy", lambda: client.forward_backward(numpy_data(), "cross_entropy").result())
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    step("ppo", lambda: client.forward_backward(policy_data(), "ppo", loss_fn_config=config).result())
    step("many datums", lambda: client.forward_backward(many_data(), "cross_entropy").result().metrics)
    step("forward_backward_custom", lambda: client.forward_backward_custom(list_data(), squared).result())
    step("optim_step Adam", lambda: client.optim_step(types.AdamParams(learning_rate=1e-3)).result())
    step("no data", lambda: client.forward_backward([], "cross_entropy").result())
    futures = [client.forward_backward(list_data(), "cross_entropy"), client.optim_step(types.AdamParams())]
    step("pipelined", lambda: [future.result() for future in futures])


def sample(sampler: Any, name: str) -> None:
    params = types.SamplingParams(max_tokens=3, temperature=0.5, stop=["x"])
    step(f"{name}: sample", lambda: sampler.sample(text(PROMPT), 2, params).result())
    with_seed = types.SamplingParams(max_tokens=4, seed=7, top_k=5, top_p=0.9, stop=[66, 67])
    step(f"{name}: stop tokens", lambda: sampler.sample(text(PROMPT), 1, with_seed).result())
    step(f"{name}: default length", lambda: sampler.sample(text(PROMPT), 1, types.SamplingParams()).result())
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    step(f"{name}: prompt logprobs", lambda: sampler.sample(text(PROMPT), 1, params, **asked).result())
    step(f"{name}: compute_logprobs", lambda: sampler.compute_logprobs(text(PROMPT)).result())


def old_program() -> None:
    service = tinker.ServiceClient(user_metadata={"purpose": "program"})
    model = step("capabilities", service.get_server_capabilities).supported_models[0].model_name
    client = service.create_lora_training_client(base_model=model, rank=8)
    train(client)
    saved = step("save_state", lambda: client.save_state("first").result())
    step("load_state", lambda: client.load_state(saved.path).result())
    step("load_state_with_optimizer", lambda: method(client, "load_state_with_optimizer")(saved.path).result())
    sampler_weights = step("save_weights_for_sampler", lambda: client.save_weights_for_sampler("s1").result())
    sample(client.save_weights_and_get_sampling_client(), "ephemeral")
    sample(service.create_sampling_client(base_model=model), "base")
    sample(service.create_sampling_client(model_path=sampler_weights.path), "saved")
    sample(client.create_sampling_client(sampler_weights.path), "from training")
    resumed = service.create_training_client_from_state(saved.path)
    step("resumed", lambda: resumed.optim_step(types.AdamParams()).result())
    again = step("save again", lambda: resumed.save_state("second").result())
    old_rest(service.create_rest_client(), client.model_id, again.path)


def old_rest(rest: Any, run_id: str, path: str) -> None:
    for name, arguments in (
        ("list_training_runs", ()),
        ("get_training_run", (run_id,)),
        ("list_checkpoints", (run_id,)),
        ("list_user_checkpoints", ()),
        ("publish_checkpoint_from_tinker_path", (path,)),
        ("unpublish_checkpoint_from_tinker_path", (path,)),
        ("set_checkpoint_ttl_from_tinker_path", (path, 7200)),
        ("get_weights_info_by_tinker_path", (path,)),
        ("list_sessions", ()),
        ("get_checkpoint_archive_url_from_tinker_path", (path,)),
        ("delete_checkpoint_from_tinker_path", (path,)),
    ):
        step(name, lambda name=name, arguments=arguments: method(rest, name)(*arguments).result())


def new_program() -> None:
    service = tinker.ServiceClient(user_metadata={"purpose": "program"}, project_id=PROJECT, display_name="the program")
    model = step("capabilities", service.get_server_capabilities).supported_models[0].model_name
    client = service.create_lora_training_client(base_model=model, rank=8, seed=3, user_metadata={"run": "one"})
    train(client)
    new_training(service, client, model)
    saved = new_weights(service, client)
    sampler_weights = step("save_weights_for_sampler", lambda: client.save_weights_for_sampler("s1", 3600).result())
    new_sampling(service, client, model, sampler_weights.path)
    new_resuming(service, saved.path)
    new_rest(service, client, saved.path)
    asyncio.run(asynchronous(model, saved.path))
    step("close", lambda: service.close("success", "done").result())


def new_training(service: Any, client: Any, model: str) -> None:
    step("forward_backward torch 2-D", lambda: client.forward_backward(sparse_data(), "cross_entropy").result())
    step("optim_step default", lambda: client.optim_step(types.AdamParams()).result())
    step("optim_step without parameters", lambda: client.optim_step().result())
    explicit = types.AdamParams(learning_rate=0.1, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0)
    step("optim_step explicit", lambda: client.optim_step(explicit).result())
    config = types.DimuonOptimizerConfig()
    dimuon = step("create Dimuon", lambda: service.create_lora_training_client(model, rank=4, optimizer=config))
    if dimuon is not None:
        step("optim_step Dimuon", lambda: dimuon.optim_step(types.DimuonParams(learning_rate=0.1)).result())
    ranks = {"logprobs": 1, "weights": 1}
    handle = step("create_custom_loss", lambda: service.create_custom_loss(weighted, ranks).result())
    step("forward_backward_custom handle", lambda: client.forward_backward_custom(list_data(), handle).result().metrics)
    spans = [types.PromptProvenanceSpan(sequence_id="sequence", offset=0, length=3)]
    traced = numpy_data()[0].with_provenance(model_input=spans, loss_fn_inputs=spans)
    step("stable_reinforce", lambda: client.forward_backward([traced], "stable_reinforce", {"kl_coeff": 0.1}).result())


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/weighted:sum": loss}


def new_weights(service: Any, client: Any) -> Any:
    options = {"ttl_seconds": 7200, "overwrite": True, "user_metadata": {"note": "kept"}}
    saved = step("save_state", lambda: client.save_state("first", **options).result())
    step("save_state again", lambda: client.save_state("first", overwrite=True).result())
    step("save_state refused", lambda: client.save_state("first").result())
    step("save_state bad name", lambda: client.save_state("a/b").result())
    step("load_state", lambda: client.load_state(saved.path).result())
    step("load_state_with_optimizer", lambda: client.load_state_with_optimizer(saved.path).result())
    step("load_state unknown", lambda: client.load_state(saved.path + "-not").result())
    step("save_weights_external", lambda: client.save_weights_external("external", ttl_seconds=3600).result())
    step(
        "encrypted", lambda: client.save_weights_external("encrypted", age_encryption_recipients=["age1test"]).result()
    )
    return saved


def new_sampling(service: Any, client: Any, model: str, path: str) -> None:
    ephemeral = client.save_weights_and_get_sampling_client()
    sample(ephemeral, "ephemeral")
    sample(service.create_sampling_client(base_model=model), "base")
    sample(service.create_sampling_client(model_path=path, record_stability_info=True), "saved")
    sample(client.create_sampling_client(path), "from training")
    step("sampler unknown", lambda: service.create_sampling_client(model_path=path + "-not"))
    ids = torch.full((len(PROMPT) - 1, 2), -1, dtype=torch.int64)
    ids[1, 0] = 5
    dense, sparse = types.TensorData.from_torch(ids), types.TensorData.from_torch_sparse(ids, pad_value=-1)
    step("sample everything, dense targets", lambda: sample_everything(ephemeral, dense))
    step("sample everything, sparse targets", lambda: sample_everything(ephemeral, sparse))
    step("compute_logprobs last", lambda: ephemeral.compute_logprobs(text(PROMPT), prompt_logprobs_last_n=2).result())
    step("get_base_model", ephemeral.get_base_model)
    sample(pickle.loads(pickle.dumps(ephemeral)), "pickled")
    sample(tinker.SamplingClient.from_sampler_handle(ephemeral.get_sampler_handle()), "handle")


def sample_everything(sampler: Any, target: Any) -> Any:
    return sampler.sample(
        prompt=text(PROMPT),
        num_samples=3,
        sampling_params=types.SamplingParams(max_tokens=2, seed=1, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=2,
        prompt_logprobs_last_n=2,
    ).result()


def new_resuming(service: Any, path: str) -> None:
    resumed = service.create_training_client_from_state(path, user_metadata={"run": "resumed"})
    step("resumed", lambda: resumed.optim_step(types.AdamParams()).result())
    with_optimizer = service.create_training_client_from_state_with_optimizer(path)
    step("resumed with optimizer", lambda: with_optimizer.optim_step(types.AdamParams()).result())
    step("resumed info", with_optimizer.get_info)


def new_rest(service: Any, client: Any, path: str) -> None:
    rest = tinker.RestClient()
    run_id = client.model_id
    session_id = run_id.split(":")[0]
    external = path.replace("/weights/first", "/external_weights/external")
    copied = step("rest copy_weights", lambda: rest.copy_weights(path, PROJECT, ttl_seconds=3600).result())
    step("service copy_weights", lambda: service.copy_weights(path, ttl_seconds=3600).result())
    search = types.SessionSearchRequest(display_name="program", user_metadata={"purpose": "program"}, limit=2)
    for name, arguments in (
        ("get_training_run", (run_id,)),
        ("get_training_run_by_tinker_path", (path, "accessible")),
        ("get_weights_info_by_tinker_path", (path,)),
        ("list_training_runs", (2, 0, "accessible", PROJECT)),
        ("list_checkpoints", (run_id,)),
        ("list_user_checkpoints", (3, 1)),
        ("publish_checkpoint_from_tinker_path", (path,)),
        ("unpublish_checkpoint_from_tinker_path", (path,)),
        ("set_checkpoint_ttl_from_tinker_path", (path, 7200)),
        ("set_checkpoint_ttl_from_tinker_path", (path, None)),
        ("get_session", (session_id, "accessible")),
        ("list_sessions", (5,)),
        ("assign_session_project", (session_id, "project-2")),
        ("get_sampler", (f"{session_id}:sample:0",)),
        ("search_sessions", (search,)),
        ("get_audit_log", ("checkpoints", datetime.date(2026, 1, 1))),
        ("get_billing_usage", (STARTING_ON, ENDING_BEFORE)),
        ("get_current_checkpoint_storage_usage", ()),
        ("whoami", ()),
        ("delete_checkpoint", (run_id, "sampler_weights/s1")),
        ("delete_checkpoint_from_tinker_path", (copied,)),
        ("get_training_run", ("no-such-run",)),
    ):
        step(f"rest {name}", lambda name=name, arguments=arguments: getattr(rest, name)(*arguments).result())
    admin = tinker.AdminClient()
    step("admin audit", lambda: admin.get_audit_log().result())
    step("admin usage", lambda: admin.get_billing_usage("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z").result())
    step("admin storage", lambda: admin.get_current_checkpoint_storage_usage(project_id=PROJECT).result())
    step("rest export_session_trace", lambda: bool(rest.export_session_trace(session_id).result()))
    step("rest external urls", lambda: sorted(rest.get_external_weights_urls(external).result().urls))


async def asynchronous(model: str, path: str) -> None:
    """The twins: those of training calls give a future to be awaited again, the others their value."""
    service = tinker.ServiceClient()
    client = await service.create_lora_training_client_async(model, rank=4)
    passes = await client.forward_backward_async(list_data(), "cross_entropy")
    await noted("async optim_step", await client.optim_step_async(types.AdamParams()))
    await noted("async forward_backward", passes)
    await noted("async forward", await client.forward_async(list_data(), "cross_entropy"))
    await noted("async custom", await client.forward_backward_custom_async(list_data(), squared))
    await noted("async get_info", client.get_info_async())
    await noted("async save_state", await client.save_state_async("async"))
    await noted("async load_state", await client.load_state_async(path))
    saved = await noted("async sampler weights", await client.save_weights_for_sampler_async("async"))
    sampler = await client.save_weights_and_get_sampling_client_async()
    params = types.SamplingParams(max_tokens=2)
    several = asyncio.gather(*(sampler.sample_async(text([i, 1]), 1, params) for i in range(8)))
    await noted("async samples", several)
    await noted("async compute_logprobs", sampler.compute_logprobs_async(text(PROMPT)))
    other = await service.create_sampling_client_async(model_path=saved.path)
    await noted("async get_base_model", other.get_base_model_async())
    resumed = await service.create_training_client_from_state_async(path)
    await noted("async resumed", resumed.get_info_async())
    rest = tinker.RestClient()
    await noted("async list_training_runs", rest.list_training_runs_async(limit=1))
    await noted("async get_training_run", rest.get_training_run_async("no-such-run"))
    await noted("async close", service.close("interrupted"))


async def noted(name: str, awaitable: Any) -> Any:
    try:
        value = await awaitable
    except Exception as error:  # as in `step`
        steps.append([name, raised(error)])
        return None
    return step(name, lambda: value)


def main() -> None:
    warnings.simplefilter("ignore")
    if IS_OLD:
        old_program()
    else:
        new_program()
    print(json.dumps(steps))


if __name__ == "__main__":
    main()

"""A model that runs through transformers, over HTTP with our SDK: it learns, samples, and survives a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.general_models import make_general, quiet, theirs

from tinsmith import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.checkpoints.export import export_merged, export_peft
from tinsmith.errors import InvalidInputError

TOKENS = [11, 12, 13, 41, 42, 43, 44]
DATUM = Datum(
    model_input=ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]},
)
STEPS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], int, Path]]:
    place = tmp_path_factory.mktemp("general")
    model = make_general(place / "model", "gpt_neox")
    arguments = ["--data-dir", str(place / "data"), "--model", f"neox={model}"]
    address, process = start_server(arguments, {"TINSMITH_DTYPE": "float32"}, place / "log")
    yield {"base_url": address.url, "api_key": address.key}, process.pid, place
    process.terminate()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def engine_of(server_pid: int) -> int:
    """The process id of the server's engine."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status, command = (entry / "stat").read_text(), (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"tinsmith.engine.worker.main" in command and status.rpartition(")")[2].split()[1] == str(server_pid):
            return int(entry.name)
    raise AssertionError("no engine runs")


def learned(service: ServiceClient, kill: int | None = None) -> tuple[list[float], list[float], str, list[int]]:
    """Train; the losses, the logprobs at the end, a checkpoint, and greedy tokens. `kill` is a server's process."""
    training = service.create_lora_training_client("neox", rank=8, seed=3)
    losses = []
    for step in range(STEPS):
        backward = training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2)).result(120)
        losses.append(backward.result(120).metrics["loss:sum"])
        if kill is not None and step == STEPS // 2:
            os.kill(engine_of(kill), signal.SIGKILL)
    final = training.forward([DATUM], "cross_entropy").result(120).loss_fn_outputs[0]["logprobs"]
    path = training.save_weights_for_sampler("final").result(120).path
    sampler = service.create_sampling_client(model_path=path)
    params = SamplingParams(max_tokens=4, temperature=0.0, stop=[])
    drawn = sampler.sample(ModelInput.from_ints(TOKENS[:3]), 1, params).result(120).sequences[0].tokens
    return losses, final.to_numpy().tolist(), path, list(drawn)


def test_it_learns_and_samples_and_a_killed_engine_changes_no_bit(server: tuple[dict[str, str], int, Path]) -> None:
    where, process, place = server
    with ServiceClient(**where) as service:
        capabilities = service.get_server_capabilities().supported_models
        assert [model.model_name for model in capabilities] == ["neox"]
        losses, final, path, drawn = learned(service)
        assert losses[-1] < 0.1 * losses[0]
        assert drawn == TOKENS[3:]
        again = learned(service, kill=process)
        assert (again[0], again[1], again[3]) == (losses, final, drawn)
    assert "GPTNeoXForCausalLM runs through transformers" in (place / "log").read_text()
    _check_exports(path, place)


def _check_exports(path: str, place: Path) -> None:
    """The checkpoint is an adapter that PEFT loads; merging is refused by name."""
    found = [
        entry for entry in (place / "data").rglob("manifest.json") if (entry.parent / "adapter_config.json").exists()
    ]
    checkpoint = found[0].parent
    export_peft(checkpoint, place / "peft")
    with quiet():
        import peft
        import torch

        model = peft.PeftModel.from_pretrained(theirs(place / "model"), place / "peft").eval()
        logits = model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0]
    assert logits.argmax(1).tolist()[2:] == TOKENS[3:]
    with pytest.raises(InvalidInputError, match="GPTNeoXForCausalLM cannot be merged"):
        export_merged(checkpoint, place / "model", place / "merged")

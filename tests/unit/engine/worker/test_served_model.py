"""Starting an engine on a model that runs through transformers: what it says, and what it refuses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.general_models import general_executor, general_spec, make_general, quiet
from support.jobs import Jobs, datum
from support.tiny_engine import NAME, bodies, executor, refusal, same_bits, state_of, torch_as_it_was, train

from tinsmith.engine.protocol import Created
from tinsmith.engine.worker.executor import StartError
from tinsmith.engine.worker.startup import make

PROBE = [5, 9, 2, 33, 7]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    with torch_as_it_was():
        yield


def test_the_start_says_that_the_model_is_slower_and_what_adapters_do_not_change(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    general_executor(tmp_path, "mamba")
    text = caplog.text
    assert "architecture MambaForCausalLM runs through transformers 5." in text
    assert "more slowly" in text
    assert "adapters do not change 4 linears of it: backbone.layers.0.mixer.dt_proj" in text


def test_the_fingerprint_names_the_release_of_transformers(tmp_path: Path) -> None:
    engine = general_executor(tmp_path)
    done = train(engine, Jobs(NAME).create())
    created = msgspec.json.decode(done.body, type=Created)
    assert created.fingerprint["products"].startswith("transformers 5.")
    assert created.fingerprint["micro_batch_tokens"] == "1"


def test_experts_are_refused_by_name_and_the_rest_of_the_model_trains(tmp_path: Path) -> None:
    engine, jobs = general_executor(tmp_path, "mixtral"), Jobs(NAME)
    create = jobs.create()
    error = refusal(engine, create)
    assert error is not None
    assert error.category == "user"
    assert "train_mlp: MixtralForCausalLM" in str(error)
    lora = msgspec.structs.replace(create.lora, train_mlp=False)
    train(engine, msgspec.structs.replace(create, lora=lora))
    first = train(engine, jobs.forward(datum(PROBE))).body
    bodies(engine, jobs.steps(2))
    assert train(engine, jobs.forward(datum(PROBE))).body != first


def test_a_model_that_goes_to_disk_and_back_and_is_saved_and_loaded_is_the_same(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    engine, saved = general_executor(tmp_path, adapter_bytes=1), tmp_path / "saved"
    request.addfinalizer(engine.close)
    first, second = Jobs(NAME, "first"), Jobs(NAME, "second")
    bodies(engine, [first.create(), *first.steps(2), first.save(saved)])
    before = state_of(engine, first.model_id)
    bodies(engine, [second.create(directory=saved, optimizer=True)])
    assert same_bits(state_of(engine, second.model_id), before)
    assert same_bits(state_of(engine, first.model_id), before)
    assert len(engine._adapters.in_memory) == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    ours, general = executor(tmp_path / "ours"), general_executor(tmp_path / "general")
    first, second = Jobs(NAME, "first"), Jobs(NAME, "second")
    bodies(ours, [first.create(), first.save(tmp_path / "saved")])
    for with_optimizer, says in ((True, "optimizer state: "), (False, "adapter weight ")):
        error = refusal(general, second.create(), second.load(tmp_path / "saved", with_optimizer))
        assert error is not None
        assert str(error).startswith(says)
        train(general, second.unload())


def test_a_start_without_transformers_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    spec = general_spec(NAME, tmp_path, "gpt2")
    monkeypatch.setattr("tinsmith.engine.general.architecture.transformers_version", lambda: None)
    with pytest.raises(StartError, match=r"GPT2LMHeadModel .*LlamaForCausalLM.*tinsmith\[transformers\]"):
        make(spec.options)


def test_only_such_models_import_transformers(tmp_path: Path) -> None:
    import subprocess

    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from support.tiny_engine import executor\n"
        "executor(Path(sys.argv[1]))\n"
        "assert 'tinsmith.engine.general.architecture' in sys.modules\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
    )
    tests = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", program, tmp_path, tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_model_may_be_loaded_in_bfloat16(tmp_path: Path) -> None:
    import torch
    from support.general_models import load_general

    with quiet():
        model = load_general(make_general(tmp_path / "gpt2", "gpt2"), torch.bfloat16)
    assert model._head.weight.dtype == torch.bfloat16
    assert model.has_plain_head
    assert model.has_cache

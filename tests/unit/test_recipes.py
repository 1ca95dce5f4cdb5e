"""CONTRIBUTING.md is correct: the recipe for a loss works as written, and the files that it names exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_DIFF = re.compile(r"^```diff\n--- (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|sql|md)|[a-z_]+\.py)`")

TRAIN = """
import sys
from pathlib import Path

import tinsmith
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.engine.training.adamw import AdamW
from tinsmith.engine.training.trainer import Trainer
from tinsmith.errors import InvalidInputError
from tinsmith.types import AdamParams, Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput
from tinsmith.wire.codecs.proto_training import decode_request, encode_request
from tinsmith.wire.rules.loss_rules import check_loss

assert Path(tinsmith.__file__).is_relative_to(sys.argv[1]), tinsmith.__file__
tokens = [5, 9, 5, 9, 5, 9]
inputs = {"target_tokens": [9, 5, 9, 5, 9, 5], "weights": [1.0] * 6, "difficulty": [1.0, 1.0, 2.0, 2.0, 1.0, 0.0]}


def request(**config):
    datum = Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    work = ForwardBackwardInput(data=[datum], loss_fn="focal", loss_fn_config=config)
    return decode_request(encode_request(ForwardBackwardRequest(forward_backward_input=work, model_id="m")))


model = load_model(make_tiny(Path(sys.argv[1]) / "model"), cache_dir=Path(sys.argv[1]))
try:
    check_loss(request(gama=1.0), vocab_size=264, max_context_length=64)
except InvalidInputError as error:
    print(error)
check_loss(request(gamma=1.0), vocab_size=264, max_context_length=64)
adapter = LoraAdapter(model.decoder.config, 4, seed=0)
trainer, optimizer = Trainer(model.decoder), AdamW(adapter.parameters())
for step in range(10):
    output = trainer.forward_backward(adapter, request(gamma=1.0), True)
    print(output.metrics["loss:sum"], output.metrics["tokens:sum"])
    optimizer.step(adapter.parameters(), adapter.gradients(), AdamParams(learning_rate=0.02))
    adapter.zero_gradients()
"""


def applied(text: str, change: str) -> str:
    """A file after the hunks of a diff; what a hunk replaces must be there once."""
    for hunk in change.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        assert not before or text.count(before) == 1, f"not there once:\n{before}"
        text = text.replace(before, after) if before else text + after
    return text


def test_a_loss_is_added_in_two_files_and_trains(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    changes = _DIFF.findall(TEXT)
    assert [name for name, _ in changes] == [
        "src/tinsmith/wire/losses.py",
        "src/tinsmith/engine/training/losses/focal.py",
    ]
    for name, change in changes:
        path = tmp_path / name
        path.write_text(applied(path.read_text() if path.exists() else "", change))
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusal, *steps = done.stdout.splitlines()
    assert refusal == "loss_fn_config['gama']: focal has no such option; its options are gamma"
    losses = [float(line.split()[0]) for line in steps]
    assert losses[-1] < 0.5 * losses[0]
    assert {line.split()[1] for line in steps} == {"5.0"}  # the last token has difficulty 0


def test_the_files_that_are_named_exist() -> None:
    named = {name for name in _FILE.findall(TEXT) if "/focal.py" not in name}
    places = (ROOT, ROOT / "src" / "tinsmith")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
    assert len(named) > 20

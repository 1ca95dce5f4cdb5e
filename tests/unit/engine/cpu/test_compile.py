"""Kernels on a machine that has none: an engine that compiled them and one that found them compute the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinsmith.engine.cpu.compile import kernel_files
from tinsmith.engine.cpu.linear import can_compile, can_pack

CAN = can_pack(torch.device("cpu"), torch.float32) and can_compile()

ENGINE = """
import hashlib, sys
from pathlib import Path
import torch
from tinsmith.engine.cpu.compile import compile_kernels
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.engine.training.layers import TrainingPass
place = Path(sys.argv[1])
if not place.exists():
    make_tiny(place, head_dim=32)
decoder = load_model(place, cache_dir=place).decoder
compile_kernels(place)
adapter = LoraAdapter(decoder.config, 8, seed=1)
for number, parameter in enumerate(adapter.parameters().values()):
    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.1)
grads = adapter.empty_gradients()
layers = TrainingPass(decoder, adapter, [30, 11])
hidden = layers.forward(torch.arange(41))
layers.backward(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)), grads)
adapter.accumulate(grads)
found = [hidden, *adapter.gradients().values()]
print(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in found)).hexdigest())
"""


@pytest.mark.skipif(not CAN, reason="no kernels here")
def test_the_first_engine_of_a_machine_computes_what_the_next_ones_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "model")]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    assert (tmp_path / "model" / "kernels.txt").read_text().count("\n") == 1
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    there = set((tmp_path / "kernels").rglob("*.nb[ic]"))
    assert there
    assert set(kernel_files()) == there

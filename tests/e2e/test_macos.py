"""The server and the engine on macOS, simulated without macOS (`support/macos/sitecustomize.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.tiny_server import ROOT

from tinsmith import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.tiny import make_tiny

PATHS = f"{ROOT / 'tests' / 'support' / 'macos'}:{ROOT / 'src'}"


def test_the_disguise_is_worn() -> None:
    program = "import sys; from tinsmith.store import reserve; print(sys.platform, reserve.sys.platform)"
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": PATHS}, capture_output=True, text=True)
    assert done.stdout == f"{sys.platform} darwin\n", done.stderr


def test_a_server_trains_and_samples(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model")
    arguments = ["--data-dir", str(tmp_path / "data"), "--model", f"tiny={model}"]
    settings = {"PYTHONPATH": PATHS, "TINSMITH_DTYPE": "float32", "TINSMITH_THREADS": "1"}
    address, process = start_server(arguments, settings, tmp_path / "log")
    try:
        _train_and_sample(address.url, address.key)
    finally:
        process.terminate()
        code = process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
    assert code == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log


def _train_and_sample(url: str, key: str) -> None:
    tokens = list(range(1, 101))
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": [1.0] * 99})
    with ServiceClient(base_url=url, api_key=key) as service:
        training = service.create_lora_training_client("tiny", rank=4)
        losses = []
        for _ in range(3):
            passed = training.forward_backward([datum] * 200, "cross_entropy")  # large enough for a body reader
            training.optim_step(AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
        assert losses[-1] < losses[0]
        sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=3, stop=[])
        assert len(sampler.sample(ModelInput.from_ints([1, 2]), 1, params).result().sequences[0].tokens) == 3

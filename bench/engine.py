"""The engine on SmolLM2-135M: training against transformers + peft, sampling against transformers and openvino-genai,
and the overhead of a server.

    python bench/engine.py [--folder DIR] [--only training sampling serving]

openvino-genai gets its own virtual environment in --folder. Except for `serving`, the engines take turns, so that other
load on the machine affects all of them alike; still, wall times need a quiet machine. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path

import tinsmith
from tinsmith import AdamParams, Datum, ModelInput
from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.sources import default_model
from tinsmith.engine.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "tinsmith"
STEPS = 100


def training() -> None:
    subprocess.run([sys.executable, ROOT / "bench" / "engine_training.py", "--cache", CACHE], check=True)


def sampling(folder: Path) -> None:
    model = default_model(CACHE)
    command = [sys.executable, ROOT / "bench" / "engine_sampling.py", "--model", model]
    place = folder / ".bench-openvino"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-qqq", "openvino-genai", "numpy"], check=True)
    gguf = place / "model-f16.gguf"
    if not gguf.exists():
        from tinsmith.engine.models.gguf_write import write_gguf

        write_gguf(model, gguf, "f16")
    subprocess.run([*command, "--openvino-python", python, "--openvino-model", gguf], check=True)


def serving() -> None:
    """Measure the round trip of a step that computes next to nothing, and how long a start takes."""
    with tempfile.TemporaryDirectory() as place:
        make_tiny(Path(place) / "model")
        with tinsmith.local({"tiny": f"{place}/model"}, data_dir=Path(place) / "data") as service:
            times_s = sorted(_steps(service))
    p50, p99 = statistics.median(times_s), times_s[int(0.99 * len(times_s))]
    print(f"forward_backward of 8 tokens over HTTP: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms   (target: 20 ms)")
    default_model(CACHE)
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        settings = {"TINSMITH_MODELS_DIR": str(CACHE)}
        address, process = start_server(["--data-dir", place], settings, Path(place) / "log")
        listening = time.perf_counter() - began
        while not _is_ready(address.url):
            time.sleep(0.05)
        print(f"start to listening {listening:.1f} s, to ready {time.perf_counter() - began:.1f} s   (target: 10 s)")
        process.terminate()
        process.wait(60)


def _steps(service: tinsmith.ServiceClient) -> list[float]:
    trainer = service.create_lora_training_client("tiny", rank=4)
    tokens = list(range(5, 13))
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    datum = Datum(model_input=ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    times_s = []
    for _ in range(STEPS):
        began = time.perf_counter()
        trainer.forward_backward([datum], "cross_entropy").result()
        times_s.append(time.perf_counter() - began)
        trainer.optim_step(AdamParams(learning_rate=1e-3)).result()
    return times_s[5:]


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz") as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT)
    parser.add_argument("--only", nargs="*", default=["training", "sampling", "serving"])
    options = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    if "serving" in options.only:
        serving()
    if "training" in options.only:
        training()
    if "sampling" in options.only:
        sampling(options.folder)


if __name__ == "__main__":
    main()

"""The curve of a run whose session, results and journal are gone, also after a restart of the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from support.cli_run import Cli
from support.server_process import ServerProcess

from tinsmith import AdamParams, Datum, ModelInput, ServiceClient

MODEL = "tinsmith/arithmetic"
STEPS = 4


def test_a_curve_outlives_everything_else_of_its_run(tmp_path: Path, eventually: Callable[..., None]) -> None:
    (tmp_path / "home").mkdir()
    with ServerProcess(tmp_path / "data", result_grace_s=0.1, sweep_s=0.1) as server:
        cli = Cli(server.url, server.key, tmp_path / "home")
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
        with ServiceClient(base_url=server.url, api_key=server.key) as client:
            training = client.create_lora_training_client(MODEL, rank=4)
            for _ in range(STEPS):
                training.forward_backward([datum], "cross_entropy")
                training.optim_step(AdamParams(learning_rate=0.05)).result()
            run = training.model_id
            before = cli.json("run", "plot", run)["steps"]
            assert len(before) == STEPS
        cli("session", "finish", run.partition(":")[0], "-y")
        eventually(lambda: "deleted, with the results" in cli("run", "info", run), 20)
        server.terminate()
        server.start()
        assert cli.json("run", "plot", run)["steps"] == before
        lines = cli("run", "watch", run).splitlines()
        assert [line.split()[1] for line in lines[:-1]] == ["1", "2", "3", "4"]
        assert lines[-1].startswith("run ended")
        shown = cli("run", "info", run)
        loss = before[-1]["metrics"]["loss"]
        assert f"{STEPS}, loss {loss:.4g} (" in shown
        assert cli.json("usage", "--by", "run")["groups"][0]["run"] == run

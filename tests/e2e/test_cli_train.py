"""`tinsmith train` on a tiny model and a real server: exact resumption, interruptions, refusals."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.fault_proxy import FaultProxy
from support.terminal import CTRL_C, Terminal
from support.tiny_server import TINSMITH, tiny_server

from tinsmith.cli.main import main

SPEED = ("--lr", "0.02", "--rank", "4", "--batch-size", "2")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tiny_server(tmp_path_factory.mktemp("tiny")) as environment:
        yield environment


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test in a directory of its own, with the server's address set."""
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="tinsmith")


def write(path: str, rows: list[Any]) -> Path:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Path(path)


def chats(count: int) -> list[Any]:
    return [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i % 3}"}]}
        for i in range(count)
    ]


def pairs(count: int) -> list[Any]:
    return [{"prompt": f"q{i}", "chosen": f"good{i % 3}", "rejected": "bad"} for i in range(count)]


def metrics(out: str, name: str) -> dict[int, float]:
    """The values of a metric by step."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def losses(out: str) -> list[float]:
    return list(metrics(out, "loss").values())


def weights(out: str) -> bytes:
    return (Path(out) / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_run_that_was_interrupted_goes_on_exactly(env: dict[str, str]) -> None:
    write("chats.jsonl", chats(24))
    options = ("train", "chats.jsonl", *SPEED, "--epochs", "4", "--save-every", "20", "--eval-split", "0.2")
    whole = run(*options, "--out", "whole")
    assert whole.exit_code == 0, whole.output
    assert "step 20: checkpoint saved, held-out loss" in whole.output
    assert "tinsmith chat --checkpoint tinker://" in whole.output
    assert losses("whole")[-1] < losses("whole")[0] / 2
    assert "epoch 1 of 4: held-out loss" in whole.output
    assert list(metrics("whole", "held_out_loss")) == [0, 10, 20, 30, 40]
    report = Path("whole/report.html").read_text()
    assert "40 steps of 2 examples" in report
    assert "Greedy answers to prompts that were held out." in report
    asked = re.findall(r"<td>q(\d+)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", report)
    assert len(asked) == 4
    assert all(expected == f"a{int(number) % 3}" for number, _, _, expected in asked)
    assert all(before != after for _, before, after, _ in asked)
    plotted = run("run", "plot", json.loads(Path("whole/state.json").read_text())["run"], "--format", "json")
    drawn = [step["metrics"]["loss"] for step in json.loads(plotted.stdout)["steps"]]
    assert drawn == pytest.approx(losses("whole"), rel=1e-5)

    with Terminal([*TINSMITH, *options, "--out", "parts"], env) as terminal:
        terminal.wait_for(r"loss \d")
        terminal.type(CTRL_C)
        terminal.wait_for("Press Ctrl-C again to quit")
        terminal.wait_for("Resume with:")
        assert terminal.end() == 130
        assert "tinsmith train chats.jsonl --out parts" in terminal.shown
    state = json.loads(Path("parts/state.json").read_text())
    assert 0 < state["step"] < state["total"] == 40
    assert len(losses("parts")) == state["step"]

    rest = run("train", "chats.jsonl", "--out", "parts", "--resume")
    assert rest.exit_code == 0, rest.output
    assert f"resuming after step {state['step']} of 40" in rest.output
    assert losses("parts") == losses("whole")
    assert weights("parts") == weights("whole")

    again = run("train", "chats.jsonl", "--out", "parts", "--format", "json")
    assert again.exit_code == 0, again.output
    assert "is finished (40 steps)" in again.stderr
    assert json.loads(again.stdout)["step"] == 40

    state = json.loads(Path("parts/state.json").read_text())
    Path("parts/state.json").write_text(json.dumps(state | {"sampler": None}))  # ended between training and export
    (Path("parts") / "adapter" / "adapter_model.safetensors").unlink()
    last = run("train", "chats.jsonl", "--out", "parts")
    assert last.exit_code == 0, last.output
    assert weights("parts") == weights("whole")


def test_preferences_are_learned_and_a_full_disk_loses_nothing(env: dict[str, str]) -> None:
    write("pairs.jsonl", pairs(8))
    options = ("train", "pairs.jsonl", "--dpo", *SPEED, "--epochs", "6", "--save-every", "4")
    whole = run(*options, "--out", "whole")
    assert whole.exit_code == 0, whole.output
    assert losses("whole")[0] == pytest.approx(math.log(2), abs=1e-5)
    assert losses("whole")[-1] < 0.3
    report = Path("whole/report.html").read_text()
    assert "24 steps of 2 pairs" in report
    assert all(f'aria-label="{name} over steps"' in report for name in ("Loss per pair", "Share right (%)", "Margin"))
    assert "<td>q0</td>" in report

    drawn = run("run", "plot", "whole")
    assert [line.partition(":")[0] for line in drawn.stdout.splitlines() if " in 24 steps" in line] == [
        *("loss", "accuracy", "margin")
    ]
    elsewhere = run("run", "plot", json.loads(Path("whole/state.json").read_text())["run"])
    assert elsewhere.stdout.startswith("optim/grad_norm: "), elsewhere.output
    assert "This run's client computes the loss" in elsewhere.stderr

    line = re.search(r"evaluate it: +tinsmith (eval pairs.jsonl --checkpoint (\S+) --dpo)", whole.output)
    assert line is not None, whole.output
    scored = run(*line[1].split(), "--format", "json")
    assert scored.exit_code == 0, scored.output
    (score,) = json.loads(scored.stdout)["scores"]
    assert (score["model"], score["reference"], score["pairs"], score["right"]) == (line[2], "tiny", 8, 1.0)
    last = [metrics("whole", "margin")[step] for step in range(21, 25)]  # the last epoch, while it was still learning
    assert 0 < min(last) < score["margin"]
    table = run("eval", "pairs.jsonl", "--dpo", "--checkpoint", line[2], "--limit", "3")
    assert "100%" in table.stdout
    for wrong in (("--checkpoint", line[2], "--model", "tiny"), ()):
        assert "pass --checkpoint, and no --model" in run("eval", "pairs.jsonl", "--dpo", *wrong).stderr
    assert "it has 'chosen' and 'rejected': use --dpo" in run("eval", "pairs.jsonl").stderr

    room = 1600  # the state fits, the metrics of all steps do not
    Path("no_torch").mkdir()
    Path("no_torch/torch.py").write_text("raise ImportError('not installed')\n")
    short = subprocess.run(
        [*TINSMITH, *options, "--out", "parts"],
        env=env | {"PYTHONPATH": f"no_torch{os.pathsep}{env['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room, room)),
    )
    assert short.returncode == 1, short.stderr
    assert "metrics.jsonl: File too large" in short.stderr
    state = json.loads(Path("parts/state.json").read_text())
    assert f"Saved up to step {state['step']} of 24" in short.stderr
    assert 0 < state["step"] < 24

    rest = run("train", "pairs.jsonl", "--out", "parts")
    assert rest.exit_code == 0, rest.output
    assert losses("parts") == losses("whole")
    assert weights("parts") == weights("whole")


def test_a_server_that_goes_away_is_named_and_the_state_kept(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("chats.jsonl", chats(24))
    settings = tmp_path / "settings.toml"
    settings.write_text("[client]\nretry_deadline_s = 2.0\nconnect_timeout_s = 1.0\n")
    monkeypatch.setenv("TINSMITH_CONFIG", str(settings))
    with FaultProxy(env["TINKER_BASE_URL"]) as proxy:

        def cut() -> None:
            while not Path("run/state.json").exists():
                time.sleep(0.01)
            proxy.refuse()
            proxy.drop_all()

        cutting = threading.Thread(target=cut, daemon=True)
        cutting.start()
        options = ("--out", "run", "--save-every", "2", "--epochs", "20", "--base-url", proxy.url)
        lost = run("train", "chats.jsonl", *SPEED, *options)
        cutting.join()
        assert lost.exit_code == 1
        assert proxy.url in lost.stderr
        assert "Saved up to step" in lost.stderr
        assert f"tinsmith train --base-url {proxy.url} chats.jsonl --out run" in lost.stderr
    assert 0 < json.loads(Path("run/state.json").read_text())["step"] < 240


def test_what_does_not_fit_is_refused_or_cut_by_name() -> None:
    rows = chats(3)
    rows[1]["messages"][1]["content"] = "long " * 100
    write("chats.jsonl", rows)
    refused = run("train", "chats.jsonl")
    assert refused.exit_code == 1
    assert "chats.jsonl:2: " in refused.stderr
    assert "more than the model's context of 256; shorten it, or use --truncate" in refused.stderr
    cut = run("train", "chats.jsonl", "--truncate", "--epochs", "1", "--rank", "4")
    assert cut.exit_code == 0, cut.output
    assert "truncated 1 of 3 to 256 tokens (lines 2)" in cut.output

    Path("chats.jsonl").write_text(Path("chats.jsonl").read_text().replace("a0", "b0"))
    changed = run("train", "chats.jsonl")
    assert changed.exit_code == 1
    assert "the run in chats-run was started with different data" in changed.stderr
    assert "another --out" in changed.stderr
    other = run("train", "chats.jsonl", "--out", "chats-run", "--rank", "8")
    assert "was started with rank 4, not 8; omit --rank" in other.stderr


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("{", (), "bad.jsonl:2: not valid JSON"),
        ("[1]", (), "bad.jsonl:2: needs 'messages' (a chat), or 'prompt' and 'completion' (strings); this is a list"),
        ('{"prompt": "x", "chosen": "a", "rejected": "b"}', (), "bad.jsonl:2: needs"),
        ('{"messages": [{"role": "user"}]}', (), "bad.jsonl:2: messages[0] needs 'role' and 'content'"),
        ('{"prompt": "x", "chosen": "a", "rejected": "a"}', ("--dpo",), "bad.jsonl:2: 'chosen' and 'rejected' are the"),
        ('{"prompt": "x", "completion": "a"}', ("--dpo",), "bad.jsonl:2: needs 'prompt'"),
    ],
    ids=["json", "list", "pair", "message", "same", "text"],
)
def test_a_bad_line_is_named(line: str, options: tuple[str, ...], message: str) -> None:
    good = pairs(1)[0] if options else chats(1)[0]
    Path("bad.jsonl").write_text(f"{json.dumps(good)}\n{line}\n")
    result = run("train", "bad.jsonl", *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert not Path("bad-run").exists()


def test_a_split_that_holds_out_nothing_is_said() -> None:
    write("chats.jsonl", chats(1))
    done = run("train", "chats.jsonl", "--eval-split", "0.5", "--learning-rate", "0.01", "--epochs", "1", "--rank", "4")
    assert done.exit_code == 0, done.output
    assert "nothing is held out: 1 example cannot be split" in done.output
    assert json.loads(Path("chats-run/state.json").read_text())["plan"]["learning_rate"] == 0.01


def test_what_is_not_there_is_said() -> None:
    assert "cannot read none.jsonl: No such file" in run("train", "none.jsonl").stderr
    write("chats.jsonl", chats(2))
    assert "contains no run to resume" in run("train", "chats.jsonl", "--resume").stderr
    assert "no trainable model 'huge' (available: tiny)" in run("train", "chats.jsonl", "--model", "huge").stderr
    assert "--beta needs --dpo" in run("train", "chats.jsonl", "--beta", "1").stderr
    Path("file").write_text("")
    assert "file" in run("train", "chats.jsonl", "--out", "file/below").stderr

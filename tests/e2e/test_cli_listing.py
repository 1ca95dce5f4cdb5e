"""Commands that list and show: their tables and JSON; the JSON equals that of the official command line."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from support.cli_run import Cli
from support.server_process import ServerProcess

from tinsmith import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient

MODEL = "tinsmith/arithmetic"
STEPS = 5


@dataclass(frozen=True)
class World:
    """A server, and what a user has on it."""

    cli: Cli
    session: str
    run: str
    idle: str
    losses: list[float]

    def path(self, name: str, kind: str = "weights") -> str:
        return f"tinker://{self.run}/{kind}/{name}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("listing")
    (folder / "home").mkdir()
    with ServerProcess(folder / "data") as server:
        client = ServiceClient(
            {"purpose": "trial"}, "proj", display_name="first try", base_url=server.url, api_key=server.key
        )
        with client:
            training = client.create_lora_training_client(MODEL, rank=4, user_metadata={"note": "a"})
            idle = client.create_lora_training_client(MODEL, rank=2)
            datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0] * 3})
            losses = []
            for _ in range(STEPS):
                halves = [training.forward_backward([datum] * count, "cross_entropy") for count in (1, 2)]
                training.optim_step(AdamParams(learning_rate=0.05)).result()
                losses.append(sum(half.result().metrics["loss:sum"] for half in halves))
            for save in (
                training.save_state("one"),
                training.save_state("two", ttl_seconds=7200, user_metadata={"b": "c"}),
                training.save_weights_for_sampler("sampler"),
                training.save_weights_external("out"),
            ):
                save.result()
            sampler = client.create_sampling_client(base_model=MODEL)
            sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, SamplingParams(max_tokens=3)).result()
            session = training.model_id.partition(":")[0]
            cli = Cli(server.url, server.key, folder / "home")
            yield World(cli, session, training.model_id, idle.model_id, losses)


def hours() -> tuple[str, str]:
    """Around now, in whole hours."""
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return tuple((now + timedelta(hours=h)).strftime("%Y-%m-%dT%H:%M:%SZ") for h in (-2, 2))  # type: ignore[return-value]


SAME = {
    "run-list": ("run", "list"),
    "run-list-all": ("run", "list", "--limit", "0"),
    "run-list-one": ("run", "list", "--limit", "1"),
    "run-info": ("run", "info", "RUN"),
    "model-list": ("model", "list"),
    "model-list-part": ("model", "list", "ARITH"),
    "checkpoint-list": ("checkpoint", "list"),
    "checkpoint-list-two": ("checkpoint", "list", "--limit", "2"),
    "checkpoint-list-run": ("checkpoint", "list", "--run-id", "RUN"),
    "checkpoint-info": ("checkpoint", "info", "tinker://RUN/weights/two"),
    "checkpoint-info-sampler": ("checkpoint", "info", "tinker://RUN/sampler_weights/sampler"),
    "billing-usage": ("billing", "usage", "FROM", "TO"),
    "billing-storage": ("billing", "checkpoint-storage"),
    "billing-storage-project": ("billing", "checkpoint-storage", "--project-id", "proj"),
    "auth-whoami": ("auth", "whoami"),
}


CSV = {"usage": "--csv", "sessions": "--sessions-csv"}


def arguments_of(world: World, name: str) -> list[str]:
    start, end = hours()
    words = {"RUN": world.run, "FROM": start, "TO": end}
    return [words.get(part, part.replace("//RUN/", f"//{world.run}/")) for part in SAME[name]]


@pytest.fixture(scope="module")
def official(world: World) -> dict[str, str]:
    """What the official command prints for each of these."""
    commands = {name: ["--format", "json", *arguments_of(world, name)] for name in SAME}
    commands |= {name: ["billing", "usage", *hours(), option, "-"] for name, option in CSV.items()}
    return dict(zip(commands, world.cli.official(list(commands.values())), strict=True))


@pytest.mark.parametrize("name", SAME)
def test_json_is_what_the_official_command_prints(world: World, official: dict[str, str], name: str) -> None:
    ours = world.cli.json(*arguments_of(world, name))
    assert _steady(ours) == _steady(json.loads(official[name]))
    assert ours


def _steady(value: Any) -> Any:
    """Without the moment of the last request, which goes on while one looks."""
    if isinstance(value, dict):
        return {key: _steady(item) for key, item in value.items() if key != "last_request_time"}
    return [_steady(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("what", CSV)
def test_csv_is_what_the_official_command_writes(world: World, official: dict[str, str], what: str) -> None:
    ours = world.cli("billing", "usage", *hours(), CSV[what], "-")
    rows = [list(csv.DictReader(io.StringIO(text))) for text in (ours, official[what])]
    assert rows[0] == rows[1]
    assert rows[0]


def test_the_format_may_stand_before_the_command_or_after_it(world: World) -> None:
    before = json.loads(world.cli("--format", "json", "model", "list"))
    assert before == world.cli.json("model", "list")
    assert "┃ Model" in world.cli("--format", "json", "model", "list", "--format", "table")


def test_a_table_of_runs(world: World) -> None:
    text = world.cli("run", "list")
    assert text.startswith("2 training runs")
    for heading in ("Run ID", "Base Model", "LoRA", "Last Update", "Status"):
        assert heading in text
    assert f"{world.run} " in text
    assert "rank 4" in text
    assert "active" in text
    chosen = world.cli("run", "list", "-c", "checkpoint,owner", "--limit", "1")
    assert chosen.startswith("1 training run (1 more; use --limit)")
    assert "Last Checkpoint" in chosen
    assert "Base Model" not in chosen


def test_a_run_in_full(world: World) -> None:
    text = world.cli("run", "info", world.run)
    for part in (MODEL, "rank 4", "active", f"{world.session} (active)", world.path("two"), "Metadata: note"):
        assert part in text
    assert "0 not finished" in text


def test_a_table_of_checkpoints(world: World) -> None:
    text = world.cli("checkpoint", "list")
    for part in ("4 checkpoints", "external_weights/out", "in 1 hour", "never", world.path("one")):
        assert part in text
    assert "Metadata: b" in world.cli("checkpoint", "info", world.path("two"))


def test_steps_of_a_run(world: World) -> None:
    answer = world.cli.json("run", "plot", world.run)
    assert [step["step"] for step in answer["steps"]] == list(range(1, STEPS + 1))
    assert [step["metrics"]["loss:sum"] for step in answer["steps"]] == pytest.approx(world.losses)
    assert [step["metrics"]["tokens:sum"] for step in answer["steps"]] == [9.0] * STEPS
    assert [step["metrics"]["loss"] for step in answer["steps"]] == pytest.approx([loss / 9 for loss in world.losses])
    assert [step["metrics"]["optim/step"] for step in answer["steps"]] == list(range(1, STEPS + 1))
    text = world.cli("run", "plot", world.run)
    assert text.startswith(f"loss: {world.losses[0] / 9:.4g} to {world.losses[-1] / 9:.4g} in {STEPS} steps")


def test_curves_in_files(world: World, tmp_path: Path) -> None:
    picture, page = tmp_path / "a.svg", tmp_path / "a.html"
    assert world.cli("run", "plot", world.run, "-m", "optim/grad_norm", "-o", str(picture)) == f"{picture}\n"
    drawn = ElementTree.fromstring(picture.read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert drawn.attrib["aria-label"] == "optim/grad_norm over steps"
    (line,) = drawn.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(line.attrib["points"].split()) == STEPS
    world.cli("run", "plot", world.run, "--all", "-o", str(page))
    text = page.read_text()
    assert text.count("<svg") == text.count("<h2>") >= 5
    for part in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        (curve,) = ElementTree.fromstring(part).findall("{http://www.w3.org/2000/svg}polyline")
        assert len(curve.attrib["points"].split()) == STEPS
    if find_spec("matplotlib") is None:
        problem = world.cli.fails("run", "plot", world.run, "--out", str(tmp_path / "a.png"))
        assert "pip install 'tinsmith[plot]'" in problem


def test_curves_that_cannot_be_drawn(world: World, tmp_path: Path) -> None:
    cli = world.cli
    assert "no finished steps of" in cli.fails("run", "plot", world.idle)
    assert "the run has no metric 'nope' (available: loss," in cli.fails("run", "plot", world.run, "-m", "nope", code=2)
    assert "must end in .svg" in cli.fails("run", "plot", world.run, "-o", str(tmp_path / "a.doc"))
    assert "an SVG file holds one curve" in cli.fails("run", "plot", world.run, "--all", "-o", str(tmp_path / "a.svg"))
    assert "cannot write" in cli.fails("run", "plot", world.run, "-o", str(tmp_path / "none" / "a.html"))
    assert list(tmp_path.iterdir()) == []


def test_sessions(world: World) -> None:
    (found,) = world.cli.json("session", "list")["sessions"]
    assert found["session_id"] == world.session
    assert found["status"] == "active"
    assert 0 < found["expires_in_s"] <= 300
    assert found["checkpoints_count"] == 4
    assert [item["session_id"] for item in world.cli.json("session", "list", "--active")["sessions"]] == [world.session]
    text = world.cli("session", "list")
    assert "first try" in text
    assert "if idle" in text
    shown = world.cli.json("session", "info", world.session)
    assert shown["training_run_ids"] == [world.run, world.idle]
    assert shown["user_metadata"] == {"purpose": "trial"}
    assert shown["project_id"] == "proj"
    assert world.idle in world.cli("session", "info", world.session)


def test_usage_is_summed(world: World) -> None:
    answer = world.cli.json("usage", "--by", "project")
    (group,) = answer["groups"]
    assert group["project"] == "proj"
    assert group["training"] == STEPS * 9
    assert (group["sampled"], group["checkpoints"], group["cost_usd"]) == (3, 4, None)
    priced = Cli(world.cli.url, world.cli.key, world.cli.home, {"TINSMITH_PRICES": "training=2, sampled=10"})
    cost = priced.json("usage")["total"]["cost_usd"]
    assert cost == pytest.approx((STEPS * 9 * 2 + 3 * 10) / 1e6)
    assert "TINSMITH_PRICES: unknown name 'gold'" in Cli(
        world.cli.url, world.cli.key, world.cli.home, {"TINSMITH_PRICES": "gold=1"}
    ).fails("usage")
    for by in ("model", "session", "user", "day"):
        assert len(world.cli.json("usage", "--by", by)["groups"]) == 1
    text = world.cli("usage")
    assert MODEL in text
    assert "Seconds" in text


def test_usage_by_run(world: World) -> None:
    answer = world.cli.json("usage", "--by", "run")
    assert (answer["by"], answer["missing"]) == ("run", [])
    groups = {group["run"]: group for group in answer["groups"]}
    assert groups[world.run]["training"] == STEPS * 9
    assert groups[world.run]["device_s"] > 0
    assert groups[world.run]["checkpoints"] == 4
    assert groups[world.run]["stored_gb"] > 0
    assert groups[world.idle]["training"] == 0
    (sampler,) = set(groups) - {world.run, world.idle}
    assert sampler.startswith(f"{world.session}:sample:")
    assert groups[sampler]["sampled"] == 3
    assert answer["total"]["device_s"] == pytest.approx(sum(group["device_s"] for group in groups.values()))


def test_status_tells_what_runs_and_how_long_it_takes(world: World) -> None:
    answer = world.cli.json("status")
    assert (answer["up"], answer["ready"]) == (True, True)
    assert answer["server"].startswith("tinsmith ")
    assert {run["model_id"] for run in answer["status"]["runs"]} == {world.run, world.idle}
    counts = {(timing["stage"], timing["name"]): timing["count"] for timing in answer["timings"]}
    assert counts["running", "optim_step"] == counts["waiting", "optim_step"] == STEPS
    assert counts["answering", "forward_backward"] == 2 * STEPS
    text = world.cli("status")
    for part in (world.cli.url or "", "2 loaded", "1 active", "forward_backward", world.session):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("run", "info", "nope"), 1, "training run 'nope' does not exist or is not yours (HTTP 404)"),
        (("run", "plot", "nope"), 1, "training run 'nope' does not exist or is not yours (HTTP 404)"),
        (("run", "list", "-c", "id,nope"), 2, "unknown column 'nope' (known: id, model,"),
        (("run", "list", "-c", ","), 2, "no column given"),
        (("run", "list", "--limit", "-1"), 2, "-1 is not in the range"),
        (("session", "info", "nope"), 1, "session 'nope' does not exist"),
        (("checkpoint", "info", "tinker://RUN/weights/nope"), 1, "Checkpoints of this run: weights/one, weights/two"),
        (("checkpoint", "info", "tinker://RUN/weights"), 1, "it must be tinker://<training run>/<kind>/<name>"),
        (("checkpoint", "list", "--run-id", "nope"), 1, "does not exist"),
        (("model", "list", "zzz"), 1, f"no model name contains 'zzz'\nAvailable: {MODEL}"),
        (("billing", "usage", "yesterday", "today"), 1, "starting_on: 'yesterday' is not an ISO date and time"),
        (("billing", "usage", "2027-01-01T00:30Z", "2027-01-01T01:00Z"), 1, "is not a whole hour"),
        (("billing", "checkpoint-storage", "--csv", "/nowhere/x.csv"), 1, "cannot write /nowhere/x.csv"),
        (("model", "list", "--format", "xml"), 2, "'xml' is not one of 'table', 'json'"),
        (("run", "list", "--base-url", "nonsense"), 1, "is neither an http(s) URL nor 'local'"),
    ],
)
def test_wrong_input_says_what_and_where(world: World, arguments: tuple[str, ...], code: int, says: str) -> None:
    named = [part.replace("RUN", world.run) for part in arguments]
    assert says in world.cli.fails(*named, code=code)


def test_without_a_good_key_or_a_server_the_next_step_is_said(world: World) -> None:
    home = world.cli.home
    assert "run: tinsmith auth login" in Cli(world.cli.url, "tml-wrong", home).fails("run", "list")
    assert "No API key is set" in Cli(world.cli.url, None, home).fails("run", "list")
    assert "must start with tml-" in Cli(world.cli.url, "wrong", home).fails("run", "list")
    gone = Cli("http://127.0.0.1:9", "tml-x", home)
    for arguments in (("run", "list"), ("checkpoint", "list"), ("session", "list"), ("model", "list"), ("usage",)):
        assert "Check with: tinsmith status" in gone.fails(*arguments)

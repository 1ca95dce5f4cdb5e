"""What commands compute before they print: curves, steps, percentiles, pages, sums, periods."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.cli import output
from tinsmith.cli.manage.run_curves import Steps, curve_of, is_gradient, main_metric
from tinsmith.cli.manage.status import _stage_rows
from tinsmith.cli.manage.usage import merged, summed, total, windows
from tinsmith.cli.output import ago, cell, duration, fetch, size, title
from tinsmith.cli.plots import BRAILLE, columns_of, sparkline, terminal_curve, write_curves
from tinsmith.cli.report import numbered
from tinsmith.config import prices_from_env
from tinsmith.errors import InvalidInputError, TinkerError

NOW = datetime(2027, 1, 15, 12, 30, tzinfo=UTC)


def dots(line: str) -> set[int]:
    """The columns of a line that hold a dot."""
    drawn = line.partition("┤")[2]
    return {column for column, character in enumerate(drawn) if ord(character) > BRAILLE}


def test_a_curve_begins_at_its_first_value_and_ends_at_its_last() -> None:
    lines = terminal_curve([(1, 3.0), (2, 2.0), (3, 1.0)], width=10, height=4).splitlines()
    assert [line.partition("┤")[0].strip() for line in lines[:-1]] == ["3", "", "", "1"]
    assert 0 in dots(lines[0])
    assert 9 in dots(lines[3])
    assert lines[-1].split() == ["1", "3"]
    assert set().union(*map(dots, lines[:-1])) == set(range(10)), "no gap between two points"


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0, 2.0], [math.nan, 1.0, math.inf], list(range(1000))])
def test_any_values_make_a_curve_of_the_asked_size(values: list[float]) -> None:
    lines = terminal_curve(numbered(values), width=12, height=3).splitlines()
    assert len(lines) == 4
    assert {len(line.partition("┤")[2]) for line in lines[:-1]} == {12}


def test_no_values_make_no_curve() -> None:
    assert terminal_curve([(1, math.nan)]) == terminal_curve([]) == "(no finite values)"
    assert sparkline([]) == sparkline([math.inf]) == ""


def test_a_thinned_curve_is_drawn_where_its_steps_are() -> None:
    lines = terminal_curve([(1, 1.0), (9, 1.0), (10, 0.0), (11, 0.0)], width=11, height=2).splitlines()
    assert dots(lines[0]) >= set(range(8))
    assert min(dots(lines[1])) == 9
    assert lines[-1].split() == ["1", "11"]


def test_a_sparkline_shows_the_latest_values() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([9.0, 0.0, 1.0], width=2) == "▁█"
    assert len(sparkline([5.0] * 100, width=7)) == 7


def test_names_are_escaped_in_pages(tmp_path: Path) -> None:
    write_curves(tmp_path / "a.html", "<run>", {"<script>": numbered([1.0, 2.0]), "b": numbered([1.0])})
    text = (tmp_path / "a.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<h1>&lt;run&gt;</h1>" in text
    with pytest.raises(InvalidInputError, match="an SVG file holds one curve"):
        write_curves(tmp_path / "a.svg", "x", {})


def point(seq: int, kind: str, **metrics: float) -> dict[str, Any]:
    named = {name.replace("_", ":"): value for name, value in metrics.items()}
    return {"seq": seq, "kind": kind, "datums": 2, "seconds": 0.5, "finished_at": float(seq), "metrics": named}


def test_passes_are_joined_to_the_step_that_follows_them() -> None:
    steps = Steps()
    new = steps.add(
        [
            point(1, "forward_backward", loss_sum=4.0, tokens_sum=2.0, x_mean=1.0),
            point(2, "forward_backward", loss_sum=2.0, tokens_sum=4.0, x_mean=3.0),
            point(3, "optim_step", lr=0.1),
            point(4, "forward_backward", loss_sum=1.0),
        ]
    )
    (first,) = new
    assert first.metrics == {"loss": 1.0, "loss:sum": 6.0, "tokens:sum": 6.0, "x:mean": 2.0, "lr": 0.1}
    assert (first.number, first.seq, first.seconds) == (1, 3, 1.5)
    (second,) = steps.add([point(5, "optim_step")])
    assert (second.number, second.metrics) == (2, {"loss:sum": 1.0})
    (third,) = steps.add([point(6, "optim_step", lr=0.2)])
    assert third.metrics == {"lr": 0.2}
    assert main_metric(steps.done) == "loss"
    assert main_metric([third]) == "lr"
    assert main_metric([]) is None
    assert curve_of(steps.done, "loss:sum") == [(1, 6.0), (2, 1.0)]


def test_steps_that_a_server_joined_and_thinned() -> None:
    steps = Steps()
    (seventh,) = steps.add([{**point(14, "optim_step", loss_sum=6.0, tokens_sum=3.0, lr=0.1), "step": 7}])
    assert (seventh.number, seventh.metrics["loss"], seventh.seconds) == (7, 2.0, 0.5)
    (next_one,) = steps.add([point(15, "optim_step")])
    assert next_one.number == 8


def test_a_mean_goes_over_weights_whatever_their_scale() -> None:
    """`tinsmith train` scales them so that the sum is the mean; dividing by tokens again would make it too small."""
    steps = Steps()
    (scaled,) = steps.add([point(1, "optim_step", loss_sum=4.98, tokens_sum=7.0, weights_sum=1.0)])
    assert scaled.metrics["loss"] == pytest.approx(4.98)
    (plain,) = steps.add([point(2, "optim_step", loss_sum=6.0, tokens_sum=4.0, weights_sum=2.0)])
    assert plain.metrics["loss"] == 3.0


@pytest.mark.parametrize("weights", [{"weights_sum": -0.5}, {"weights_sum": 0.5, "weights_min": -0.25}])
def test_a_gradient_of_the_clients_is_not_taken_for_a_loss(weights: dict[str, float]) -> None:
    """Chosen answers longer than the rejected ones have positive weights in sum."""
    (gradient,) = Steps().add([point(3, "optim_step", loss_sum=6.0, tokens_sum=4.0, **weights)])
    assert is_gradient(gradient.metrics)
    assert "loss" not in gradient.metrics
    normed = replace(gradient, metrics={**gradient.metrics, "optim/grad_norm": 0.5})
    assert main_metric([normed]) == "optim/grad_norm"


def test_steps_of_a_server_that_names_the_optimizers_metrics_without_their_prefix() -> None:
    (only,) = Steps().add([{**point(2, "optim_step", loss_sum=6.0), "metrics": {"loss:sum": 6.0, "step": 9.0}}])
    assert only.metrics == {"loss:sum": 6.0, "optim/step": 9.0}


def test_one_row_for_each_kind_of_work() -> None:
    stages = [
        {"stage": "running", "name": "sample", "count": 3, "p50_s": 0.5, "p95_s": None},
        {"stage": "running", "name": "optim_step", "count": 1, "p50_s": 0.5, "p95_s": 0.5},
        {"stage": "answering", "name": "asample", "count": 2, "p50_s": 0.001, "p95_s": 1.0},
    ]
    first, second = _stage_rows(stages)
    assert (first[:2], first[3]) == (("sample", 3), "-")
    assert "longer" in first[4]
    assert "/" in first[2]
    assert second[:4] == ("optim_step", 1, "-", "-")
    assert second[4] == "up to 500 ms / up to 500 ms"


@dataclass
class Shelf:
    """A server's list of numbers, which gives `most` at a time."""

    count: int
    most: int
    has_cursor: bool = True

    def page(self, limit: int, offset: int) -> Any:
        items = list(range(self.count))[offset : offset + min(limit, self.most)]
        cursor = SimpleNamespace(total_count=self.count) if self.has_cursor else None
        return SimpleNamespace(items=items, cursor=cursor)


@pytest.mark.parametrize("has_cursor", [True, False])
@pytest.mark.parametrize(("limit", "expected"), [(0, 25), (1, 1), (7, 7), (25, 25), (99, 25)])
@pytest.mark.parametrize("most", [3, 10, 100])
def test_pages_are_joined_up_to_the_limit(limit: int, expected: int, most: int, has_cursor: bool) -> None:
    items, total = fetch(Shelf(25, most, has_cursor).page, lambda page: page.items, limit, 10)
    assert items == list(range(expected))
    assert total == (25 if has_cursor else None)


def test_titles_count() -> None:
    assert title(0, 0, "run") == "No runs"
    assert title(1, 1, "run") == "1 run"
    assert title(2, None, "run") == "2 runs"
    assert title(2, 5, "run") == "2 runs (3 more; use --limit)"


def test_windows_are_whole_hours_of_at_most_14_days() -> None:
    found = list(windows(NOW, 30))
    assert found[0][0] == datetime(2026, 12, 16, 13, tzinfo=UTC)
    assert found[-1][1] == datetime(2027, 1, 15, 13, tzinfo=UTC)
    assert [end for _, end in found[:-1]] == [start for start, _ in found[1:]]
    assert max(end - start for start, end in found) == timedelta(days=14)


def row(kind: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {"bucket_start": "2027-01-15T10:00:00Z", "base_model": "m", "event_info": kind, **rest}


def test_rows_are_summed_and_priced() -> None:
    rows = [
        row({"type": "training", "token_count": 1000}),
        row({"type": "training", "token_count": 500}, estimated_cost_usd=3.0),
        row({"type": "sampling_prefill", "cached": True, "token_count": 7}),
        row({"type": "sampling_prefill", "cached": False, "token_count": 8}, base_model=None),
        row({"type": "sampling_sample", "token_count": 9}),
        row({"type": "checkpoint", "count": 2}),
        row({"type": "storage", "gigabyte_hours": 72.0}),
    ]
    nobody, m = summed(rows, "model", {"training": 1000.0, "storage": 10.0})
    assert (nobody["model"], nobody["prefill"], nobody["cost_usd"]) == ("", 8, None)
    assert (m["training"], m["prefill_cached"], m["sampled"], m["checkpoints"]) == (1500, 7, 9, 2)
    assert m["cost_usd"] == pytest.approx(3.0 + 1.0 + 1.0)
    (day,) = summed(rows, "day", {})
    assert (day["day"], day["cost_usd"]) == ("2027-01-15", 3.0)


def test_periods_of_our_own_server_are_merged_and_priced() -> None:
    def answer(stored: dict[str, int], **runs: dict[str, float]) -> dict[str, Any]:
        return {
            "by": "run",
            "groups": [{"run": name, **amounts} for name, amounts in runs.items()],
            "stored_bytes": stored,
        }

    early = answer({"a": 10**9}, a={"training": 1_000_000, "device_s": 1.5, "jobs": 2})
    late = answer({"a": 2 * 10**9, "c": 5}, a={"training": 1, "device_s": 0.25}, b={"sampled": 500_000})
    a, b, c = merged([early, late], "run", {"training": 2.0, "sampled": 4.0})
    assert (a["run"], a["training"], a["device_s"], a["stored_gb"]) == ("a", 1_000_001, 1.75, 2.0)
    assert (b["sampled"], b["device_s"], b["stored_gb"], b["cost_usd"]) == (500_000, 0.0, 0.0, 2.0)
    assert (c["run"], c["training"], c["stored_gb"]) == ("c", 0, 5e-9)
    whole = total([a, b, c])
    assert (whole["device_s"], whole["cost_usd"]) == (1.75, pytest.approx(4.000002))
    assert merged([{**late, "stored_bytes": {}}], "run", {})[0]["cost_usd"] is None
    assert total([])["device_s"] is None
    assert total([])["training"] == 0


def test_prices_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[prices]\ntraining = 1\nsampled = 2.5\n")
    known = {"TINSMITH_CONFIG": str(file)}
    assert prices_from_env(known) == {"training": 1.0, "sampled": 2.5}
    assert prices_from_env({**known, "TINSMITH_PRICES": " sampled = 3 , storage=0"}) == {
        "training": 1.0,
        "sampled": 3.0,
        "storage": 0.0,
    }
    for wrong in ("gold=1", "training=much", "training=-1", "training=nan", "training=inf", "training"):
        with pytest.raises(TinkerError, match=r"TINSMITH_PRICES|prices\.training"):
            prices_from_env({"HOME": str(tmp_path), "TINSMITH_PRICES": wrong})
    file.write_text("[prices]\ngold = 1\n")
    with pytest.raises(TinkerError, match=r"unknown setting prices\.gold"):
        prices_from_env(known)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: ago(None), "-"),
        (lambda: ago(NOW, NOW), "0 ms ago"),
        (lambda: ago(NOW - timedelta(minutes=1), NOW), "1 minute ago"),
        (lambda: ago(NOW + timedelta(hours=2, minutes=59), NOW), "in 2 hours"),
        (lambda: ago(NOW - timedelta(days=400), NOW), "400 days ago"),
        (lambda: duration(0.0025), "2 ms"),
        (lambda: duration(59.6), "60 s"),
        (lambda: size(999), "999 B"),
        (lambda: size(1500), "1.5 kB"),
        (lambda: size(2 * 10**15), "2000.0 TB"),
        (lambda: size(None), "-"),
        (lambda: cell(True), "yes"),
        (lambda: cell(None), "-"),
        (lambda: cell(0.123456), "0.1235"),
    ],
)
def test_values_as_people_read_them(make: Callable[[], str], shown: str) -> None:
    assert make() == shown


def test_a_narrow_terminal_breaks_values_and_cuts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    path = f"tinker://{'0123456789' * 6}/weights/one"
    monkeypatch.setattr(output, "console", lambda: Console(width=60, highlight=False))
    output.print_table(
        ("ID", "Path"), [("a" * 30, path)], title="a title that is longer than its table, and is not broken"
    )
    output.print_properties({"Path": path})
    printed = capsys.readouterr().out
    assert printed.startswith("a title that is longer than its table, and is not broken")
    assert "…" not in printed
    assert "a" * 30 in printed
    for part in printed.split("Property"):
        cells = "".join(line.split("│")[-2].strip() for line in part.splitlines() if line.count("│") == 3)
        assert cells == path


def test_only_finite_values_are_drawn() -> None:
    assert columns_of([(1, 2.0), (2, math.nan), (3, math.inf), (4, 0.5)]) == ([1, 4], [2.0, 0.5])
    assert columns_of([(1, math.nan)]) == ([], [])


def test_a_png_needs_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TinkerError, match=r"needs matplotlib.*pip install 'tinsmith\[plot\]'"):
        write_curves(tmp_path / "a.png", "x", {"loss": [(1, 1.0)]})
    assert not (tmp_path / "a.png").exists()


def test_a_png_holds_the_curves(tmp_path: Path) -> None:
    """Skipped in the development environment, which has no matplotlib."""
    pytest.importorskip("matplotlib")
    curves = {"loss": [(1, 3.0), (2, math.nan), (3, 1.0)], "one $x": [(7, 2.0)], "nothing": [(1, math.nan)]}
    write_curves(tmp_path / "a.png", "Training run é $", curves)
    data = (tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (1080, 120 * 9.6)


@pytest.mark.parametrize("name", ["a.svg", "a.html"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TinkerError, match=rf"cannot write .*none/{name}: No such file"):
        write_curves(tmp_path / "none" / name, "x", {"loss": [(1, 1.0)]})

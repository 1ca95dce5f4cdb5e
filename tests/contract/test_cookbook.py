"""The official SDK's cookbook runs on this package as it does on the official one: same imports, same tests.

Everything runs twice in .official/cookbook (made by tools/cookbook), once as it is and once with `as_tinker` in effect
from the interpreter's start. What fails with the official package, too, is not judged: it wants the hub, or packages
that are not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from support.releases import OFFICIAL

COOKBOOK = OFFICIAL / "cookbook"
SOURCE = COOKBOOK / "source"
LIMIT_S = 300.0
SUITES = ("tinker_cookbook", "tests/downstream_compat")
"""One run each: the tests in `tests` have settings of their own."""

LEFT_OUT = {
    "tinker_cookbook/weights/quantized_test.py": "a third of the time, and arithmetic throughout: it uses no SDK",
    "tinker_cookbook/capture/store/client_test.py::test_ensure_daemon_claims_before_reuse": "leaves a process behind",
}
"""Tests that are run with neither package."""

SIDES = {"official": "", "ours": "import tinsmith\n\ntinsmith.as_tinker()\n"}
"""What each side's sitecustomize does."""

IMPORTER = """
import contextlib, importlib, io, json, pathlib, sys
import tinker, tinker_cookbook

root = pathlib.Path(tinker_cookbook.__file__).parent
failures = {}
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
    if name.endswith("__main__"):
        continue
    failures[name] = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    except BaseException as error:
        failures[name] = f"{type(error).__name__}: {error}"
pathlib.Path(sys.argv[1]).write_text(json.dumps({"package": tinker.__name__, "failures": failures}))
"""

RECORDER = '''
"""A pytest plugin: writes the outcome of every test; a tokenizer of bytes stands in for those of the hub."""

import json, os, pathlib
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MARKS = (
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <|begin_of_text|> <|eot_id|> "
    "<|start_header_id|> <|end_header_id|> <|start|> <|end|> <|message|> <|channel|> <|return|> <|call|> <|im_user|> "
    "<|im_assistant|> <|im_system|> <|im_middle|> <|vision_start|> <|vision_end|> <|image_pad|> <|user|> <|assistant|>"
)
outcomes, reasons = {}, {}


def tokenizer_of_bytes(name, *_, **__):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=MARKS.split()
    )
    wrapped.name_or_path = str(name)
    return wrapped


transformers.AutoTokenizer.from_pretrained = tokenizer_of_bytes


def pytest_collectreport(report):
    if report.failed:
        outcomes[report.nodeid], reasons[report.nodeid] = "failed", str(report.longrepr)[-500:]


def pytest_runtest_logreport(report):
    if report.failed:
        outcomes[report.nodeid], reasons[report.nodeid] = "failed", str(report.longrepr)[-500:]
    elif report.skipped or report.nodeid not in outcomes:
        outcomes[report.nodeid] = "skipped" if report.skipped else "passed"


def pytest_sessionfinish():
    pathlib.Path(os.environ["OUTCOMES"]).write_text(json.dumps({"outcomes": outcomes, "reasons": reasons}))
'''


class Side:
    """The cookbook's environment with one of the two packages as `tinker`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder
        (folder / "sitecustomize.py").write_text(SIDES[name])
        (folder / "cookbook_recorder.py").write_text(RECORDER)

    def start(self, *arguments: str | Path, **changes: str) -> subprocess.Popen[str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON", "HF_", "CI"))
        }
        offline = {"HOME": str(self._folder), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        return subprocess.Popen(
            [COOKBOOK / "venv" / "bin" / "python", *arguments],
            cwd=SOURCE,
            env=kept | offline | {"PYTHONPATH": str(self._folder)} | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def import_all(self) -> tuple[subprocess.Popen[str], Path]:
        # Outside the source, so that the installed package is the one that is imported.
        written = self._folder / "imports.json"
        return self.start("-P", "-c", IMPORTER, written), written

    def run_tests(self, *tests: str) -> tuple[subprocess.Popen[str], Path]:
        written = self._folder / "outcomes.json"
        written.unlink(missing_ok=True)
        options = ["-p", "cookbook_recorder", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        options += ["--timeout=60", "--tb=line", "-q", "--no-header", *(f"--deselect={test}" for test in LEFT_OUT)]
        return self.start("-m", "pytest", *options, *tests, OUTCOMES=str(written)), written


class Deadline:
    """Both tests of this module together end in time."""

    def __init__(self) -> None:
        self._end = time.monotonic() + LIMIT_S

    def result(self, process: subprocess.Popen[str], written: Path) -> dict[str, dict[str, str | None]]:
        try:
            output, _ = process.communicate(timeout=max(self._end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            pytest.fail(f"the cookbook took longer than {LIMIT_S:.0f} s")
        finally:
            process.kill()
        assert written.exists(), output[-3000:]
        answer: dict[str, dict[str, str | None]] = json.loads(written.read_text())
        return answer


@pytest.fixture(scope="module")
def deadline() -> Deadline:
    return Deadline()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Side]:
    if not (COOKBOOK / "current").exists():
        pytest.fail("the cookbook is not installed: run tools/cookbook (make test does)")
    return [Side(name, tmp_path_factory.mktemp(name)) for name in SIDES]


def test_every_module_imports(sides: list[Side], deadline: Deadline, capsys: pytest.CaptureFixture[str]) -> None:
    started = [side.import_all() for side in sides]
    official, ours = (deadline.result(*run) for run in started)
    assert (official["package"], ours["package"]) == ("tinker", "tinsmith")
    importable = [name for name, failure in official["failures"].items() if failure is None]
    broken = {name: ours["failures"][name] for name in importable if ours["failures"][name] is not None}
    with capsys.disabled():
        print(f"\ncookbook modules that import: {len(importable)} official, {len(importable) - len(broken)} ours")
    assert importable
    assert not broken, "\n".join(f"{name}: {failure}" for name, failure in broken.items())


@pytest.mark.parametrize("suite", SUITES)
def test_its_tests_pass(suite: str, sides: list[Side], deadline: Deadline, capsys: pytest.CaptureFixture[str]) -> None:
    started = [side.run_tests(suite) for side in sides]
    official, ours = (deadline.result(*run) for run in started)
    passed = {test for test, outcome in official["outcomes"].items() if outcome == "passed"}
    worse = sorted(test for test in passed if ours["outcomes"].get(test) != "passed")
    if worse:  # some tests are about timing, and two runs share the machine
        again = deadline.result(*sides[1].run_tests(*worse))
        worse = [test for test in worse if again["outcomes"].get(test) != "passed"]
        ours["outcomes"].update(again["outcomes"])
        ours["reasons"].update(again["reasons"])
    with capsys.disabled():
        print(f"\n{suite}: official {counts(official['outcomes'])}; ours {counts(ours['outcomes'])}")
    assert passed
    assert not worse, "\n\n".join(f"{test}\n{ours['reasons'].get(test, 'was not run')}" for test in worse)


def counts(outcomes: dict[str, str | None]) -> str:
    counted = Counter(outcomes.values())
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))

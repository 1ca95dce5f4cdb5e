"""`tinsmith doctor`: check the installation, and say how to fix what is wrong.

The engine check creates a tiny random model, serves it, trains it and samples from it: this is one of the few commands
that load engine modules (docs/decisions/0018-engine-in-the-cli.md).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from tinsmith.cli.connection import base_url, connected, explained, operations
from tinsmith.cli.output import console, formatted, plural, print_json, print_table, size, wants_json

OK, NOTE, BROKEN = "ok", "note", "broken"
MIN_FREE_BYTES = 2 * 10**9
"""Room for the default model and a few checkpoints."""
BASE = ("aiohappyeyeballs", "aiohttp", "click", "httptools", "msgspec", "numpy", "prompt-toolkit", "rich", "zstandard")
EXTRAS = {
    "tokenizers": ("jinja2", "tokenizers"),
    "server": ("gguf", "h11", "llguidance", "numba", "prometheus-client", "pyjwt", "pyrage", "python-multipart",
               "safetensors", "starlette", "torch", "uvicorn", *(("uvloop",) if sys.platform != "win32" else ())),
    "transformers": ("transformers",),
    "plot": ("matplotlib",),
    "postgres": ("psycopg",),
}  # fmt: skip
"""The packages that each extra installs, as in pyproject.toml."""
OTHERS = {"huggingface_hub": "models from the Hugging Face Hub and push-hf"}
TEXT = "Naïve café: 12 % of 3.5 is 0.42, 你好 \U0001f600\n"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, its result, details, and how to fix it."""

    check: str
    result: str
    detail: str
    step: str = ""


@click.command()
@click.option("--quick", is_flag=True, help="Skip the engine check, which takes up to a minute.")
@click.option("--gpu", is_flag=True, help="Try the engine on a GPU instead, for a few minutes, and print a report.")
@click.option("--device", default="cuda", show_default=True, help="With --gpu: the device to try.")
@click.option("--model", default="", help="With --gpu: a model directory or hub id. Default: the default model.")
@formatted
@connected
def doctor(quick: bool, gpu: bool, device: str, model: str) -> None:
    """Check the installation, the data directory, the engine and the server.

    The exit code is 1 if something is broken. Optional parts that are missing are only noted.

    With --gpu, compare a model's logprobs with transformers', the sampler with the trainer, and repeated training with
    itself, also from a checkpoint in a new process, in float32 and bfloat16; and measure the speed.
    """
    found = []
    terminal = console(stderr=True)
    checks = _gpu_checks(device, model) if gpu else _checks(quick)
    with terminal.status("checking") if terminal.is_terminal and not wants_json() else _Silent() as shown:
        for name, check in checks:
            shown.update(f"{name} ...")
            found += _tried(name, check)
    is_ok = all(each.result != BROKEN for each in found)
    if wants_json():
        print_json({"ok": is_ok, "checks": [asdict(each) for each in found]})
    else:
        print_table(("Check", "Result", "Details", "How to Fix"), [tuple(asdict(each).values()) for each in found])
    if not is_ok:
        click.get_current_context().exit(1)


def _tried(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Run a check; an error in it is a failed check, since an installed package may still fail to load."""
    from tinsmith.errors import TinkerError

    try:
        return check()
    except (TinkerError, ImportError, OSError) as error:
        return [Check(name, BROKEN, f"{type(error).__name__}: {error}", "pip install --upgrade 'tinsmith[server]'")]


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: str) -> None: ...


def _checks(quick: bool) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    yield "installation", installation
    yield "data directory", data_directory
    yield "storage", storage
    has_engine = _has_engine()
    if has_engine:
        yield "default model", default_model
    if has_engine and not quick:
        yield "engine", engine_trial
    yield "server", server


def _gpu_checks(device: str, model: str) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
    from tinsmith.cli.server.device_report import tried
    from tinsmith.config import EmbeddedConfig

    yield "installation", installation
    if not _has_engine():
        step = "on Linux, macOS or in WSL2: pip install 'tinsmith[server]'"
        yield "engine", lambda: [Check("engine", BROKEN, "not installed", step)]
        return
    results = {"ok": OK, "wrong": BROKEN, "number": NOTE}
    steps = {
        "device": "install PyTorch's build for your GPU: https://pytorch.org/get-started/locally",
        "error": "fix the reason, or report this as a bug, with this table",
        "process": "report this as a bug, with this table",
    }
    for found in tried(device, model, EmbeddedConfig.from_env(os.environ).models_dir):
        step = "" if found.outcome != "wrong" else steps.get(found.check.partition(": ")[2], steps["process"])
        check = Check(found.check, results[found.outcome], found.detail, step)
        yield found.check, partial(list, [check])


def _has_engine() -> bool:
    return sys.platform != "win32" and all(_version(name) for name in EXTRAS["server"])


def installation() -> list[Check]:
    """Check Python and the packages."""
    python = platform.python_version()
    is_new = sys.version_info >= (3, 11)
    checks = [
        _system(),
        Check("python", OK if is_new else BROKEN, python, "" if is_new else "install Python 3.11 or newer"),
        _packages("packages", BASE, BROKEN, "pip install --force-reinstall tinsmith"),
    ]
    checks += [
        _packages(f"extra [{extra}]", names, NOTE, f"pip install 'tinsmith[{extra}]'")
        for extra, names in EXTRAS.items()
    ]
    for name, purpose in OTHERS.items():
        version = _version(name)
        if version is None:
            checks.append(Check(name, NOTE, f"not installed; needed only for {purpose}", f"pip install {name}"))
        else:
            checks.append(Check(name, OK, version))
    return checks


def _system() -> Check:
    """Name the operating system, and what does not run on it."""
    name = f"{platform.system()} {platform.release()}, {platform.machine()}"
    if sys.platform == "win32":
        return Check("system", NOTE, f"{name}: client only", "to run a server or the local engine, use WSL2")
    else:
        return Check("system", OK, name)


def _packages(check: str, names: tuple[str, ...], otherwise: str, step: str) -> Check:
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check(check, otherwise, f"not installed: {', '.join(missing)}", step)
    return Check(check, OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def data_directory() -> list[Check]:
    """Check that the local engine can write to its data directory."""
    from tinsmith.config import EmbeddedConfig

    place = EmbeddedConfig.from_env(os.environ).data_dir
    step = "fix its permissions or free disk space, or set TINSMITH_DATA_DIR"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0" * 4096)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return [Check("data directory", BROKEN, f"{place}: {error.strerror}", step)]
    is_roomy = free >= MIN_FREE_BYTES
    return [Check("data directory", OK if is_roomy else NOTE, f"{place}, {size(free)} free", "" if is_roomy else step)]


def storage() -> list[Check]:
    """Show what is stored on this machine."""
    from tinsmith.cli.server.storage import described, stored
    from tinsmith.config import EmbeddedConfig

    config = EmbeddedConfig.from_env(os.environ)
    found = described(stored(config.data_dir, config.models_dir))
    return [Check("storage", OK, f"{found}; to delete some of it: tinsmith clean")]


def default_model() -> list[Check]:
    """Check the files and the tokenizer of the default model, if it was downloaded."""
    from tinsmith.config import EmbeddedConfig
    from tinsmith.engine.models.gguf_to_hf import DIGESTS, is_intact
    from tinsmith.engine.models.sources import NAME

    place = EmbeddedConfig.from_env(os.environ).models_dir / NAME.partition("/")[2]
    if not (place / DIGESTS).exists():
        return [
            Check("default model", NOTE, f"{NAME} is not downloaded yet", "nothing: it is downloaded when first needed")
        ]
    if not is_intact(place):
        return [Check("default model", BROKEN, f"{place} is damaged", "delete it; it is downloaded again when needed")]
    return [
        Check("default model", OK, f"{NAME}: all files match their digests"),
        _round_trip("default tokenizer", place),
    ]


def _round_trip(name: str, directory: Path) -> Check:
    from tinsmith.errors import TinkerError
    from tinsmith.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(str(directory))
        tokens = tokenizer.encode(TEXT, add_special_tokens=False)
        again = tokenizer.decode(tokens)
    except TinkerError as error:
        return Check(name, BROKEN, str(error), "pip install 'tinsmith[tokenizers]'")
    if again != TEXT:
        return Check(name, BROKEN, f"{TEXT!r} decodes to {again!r}", "report this as a bug, with the model's name")
    return Check(name, OK, f"{len(TEXT)} characters encode to {len(tokens)} tokens and decode unchanged")


def engine_trial() -> list[Check]:
    """Start a server with a tiny model, train it on one sequence, and sample."""
    from tinsmith.engine.models.tiny import make_tiny

    with tempfile.TemporaryDirectory() as scratch:
        directory = make_tiny(Path(scratch) / "tiny", seed=1)
        with contextlib.redirect_stderr(io.StringIO()):  # the client reports that it starts an engine
            return [_round_trip("tokenizer", directory), *_trial(directory, Path(scratch) / "data")]


def _trial(model: Path, data_dir: Path) -> list[Check]:
    import tinsmith
    from tinsmith.types import AdamParams, Datum, ModelInput, SamplingParams

    tokens = [11, 12, 13, 41, 42, 43, 44, 45]
    datum = Datum(
        ModelInput.from_ints(tokens[:-1]),
        {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    settings = {"dtype": "float32", "threads": 1}  # finding the fastest takes longer than this check
    with tinsmith.local({"tiny": str(model)}, data_dir=data_dir, settings=settings) as service:
        training = service.create_lora_training_client("tiny", rank=8, seed=0)
        losses = []
        for _ in range(4):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=1e-2)).result()
            losses.append(passed.result().metrics["loss:sum"])
        sampler = training.save_weights_and_get_sampling_client()
        params = SamplingParams(max_tokens=4, temperature=0.0, stop=[])
        drawn = sampler.sample(ModelInput.from_ints(tokens[:3]), 1, params).result().sequences[0].tokens
    learns = losses[-1] < losses[0]
    shown = f"loss {losses[0]:.2f} to {losses[-1]:.2f} in {len(losses)} steps on a tiny model"
    return [
        Check("training", OK if learns else BROKEN, shown, "" if learns else "report this as a bug, with this table"),
        Check("sampling", OK if len(drawn) == 4 else BROKEN, f"{len(drawn)} tokens sampled from the trained weights"),
    ]


def server() -> list[Check]:
    """Check the configured server, and whether it accepts the key."""
    from tinsmith.config import LOCAL, ClientConfig
    from tinsmith.errors import TinkerError
    from tinsmith.wire.routes.table import GET_SERVER_CAPABILITIES, HEALTHZ

    try:
        config = ClientConfig.from_env(base_url=base_url())
    except TinkerError as error:
        return [Check("settings", BROKEN, str(error), "fix this setting")]
    if config.base_url == LOCAL:
        return [
            Check(
                "server", NOTE, "none configured; clients use the local engine", "to use a server, set TINKER_BASE_URL"
            )
        ]
    with operations() as holder:
        from tinsmith.client.connection.own_endpoints import Extensions

        try:
            status = Extensions(holder).open_page(HEALTHZ.path).status
        except TinkerError as error:
            return [Check("server", BROKEN, str(error), "start the server, or fix TINKER_BASE_URL")]
        checks = [Check("server", OK if status < 500 else BROKEN, f"{config.base_url} responds (HTTP {status})")]
        try:
            answer: Any = holder.submit("doctor", holder.connection.call(GET_SERVER_CAPABILITIES)).result()
        except TinkerError as error:
            first, _, step = explained(error).partition("\n")
            return [*checks, Check("key", BROKEN, first, step)]
    count = len(answer.supported_models)
    return [*checks, Check("key", OK, f"accepted; {plural(count, 'base model')} available")]

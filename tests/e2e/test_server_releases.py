"""A running server serves every release of the official SDK, and our own client the same.

The table in docs/reference/server.md is written by
`PYTHONPATH=src:tests .venv/bin/python tests/e2e/test_server_releases.py --write`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyrage
import pytest
from support.program_run import BUDGET_PROGRAM, Steps, as_official, comparable, raised, run_module, run_official
from support.release_table import DOCUMENT, REFRESH, release_table, with_table
from support.releases import NEWEST, SERVED_RELEASES
from support.server_process import ServerProcess

from tinsmith import ClientConfig, Datum, ModelInput, ServiceClient
from tinsmith.server.routes.service import CLIENT_CONFIG

FLAGS = [name for name, value in CLIENT_CONFIG.items() if value is True]
NO_FLAGS = ",".join(f"{name}=false" for name in FLAGS)
OURS = "tinsmith"

REFUSED = {
    "no data": "ValueError",
    "optim_step without parameters": "TypeError",
    "create Dimuon": "BadRequestError",
    "stable_reinforce": "BadRequestError",
    "save_state refused": "BadRequestError",
    "save_state bad name": "BadRequestError",
    "load_state unknown": "NotFoundError",
    "encrypted": "BadRequestError",
    "sampler unknown": "NotFoundError",
    "rest get_training_run": "NotFoundError",
    "async load_state": "BadRequestError",
    "async get_training_run": "NotFoundError",
}
"""Steps of the whole program that every server refuses: what is malformed, unknown, taken, or of another rank."""
REFUSED_WITH_FLAGS = {**REFUSED, "forward_backward_custom handle": "RequestFailedError"}
"""The arithmetic backend runs no uploaded losses."""
REFUSED_WITHOUT_FLAGS = {**REFUSED, "rest whoami": "RuntimeError"}
"""whoami reads the token that a client without JWT does not have."""

_SAMPLERS = ("ephemeral", "base", "saved", "from training", "pickled", "handle")
DRAWN = [
    *(f"{name}: {step}" for name in _SAMPLERS for step in ("sample", "default length", "prompt logprobs")),
    *("async optim_step", "async forward", "async custom", "async samples", "async compute_logprobs"),
]
"""Steps without a seed: their content is the server's draw."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("served") / "data") as process:
        yield process


@pytest.fixture(scope="module")
def runs() -> dict[str, Steps]:
    """The core loop of each client, as far as it was run."""
    return {}


def core_loop(server: ServerProcess, client: str) -> Steps:
    return run_module(server, client, "--old") if client == OURS else run_official(server, client, "--old")


@pytest.mark.parametrize("client", [*SERVED_RELEASES, OURS])
def test_every_release_drives_the_core_loop(client: str, server: ServerProcess, runs: dict[str, Steps]) -> None:
    runs[client] = core_loop(server, client)
    is_strict = client == OURS or [int(part) for part in client.split(".")] >= [0, 19]
    assert raised(as_official(runs[client])) == ({"no data": "ValueError"} if is_strict else {})
    assert "failed" not in server.log


def test_the_table_of_releases_is_current(server: ServerProcess, runs: dict[str, Steps]) -> None:
    for client in (*SERVED_RELEASES, OURS):
        if client not in runs:
            runs[client] = core_loop(server, client)
    text = DOCUMENT.read_text()
    ordered = {client: runs[client] for client in (*SERVED_RELEASES, OURS)}
    assert with_table(text, release_table(ordered)) == text, f"{DOCUMENT.name} is not current; {REFRESH}"


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({}, REFUSED_WITH_FLAGS), ({"client_flags": NO_FLAGS}, REFUSED_WITHOUT_FLAGS)],
    ids=["flags on", "flags off"],
)
def test_the_whole_program_is_the_same_for_both_clients(
    settings: dict[str, Any], refused: dict[str, str], tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "official", **settings) as server:
        theirs = run_official(server, NEWEST)
    with ServerProcess(tmp_path / "ours", **settings) as server:
        ours = as_official(run_module(server, OURS))
    assert raised(theirs) == refused
    assert comparable(ours, DRAWN) == comparable(theirs, DRAWN)


class Capped(NamedTuple):
    """A server as the holder of a key with few tokens sees it."""

    url: str
    key: str


def test_an_official_client_at_its_token_cap_is_told_at_once(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server:
        made = server.run("key", "create", "capped", "--tokens-per-day", "4", "--format", "json")
        capped = Capped(server.url, json.loads(made.stdout)["key"])
        steps = dict(run_official(capped, NEWEST, program=BUDGET_PROGRAM))
        log = server.log
    assert steps.pop("pass within the budget") == steps.pop("step after it") == "done"
    for name, needed in (("sample beyond it", 7), ("pass beyond it", 5)):
        refused = steps.pop(name)
        assert refused["raises"] == "PermissionDeniedError"
        assert f"4 tokens per day has 2 left; this needs {needed}" in refused["text"]
    assert log.count("403 over_budget") == 2, "each was sent once: a client that tries again is refused again"


def test_an_encrypted_export_opens_with_the_recipients_key(server: ServerProcess, tmp_path: Path) -> None:
    identity = pyrage.x25519.Identity.generate()
    config = ClientConfig(base_url=server.url, api_key=server.key)
    with ServiceClient(config=config) as client:
        trainer = client.create_lora_training_client("tinsmith/arithmetic", rank=2)
        datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
        trainer.forward_backward([datum], "cross_entropy").result()
        plain = trainer.save_weights_external("plain").result()
        secret = trainer.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())]).result()
        rest = client.create_rest_client()
        names = {path: rest.get_external_weights_urls(path).result().urls for path in (plain.path, secret.path)}
        assert sorted(names[secret.path]) == [f"{name}.age" for name in sorted(names[plain.path])]
        for name, url in names[plain.path].items():
            encrypted = fetched(names[secret.path][f"{name}.age"])
            assert encrypted.startswith(b"age-encryption.org/v1\n")
            assert pyrage.decrypt(encrypted, [identity]) == fetched(url)
            with pytest.raises(pyrage.DecryptError):
                pyrage.decrypt(encrypted, [pyrage.x25519.Identity.generate()])


def fetched(url: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def write(clients: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder) / "data") as server:
        table = release_table({client: core_loop(server, client) for client in clients})
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(), table))


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: test_server_releases.py --write")
    write([*SERVED_RELEASES, OURS])

"""`tinsmith key`, and what `tinsmith serve` refuses before it starts."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tinsmith.cli.server.doctor import BASE, EXTRAS
from tinsmith.cli.server.key import key
from tinsmith.cli.server.serve import serve
from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.store.sqlite import SqliteStore


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A server configures logging; in a test it must not do so for those that follow."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn")
    before = list(root.handlers), root.level, uvicorn.level
    yield
    root.handlers[:], root.level, uvicorn.level = before


def keys(directory: Path, *arguments: str) -> Result:
    return CliRunner().invoke(key, [*arguments, "--data-dir", str(directory)], env={"COLUMNS": "300"})


async def opens(directory: Path, text: str) -> bool:
    store = SqliteStore(directory / "tinsmith.sqlite")
    await store.open()
    try:
        await Authenticator(store, b"s" * 32).caller(text)
    except NotAuthenticatedError:
        return False
    finally:
        await store.close()
    return True


def test_a_key_is_made_shown_once_listed_by_its_hint_and_revoked(tmp_path: Path) -> None:
    made = keys(tmp_path, "create", "laptop", "--org", "acme", "--scope", "train", "--scope", "read")
    assert made.exit_code == 0
    text = made.stdout.strip()
    assert text.startswith("tml-")
    listed = json.loads(keys(tmp_path, "list", "--format", "json").stdout)["keys"]
    assert [(row["name"], row["org_id"], row["user_id"], row["scopes"]) for row in listed] == [
        ("laptop", "acme", "acme.laptop", '["read", "train"]')
    ]
    assert "digest" not in listed[0]
    table = keys(tmp_path, "list").stdout
    assert "laptop" in table
    assert "active" in table
    assert text not in table

    assert asyncio.run(opens(tmp_path, text))
    assert keys(tmp_path, "revoke", str(listed[0]["key_id"])).exit_code == 0
    assert not asyncio.run(opens(tmp_path, text))
    again = keys(tmp_path, "revoke", str(listed[0]["key_id"]))
    assert again.exit_code == 1
    assert "no active key has the ID" in again.output
    assert "revoked" in keys(tmp_path, "list").stdout


def test_a_key_as_json_with_an_end_and_caps(tmp_path: Path) -> None:
    options = ("--expires-days", "2", "--requests-per-minute", "5", "--tokens-per-day", "7", "--format", "json")
    made = json.loads(keys(tmp_path, "create", "ci", *options).stdout)
    assert set(made) == {"key_id", "key", "name", "org"}
    [row] = json.loads(keys(tmp_path, "list", "--format", "json").stdout)["keys"]
    assert (row["requests_per_minute"], row["tokens_per_day"], row["user_id"]) == (5, 7, "local")
    assert row["expires_at"] - row["created_at"] == pytest.approx(2 * 86_400)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scope", "fly"), "'fly'"),
        (("--requests-per-minute", "0"), "requests-per-minute"),
        (("--expires-days", "0"), "expires-days"),
        (("--org", ""), "must not be empty"),
    ],
)
def test_keys_that_cannot_be_made(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    result = keys(tmp_path, "create", "x", *arguments)
    assert result.exit_code != 0
    assert says in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--port", "70000"), "port must be"),
        (("--config", "none.toml"), "cannot read none.toml"),
        (("--log-format", "xml"), "log-format"),
        (("--host", "0.0.0.0", "--database", "memory:"), "there is no API key yet"),
        (("--database", "mysql://x", "--port", "0"), "mysql: is not supported"),
        (("--api-key", "sk-nonsense", "--database", "memory:"), "must begin with tml-"),
        (("--database", "memory:", "--backend", "nonsense"), "is neither 'local' nor 'module:factory'"),
    ],
)
def test_servers_that_do_not_start(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(serve, [*arguments, "--data-dir", str(tmp_path)])
    assert result.exit_code != 0
    assert says in result.output
    assert "Traceback" not in result.output


def test_doctor_knows_the_packages_of_every_extra() -> None:
    """`dev` is for this repository, and an extra that includes another adds only its own packages."""

    def packages(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=;]", line)[0] for line in requirements} - {"tinsmith"}

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = {name: packages(lines) for name, lines in project["optional-dependencies"].items() if name != "dev"}
    assert {name: set(names) for name, names in EXTRAS.items()} == extras
    assert set(BASE) == packages(project["dependencies"])

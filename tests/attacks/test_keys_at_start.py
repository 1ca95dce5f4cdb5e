"""Keys and passwords given at start: other users of the machine cannot see them, and they are valid only while
given."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.in_process import BreakableStore, run, with_store
from support.server_process import ServerProcess

from tinsmith.cli.main import main
from tinsmith.config import ServerConfig
from tinsmith.errors import InvalidInputError, StoreError, TinkerError
from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.auth.keys import create_key, digest_of
from tinsmith.server.auth.start_keys import prepare_keys
from tinsmith.server.refusals import NotAuthenticatedError, NotReadyError
from tinsmith.store.base import statement
from tinsmith.store.rows import KeyRow

FIRST, SECOND = "tml-" + "1" * 30, "tml-" + "2" * 30


async def accepted(store: BreakableStore, *keys: str) -> list[bool]:
    """Which of these keys open the server now."""
    authenticator = Authenticator(store, b"s" * 32)
    found = []
    for key in keys:
        try:
            found.append("admin" in (await authenticator.caller(key)).scopes)
        except NotAuthenticatedError:
            found.append(False)
    return found


def test_a_given_key_is_good_for_as_long_as_each_start_gives_it(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        async def start(key: str | None, now: float) -> list[bool]:
            await prepare_keys(ServerConfig(data_dir=tmp_path, api_key=key), store, now)
            return await accepted(store, FIRST, SECOND)

        assert await start(FIRST, 1.0) == [True, False]
        assert await start(FIRST, 2.0) == [True, False]
        assert await start(SECOND, 3.0) == [False, True], "the key was changed, so the earlier one is none"
        assert await start(None, 4.0) == [False, False], "nor is one that is not given any more"
        assert await start(FIRST, 5.0) == [True, False], "the operator's word counts, not the order"
        names = {row.name for row in await store.read(KeyRow, "keys")}
        assert names == {"given at start", "local"}

    with_store(scenario)


def test_the_same_holds_for_a_server_that_others_can_reach(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        open_to_all = ServerConfig(data_dir=tmp_path, host="0.0.0.0", api_key=FIRST)
        await prepare_keys(open_to_all, store, 1.0)
        with pytest.raises(NotReadyError, match="no API key yet"):
            await prepare_keys(ServerConfig(data_dir=tmp_path, host="0.0.0.0"), store, 2.0)
        assert await accepted(store, FIRST) == [False]

    with_store(scenario)


def test_a_given_key_that_was_revoked_by_hand_stays_revoked(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        config = ServerConfig(data_dir=tmp_path, api_key=FIRST)
        await prepare_keys(config, store, 1.0)
        [row] = await store.read(KeyRow, "key_by_digest", digest=digest_of(FIRST))
        await store.write(statement("revoke_key", key_id=row.key_id, revoked_at=2.0))
        for then in (config, ServerConfig(data_dir=tmp_path), config):
            if then.api_key is None:
                await prepare_keys(then, store, 3.0)
            else:
                with pytest.raises(NotReadyError, match="revoked"):
                    await prepare_keys(then, store, 3.0)

    with_store(scenario)


def test_keys_that_were_made_for_people_are_left_alone(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        made = await create_key(store, name="ann", now=0.0, scopes=("all", "admin"))
        await prepare_keys(ServerConfig(data_dir=tmp_path, api_key=FIRST), store, 1.0)
        await prepare_keys(ServerConfig(data_dir=tmp_path), store, 2.0)
        assert await accepted(store, made.key) == [True]
        for name in ("given at start", "local"):
            with pytest.raises(InvalidInputError, match="name"):
                await create_key(store, name=name, now=0.0)
        again = await prepare_keys(ServerConfig(data_dir=tmp_path, api_key=made.key), store, 3.0)
        assert again is None
        await prepare_keys(ServerConfig(data_dir=tmp_path), store, 4.0)
        assert await accepted(store, made.key) == [True], "a key of somebody's own is not revoked by starts"

    with_store(scenario)


def test_a_key_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"\n{FIRST}\n")
    config = ServerConfig.from_env({"TINSMITH_API_KEY_FILE": str(file)}, data_dir=tmp_path)

    async def scenario(store: BreakableStore) -> None:
        assert await prepare_keys(config, store, 1.0) == file
        assert await accepted(store, FIRST) == [True]

    with_store(scenario)
    assert FIRST not in repr(config)


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"  \n", "is empty"), (b"\xff\xfe", "not a text file"), (b"sk-1", "tml-")],
)
def test_a_key_file_that_holds_no_key_stops_the_start(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)

    async def scenario(store: BreakableStore) -> None:
        with pytest.raises(TinkerError, match=says):
            await prepare_keys(ServerConfig(data_dir=tmp_path, api_key_file=file), store, 1.0)

    with_store(scenario)


def test_two_ways_to_give_a_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TinkerError, match="both set"):
        ServerConfig(data_dir=tmp_path, api_key=FIRST, api_key_file=tmp_path / "key")


def status(url: str, key: str) -> int:
    request = urllib.request.Request(f"{url}/tinsmith/v1/status", headers={"x-api-key": key})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def seen_from_outside(server: ServerProcess) -> str:
    """What other users of the machine, a terminal and a log collector see of a running server."""
    arguments = Path(f"/proc/{server.process_id}/cmdline")
    shown = arguments.read_text() if arguments.exists() else ""
    return "\n".join((shown, server.announced, server.log))


def test_a_running_server_shows_no_key(tmp_path: Path) -> None:
    data, file = tmp_path / "data", tmp_path / "first key"
    file.write_text(FIRST)
    with ServerProcess(data, "--api-key-file", str(file)) as server:
        assert FIRST not in seen_from_outside(server)
        assert server.key == FIRST, "the lines can still be pasted"
        assert status(server.url, FIRST) == 200
    with ServerProcess(data, api_key=SECOND) as server:
        assert SECOND not in seen_from_outside(server)
        assert "# TINKER_API_KEY: the key given at start" in server.announced
        assert [status(server.url, key) for key in (FIRST, SECOND)] == [401, 200]
    with ServerProcess(data) as server:
        local = (data / "local.key").read_text().strip()
        assert local not in seen_from_outside(server)
        assert server.key == local
        assert [status(server.url, key) for key in (FIRST, SECOND, local)] == [401, 401, 200]


PASSWORD = "hunter2"


@pytest.mark.parametrize(
    "database",
    [f"postgresql://ann:{PASSWORD}@127.0.0.1:1/x?connect_timeout=1", f"postgresql://127.0.0.1:1/x?password={PASSWORD}"],
)
def test_the_password_of_a_database_is_shown_nowhere(database: str) -> None:
    postgres = pytest.importorskip("tinsmith.store.postgres")
    assert PASSWORD not in repr(ServerConfig(database=database))
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1") as failure:
        run(postgres.PostgresStore(database, patience_s=0.1).open())
    assert PASSWORD not in str(failure.value)
    with pytest.raises(StoreError) as failure:
        postgres.PostgresStore(f"{database}&{PASSWORD}")
    assert PASSWORD not in str(failure.value)


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (["--api-key", FIRST, "--backend", "none"], "other users can see --api-key with ps"),
        (["--database", f"mysql://ann:{PASSWORD}@x/y"], "other users can see the password in --database with ps"),
        (["--database", "mysql://x/y"], ""),
    ],
)
def test_secrets_in_arguments_are_warned_of_and_not_repeated(tmp_path: Path, arguments: list[str], warns: str) -> None:
    result = CliRunner().invoke(main, ["serve", "--data-dir", str(tmp_path), *arguments])
    assert result.exit_code != 0
    assert warns in result.stderr
    assert ("ps" in result.stderr) == bool(warns)
    assert not any(secret in result.output for secret in (FIRST, PASSWORD))
    listed = CliRunner().invoke(main, ["key", "list", "--data-dir", str(tmp_path), "--format", "json"])
    assert FIRST not in json.dumps(json.loads(listed.stdout)["keys"])

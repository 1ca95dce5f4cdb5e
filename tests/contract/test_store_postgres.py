"""Behaviour specific to PostgreSQL: servers that disappear, lost confirmations, deadlocks."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest
from support import store_rows as make
from support.postgres import PostgresServer, free_port
from support.stores import postgres_stores, run

from tinsmith.errors import StorageFullError, StoreError, StoreUnavailableError, UnstorableError
from tinsmith.store.base import statement
from tinsmith.store.postgres import PostgresStore
from tinsmith.store.postgres_commit import explained
from tinsmith.store.rows import OrgRow, UsageRow

HOURS = {"org_id": "org-1", "since_hour": 0, "until_hour": 1000}


class Proxy:
    """Between a store and its server; loses the next COMMIT, or the answer to it, with the connection."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.lose: str | None = None
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        yield self
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        pumps = [
            asyncio.ensure_future(self._pump(reader, to_server, self._on_request)),
            asyncio.ensure_future(self._pump(from_server, writer, self._on_answer)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, to_server):
            end.close()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_let_through: Callable[[bytes], bool]
    ) -> None:
        while (data := await reader.read(2**16)) and is_let_through(data):
            writer.write(data)
            await writer.drain()

    def _on_request(self, data: bytes) -> bool:
        if self.lose is None or b"COMMIT" not in data:
            return True
        if self.lose == "request":
            self.lose = None
            return False
        self.lose = "answer under way"
        return True

    def _on_answer(self, data: bytes) -> bool:
        if self.lose != "answer under way":
            return True
        self.lose = None
        return False


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_commit_that_got_lost_is_written_once(postgres: PostgresServer, lost: str) -> None:
    dsn = postgres.database()

    async def scenario(direct: PostgresStore) -> None:
        async with Proxy(postgres.port).running() as proxy:
            store = PostgresStore(dsn.replace(f":{postgres.port}/", f":{proxy.port}/"))
            await store.open()
            for _ in range(10):
                proxy.lose = lost
                touched = await asyncio.gather(*(store.write(statement("add_usage", make.usage())) for _ in range(3)))
                assert touched == [1, 1, 1]
                assert proxy.lose is None
            await store.close()
        (found,) = await direct.read(UsageRow, "usage_of_org", **HOURS)
        assert found.training == 10 * 3 * 7

    run(postgres_stores(dsn), scenario)


def test_calls_wait_for_a_server_that_comes_back(postgres: PostgresServer) -> None:
    async def scenario(store: PostgresStore) -> None:
        await store.write(statement("insert_org", make.org("before")))
        assert len(await store.read(OrgRow, "orgs")) == 1
        await asyncio.to_thread(postgres.stop)
        write = asyncio.ensure_future(store.write(statement("insert_org", make.org("meanwhile"))))
        read = asyncio.ensure_future(store.read(OrgRow, "org", org_id="before"))
        await asyncio.to_thread(postgres.start)
        assert await write == 1
        assert await read == [make.org("before")]
        assert len(await store.read(OrgRow, "orgs")) == 2

    run(postgres_stores(postgres.database()), scenario)


def test_patience_has_an_end_and_a_reason(postgres: PostgresServer) -> None:
    dsn = postgres.database()

    async def scenario(direct: PostgresStore) -> None:
        proxy = Proxy(postgres.port)
        async with proxy.running():
            store = PostgresStore(
                dsn.replace(f"tester@127.0.0.1:{postgres.port}", f"tester:hush@127.0.0.1:{proxy.port}"), patience_s=0.2
            )
            await store.open()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        unreachable = rf"postgresql://127\.0\.0\.1:{proxy.port}/\w+: cannot connect to the database"
        with pytest.raises(StoreUnavailableError, match=unreachable) as caught:
            await store.write(statement("insert_org", make.org()))
        assert "hush" not in str(caught.value)
        with pytest.raises(StoreUnavailableError, match=unreachable):
            await store.read(OrgRow, "orgs")
        await store.close()
        assert await direct.read(OrgRow, "orgs") == []

    run(postgres_stores(dsn), scenario)


def test_a_server_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(StoreUnavailableError, match=re.escape(f"127.0.0.1:{port}/x: cannot connect to the database")):
        run(postgres_stores(f"postgresql://127.0.0.1:{port}/x"), lambda store: store.size_bytes(), patience_s=0.1)


def test_deadlocks_between_processes_cost_nobody_a_write(postgres: PostgresServer) -> None:
    make_store = postgres_stores(postgres.database())

    async def scenario(store: PostgresStore) -> None:
        other = make_store()
        await other.open()
        hours = list(range(100, 120))
        for _ in range(20):
            await asyncio.gather(
                *(
                    one.write(*(statement("add_usage", make.usage(hour)) for hour in order))
                    for one, order in ((store, hours), (other, hours[::-1]))
                )
            )
        await other.close()
        found = await store.read(UsageRow, "usage_of_org", **HOURS)
        assert {row.training for row in found} == {20 * 2 * 7}

    run(make_store, scenario)


def test_many_reads_share_a_few_connections_and_none_is_left(postgres: PostgresServer) -> None:
    dsn = postgres.database()
    count = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"

    def connections() -> int:
        with psycopg.connect(dsn) as connection:
            row = connection.execute(count).fetchone()
            assert row is not None
            found: int = row[0]
            return found

    async def scenario(store: PostgresStore) -> None:
        await asyncio.gather(*(store.read(OrgRow, "orgs") for _ in range(200)))
        cancelled = asyncio.ensure_future(store.read(OrgRow, "orgs"))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await store.read(OrgRow, "orgs") == []
        assert 1 <= await asyncio.to_thread(connections) <= 5

    run(postgres_stores(dsn), scenario)
    while connections():  # a server process ends soon after its connection
        pass


def test_a_commit_is_durable_whatever_the_servers_default_is(postgres: PostgresServer) -> None:
    dsn = postgres.database()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {dsn.rpartition('/')[2]} SET synchronous_commit = off")

    async def scenario(store: PostgresStore) -> None:
        connection = await store._connect()
        row = await (await connection.execute("SHOW synchronous_commit")).fetchone()
        await connection.close()
        assert row == ("on",)

    run(postgres_stores(dsn), scenario)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (psycopg.errors.DiskFull("disk"), StorageFullError, "x: no space for the database (disk). Free some"),
        (psycopg.errors.ReadOnlySqlTransaction("ro"), StoreError, "Use the address of the primary, not of a replica."),
        (psycopg.errors.UndefinedTable("gone"), UnstorableError, "x: gone"),
    ],
)
def test_errors_of_postgres_by_their_kind(error: psycopg.Error, kind: type[StoreError], text: str) -> None:
    found = explained(error, "x")
    assert type(found) is kind
    assert text in str(found)

"""What the statements do, on every database: keys, lists, jobs, the journal, pruning, checkpoints, usage."""

from __future__ import annotations

import math

import pytest
from support import store_rows as make
from support.stores import AnyStore, MakeStore, run

from tinsmith.errors import ConstraintError
from tinsmith.server.jobs.pruning import DeletableRow, delete_in_pieces, delete_requests
from tinsmith.server.ops.spending import StoredRow
from tinsmith.server.ops.sweeper import ModelIdRow, SessionIdRow
from tinsmith.store import rows
from tinsmith.store.base import Row, Value, statement


class Directory(Row, frozen=True, kw_only=True):
    model_id: str
    snapshot_directory: str | None


ROUND_TRIPS: list[tuple[Row, str, str, dict[str, Value]]] = [
    (make.org(), "insert_org", "org", {"org_id": "org-1"}),
    (make.user(), "insert_user", "user", {"user_id": "user-1"}),
    (make.user(email=None), "insert_user", "user", {"user_id": "user-1"}),
    (make.project(), "insert_project", "project", {"org_id": "org-1", "project_id": "project-1"}),
    (make.key(), "insert_key", "key", {"key_id": 1}),
    (make.key(project_id=None, expires_at=None, tokens_per_day=None), "insert_key", "keys", {}),
    (make.session(), "insert_session", "session", {"session_id": "session-1"}),
    (
        make.model(fault="lost", notice="moved", snapshot_directory="/s", snapshot_seq=4, fingerprint="{}"),
        "insert_model",
        "model",
        {"model_id": "model-1"},
    ),
    (make.sampler(run_id="model-1"), "insert_sampler", "sampler", {"sampler_id": "sampler-1"}),
    (make.job(), "insert_job", "job", {"request_id": "model-1:1"}),
    (make.result(), "insert_result", "result", {"request_id": "model-1:1"}),
    (make.checkpoint(), "put_checkpoint", "checkpoint", {"path": "tinker://model-1/weights/a"}),
    (make.checkpoint(public=True, project_id=None), "put_checkpoint", "checkpoints_of_model", {"model_id": "model-1"}),
    (make.custom_loss(), "insert_custom_loss", "custom_loss", {"loss_id": "loss-1"}),
    (
        make.usage(
            run_id="model-1", prefill=1, prefill_cached=2, sampled=3, checkpoints=4, storage=5, device_us=6, jobs=8
        ),
        "add_usage",
        "usage_by_run",
        {"org_id": "org-1", "since_hour": 100, "until_hour": 101},
    ),
    (make.step(), "insert_step", "last_step", {"model_id": "model-1"}),
    (make.audit(), "insert_audit", "audit_of_org", {"org_id": "org-1", "since": 16.0, "until": 16.5, "limit": 9}),
    (make.telemetry(), "insert_telemetry", "telemetry_newest", {"limit": 9}),
]


@pytest.mark.parametrize(("row", "insert", "query", "parameters"), ROUND_TRIPS, ids=lambda value: str(value)[:20])
def test_rows_come_back_as_they_were(
    make_store: MakeStore, row: Row, insert: str, query: str, parameters: dict[str, Value]
) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement(insert, row))
        assert await store.read(type(row), query, **parameters) == [row]

    run(make_store, scenario)


def test_every_row_type_of_a_table_makes_a_round_trip() -> None:
    answers = {rows.JobHeadRow, rows.ResultHeadRow, rows.StorageRow, rows.CountRow, rows.SizeRow, rows.SeqRow}
    declared = {value for value in vars(rows).values() if isinstance(value, type) and issubclass(value, Row)}
    assert {type(row) for row, *_ in ROUND_TRIPS} == declared - answers - {Row}


def test_keys(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(*(statement("insert_key", make.key(key_id)) for key_id in (1, 2)))
        await store.write(statement("insert_key", make.key(3, org_id="org-2")))
        with pytest.raises(ConstraintError):
            await store.write(statement("insert_key", make.key(4, digest="digest-1")))
        assert [key.key_id for key in await store.read(rows.KeyRow, "key_by_digest", digest="digest-2")] == [2]
        assert await store.read(rows.KeyRow, "key_by_digest", digest="digest") == []
        assert [key.key_id for key in await store.read(rows.KeyRow, "keys")] == [1, 2, 3]
        assert await store.write(statement("revoke_key", key_id=2, revoked_at=5.0)) == 1
        assert await store.write(statement("revoke_key", key_id=2, revoked_at=6.0)) == 0
        assert (await store.read(rows.KeyRow, "key", key_id=2))[0].revoked_at == 5.0
        assert await store.write(statement("delete_key", key_id=2)) == 1
        assert [key.key_id for key in await store.read(rows.KeyRow, "keys")] == [1, 3]

    run(make_store, scenario)


LISTS = [
    ("insert_session", make.session, rows.SessionRow, "sessions", "session_id", ("org", "user", "user_in_project")),
    (
        "insert_model",
        make.model,
        rows.ModelRow,
        "models",
        "model_id",
        ("org", "user", "org_in_project", "user_in_project"),
    ),
    ("put_checkpoint", make.checkpoint, rows.CheckpointRow, "checkpoints", "name", ("user", "user_in_project")),
]


@pytest.mark.parametrize(
    ("insert", "maker", "row_type", "table", "key", "owner"),
    [(*fields, owner) for *fields, owners in LISTS for owner in owners],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lists_are_newest_first_in_pages_with_a_count(
    make_store: MakeStore, insert: str, maker: type, row_type: type[Row], table: str, key: str, owner: str
) -> None:
    """b and c have the same age: the greater name counts as the newer, on every page."""

    async def scenario(store: AnyStore) -> None:
        for name, created_at in (("b", 2.0), ("a", 1.0), ("d", 3.0), ("c", 2.0), ("B", 2.0)):
            await store.write(statement(insert, maker(name, created_at=created_at)))
        await store.write(statement(insert, maker("other", org_id="o", user_id="u", project_id="p")))
        listed = []
        kind, _, project = owner.partition("_in_")
        owners: dict[str, Value] = {"org_id": "org-1", "project_id": f"{project}-1" if project else None}
        if project:
            await store.write(statement(insert, maker("elsewhere", project_id="project-2")))
            await store.write(statement(insert, maker("nowhere", project_id=None)))
        if kind == "user":
            owners["user_id"] = "user-1"
        for offset in (0, 2, 4, 6):
            page = await store.read(row_type, f"{table}_of_{kind}", **owners, limit=2, offset=offset)
            listed += [getattr(row, key) for row in page]
        assert listed == ["d", "c", "b", "B", "a"]
        if table != "sessions":  # whose list has no total in the protocol
            counted = await store.read(rows.CountRow, f"count_{table}_of_{kind}", **owners)
            assert counted == [rows.CountRow(count=5)]

    run(make_store, scenario)


def test_sessions(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(*(statement("insert_session", make.session(name)) for name in ("a", "b", "c")))
        beats = [("a", 20.0), ("b", 30.0), ("c", 1.0)]
        await store.write(*(statement("set_session_heartbeat", session_id=i, heartbeat_at=at) for i, at in beats))
        active = await store.read(rows.SessionRow, "sessions_active")
        assert [(row.session_id, row.heartbeat_at) for row in active] == [("c", 6.0), ("a", 20.0), ("b", 30.0)]
        ended = make.session("c", status="expired", status_detail=None, detail="silent", ended_at=40.0)
        assert await store.write(statement("set_session_status", ended)) == 1
        assert await store.write(statement("set_session_project", session_id="c", project_id="project-2")) == 1
        (found,) = await store.read(rows.SessionRow, "session", session_id="c")
        assert (found.status, found.detail, found.ended_at, found.project_id) == (
            "expired",
            "silent",
            40.0,
            "project-2",
        )
        assert [row.session_id for row in await store.read(rows.SessionRow, "sessions_active")] == ["a", "b"]

    run(make_store, scenario)


def test_sessions_before_a_moment_are_newest_first(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for name, created_at in (("a", 1.0), ("b", 2.0), ("c", 2.0), ("d", 3.0)):
            await store.write(statement("insert_session", make.session(name, created_at=created_at)))
        await store.write(statement("insert_session", make.session("other", org_id="org-2", created_at=1.0)))
        for before, offset, names in ((math.inf, 0, "dcba"), (3.0, 0, "cba"), (3.0, 1, "ba"), (1.0, 0, "")):
            found = await store.read(
                rows.SessionRow,
                "sessions_before",
                org_id="org-1",
                project_id=None,
                before=before,
                limit=9,
                offset=offset,
            )
            assert [row.session_id for row in found] == list(names)

    run(make_store, scenario)


def test_models(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(*(statement("insert_model", make.model(name)) for name in ("a", "b")))
        await store.write(statement("insert_model", make.model("c", session_id="session-2")))
        await store.write(
            statement("set_model_used", model_id="a", used_at=99.0),
            statement("set_model_used", model_id="b", used_at=1.0),
            statement("set_model_fault", model_id="a", fault="first"),
            statement("set_model_fault", model_id="a", fault="second"),
            statement("set_model_snapshot", model_id="a", snapshot_directory="/5", snapshot_seq=5),
            statement("set_model_snapshot", model_id="a", snapshot_directory="/4", snapshot_seq=4),
        )
        found = {
            row.model_id: row for row in await store.read(rows.ModelRow, "models_of_session", session_id="session-1")
        }
        assert list(found) == ["a", "b"]
        assert (found["a"].used_at, found["b"].used_at) == (99.0, 8.0)
        assert (found["a"].fault, found["a"].snapshot_directory, found["a"].snapshot_seq) == ("first", "/5", 5)
        await store.write(statement("set_model_notice", model_id="a", notice="moved"))
        await store.write(statement("set_model_fingerprint", model_id="a", fingerprint='{"cpu": "x"}'))
        [moved] = await store.read(rows.ModelRow, "model", model_id="a")
        assert (moved.notice, moved.fingerprint) == ("moved", '{"cpu": "x"}')
        directories = await store.read(Directory, "snapshot_directories")
        assert [(row.model_id, row.snapshot_directory) for row in directories if row.model_id in found] == [
            ("a", "/5"),
            ("b", None),
        ]
        assert await store.write(statement("unload_models_of_session", session_id="session-1")) == 2
        assert [row.model_id for row in await store.read(rows.ModelRow, "models_live")] == ["c"]
        await store.write(statement("set_model_state", model_id="a", state="live"))
        assert sorted(row.model_id for row in await store.read(rows.ModelRow, "models_live")) == ["a", "c"]

    run(make_store, scenario)


def test_job_numbers(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(*(statement("insert_job", make.job(seq=seq)) for seq in (7, 0, 3)))
        repeated = make.job(seq=3, request_id="another")
        with pytest.raises(ConstraintError):
            await store.write(statement("insert_job", repeated))
        assert await store.write(statement("insert_job_if_absent", repeated)) == 0
        assert await store.write(statement("insert_job_if_absent", make.job("model-2", 3))) == 1
        assert await store.read(rows.JobRow, "job_by_number", lane="model-1", seq=3) == [make.job(seq=3)]
        (head,) = await store.read(rows.JobHeadRow, "job_head_by_number", lane="model-1", seq=3)
        assert (head.request_id, head.digest, head.size_bytes) == ("model-1:3", "d", 256)

    run(make_store, scenario)


def test_job_states_and_queues(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        numbers = [("b", 1, "org-1"), ("a", 10, "org-1"), ("a", 9, "org-1"), ("c", 5, "org-2"), ("a", 8, "org-1")]
        await store.write(*(statement("insert_job", make.job(lane, seq, org_id=org)) for lane, seq, org in numbers))
        await store.write(statement("insert_job", make.job("a", 7, state="refused", job=b"")))
        assert await store.write(statement("set_job_state", request_id="a:8", state="done")) == 1
        assert await store.write(statement("set_job_state", request_id="a:8", state="failed")) == 0
        assert (await store.read(rows.JobRow, "job", request_id="a:8"))[0].state == "done"
        queued = await store.read(rows.JobRow, "jobs_queued")
        assert [row.request_id for row in queued] == ["a:9", "a:10", "b:1", "c:5"]
        heads = await store.read(rows.JobHeadRow, "job_heads_of_session", session_id="session-1", limit=9)
        assert [row.request_id for row in heads] == ["a:10", "a:9", "a:8", "a:7", "c:5", "b:1"]

    run(make_store, scenario)


def test_the_journal_is_in_order_and_can_be_cut(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for seq in (5, 1, 4, 2, 3):
            state = "queued" if seq > 3 else "done"
            await store.write(statement("insert_job", make.job(seq=seq, state=state, job=bytes([seq]) * 10)))
        page = await store.read(rows.JobRow, "jobs_of_lane_after", lane="model-1", seq=1, limit=3)
        assert [(row.seq, row.job[:1]) for row in page] == [(2, b"\2"), (3, b"\3"), (4, b"\4")]
        size = await store.read(rows.SizeRow, "journal_bytes_of_lane", lane="model-1", seq=1)
        assert size == [rows.SizeRow(size_bytes=40)]
        some = {"lane": "model-1", "after": 1, "seq": 4}
        found = await store.read(DeletableRow, "payloads_of_lane", **some, limit=1)
        assert found == [DeletableRow(name="model-1:2", size_bytes=10)]
        await delete_in_pieces(store, "payloads_of_lane", "delete_payload", **some)
        assert await store.read(DeletableRow, "payloads_of_lane", **some, limit=9) == []
        assert await store.write(statement("prune_journal", lane="model-1", seq=4)) == 1
        assert await store.write(statement("prune_journal", lane="model-1", seq=4)) == 0
        left = await store.read(rows.JobRow, "jobs_of_lane_after", lane="model-1", seq=-1, limit=9)
        assert [len(row.job) for row in left] == [0, 0, 0, 10, 10]

    run(make_store, scenario)


def test_a_snapshot_counts_only_when_all_it_contains_has_a_result(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_model", make.model("model-1")))
        await store.write(*(statement("insert_job", make.job(seq=seq, state="queued")) for seq in (1, 2, 3)))
        await store.write(statement("set_job_state", request_id="model-1:1", state="done"))
        snapshot = {"model_id": "model-1", "snapshot_directory": "/s"}
        assert await store.write(statement("set_model_snapshot", **snapshot, snapshot_seq=2)) == 0
        assert await store.write(statement("set_model_snapshot", **snapshot, snapshot_seq=1)) == 1
        await store.write(statement("set_job_state", request_id="model-1:2", state="failed"))
        assert await store.write(statement("set_model_snapshot", **snapshot, snapshot_seq=2)) == 1

    run(make_store, scenario)


def test_the_first_result_stays(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job()))
        assert await store.write(statement("insert_result", make.result())) == 1
        assert await store.write(statement("insert_result", make.result(body=b"other"))) == 0
        (head,) = await store.read(rows.ResultHeadRow, "result_heads_of_session", session_id="session-1", limit=9)
        assert (head.encoding, head.size_bytes) == ("protobuf", 8)
        assert await store.read(rows.SizeRow, "result_bytes") == [rows.SizeRow(size_bytes=8)]

    run(make_store, scenario)


def test_pruning_takes_all_of_a_session_that_ended_long_ago(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        sessions = {"old": 10.0, "late": 30.0, "active": None}
        for name, ended_at in sessions.items():
            await store.write(statement("insert_session", make.session(name, ended_at=ended_at)))
            await store.write(statement("insert_custom_loss", make.custom_loss(f"{name}-loss", session_id=name)))
            for seq, state in enumerate(("done", "failed", "refused")):
                job = make.job(f"{name}-model", seq, session_id=name, state=state)
                await store.write(statement("insert_job", job), statement("insert_result", make.result(job.request_id)))
        before = {"before": 20.0, "limit": 9}
        assert [row.session_id for row in await store.read(SessionIdRow, "sessions_to_prune", **before)] == ["old"]
        assert await store.write(statement("set_session_pruned", session_id="old")) == 1
        assert await store.read(SessionIdRow, "sessions_to_prune", **before) == []
        stored = await store.read(DeletableRow, "stored_of_session", session_id="old", limit=9)
        one, result = make.job(), make.result()
        assert [row.size_bytes for row in stored] == [len(one.job) + len(result.body)] * 3
        assert sorted(row.name for row in stored) == [f"old-model:{seq}" for seq in range(3)]
        assert await store.read(DeletableRow, "stored_of_lane", lane="old-model", limit=9) == stored
        assert [row.session_id for row in await store.read(SessionIdRow, "sessions_half_pruned")] == ["old"]
        await delete_requests(store, "stored_of_session", session_id="old")
        assert [row.session_id for row in await store.read(SessionIdRow, "sessions_half_pruned")] == ["old"]
        await delete_in_pieces(store, "losses_of_session", "delete_custom_loss", session_id="old")
        assert await store.read(SessionIdRow, "sessions_half_pruned") == []
        for name in sessions:
            left = 0 if name == "old" else 3
            assert len(await store.read(rows.JobHeadRow, "job_heads_of_session", session_id=name, limit=9)) == left
            assert (
                len(await store.read(rows.ResultHeadRow, "result_heads_of_session", session_id=name, limit=9)) == left
            )
            found = await store.read(rows.CustomLossRow, "custom_loss", loss_id=f"{name}-loss")
            assert len(found) == (0 if name == "old" else 1)

    run(make_store, scenario)


def test_checkpoints(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        a, b, c = (make.checkpoint(name, expires_at=at) for name, at in (("a", 30.0), ("b", 10.0), ("c", None)))
        await store.write(*(statement("put_checkpoint", row) for row in (a, b, c)))
        again = make.checkpoint("a", digest="new", size_bytes=5, expires_at=30.0)
        assert await store.write(statement("put_checkpoint", again)) == 1
        assert await store.read(rows.CheckpointRow, "checkpoints_of_model", model_id="model-1") == [again, b, c]
        assert await store.read(rows.CheckpointRow, "checkpoints_of_session", session_id="session-1") == [again, b, c]
        assert await store.read(rows.CheckpointRow, "checkpoints_expired", before=30.0, limit=5) == [b]
        await store.write(
            statement("set_checkpoint_public", path=a.path, public=True),
            statement("set_checkpoint_expires_at", path=b.path, expires_at=None),
        )
        assert [row.public for row in await store.read(rows.CheckpointRow, "checkpoint", path=a.path)] == [True]
        assert await store.read(rows.CheckpointRow, "checkpoints_expired", before=30.0, limit=5) == []
        assert await store.write(statement("delete_checkpoint", path=b.path, directory="/another")) == 0
        assert await store.write(statement("delete_checkpoint", path=b.path, directory=b.directory)) == 1
        assert await store.read(rows.CheckpointRow, "checkpoint", path=b.path) == []
        assert await store.read(rows.SizeRow, "checkpoint_bytes") == [rows.SizeRow(size_bytes=2**33 + 5)]

    run(make_store, scenario)


def test_checkpoints_that_may_go(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        def made(name: str, at: float, **fields: object) -> rows.CheckpointRow:
            return make.checkpoint(name, **{"created_at": at, "expires_at": None, "public": False, **fields})

        a, b, c, d = (made(name, at) for name, at in (("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)))
        others = [
            made("shown", 0.0, public=True),
            made("short", 9.0, expires_at=99.0),
            made("drawn", 0.5, kind="sampler_weights"),
            made("alone", 0.1, model_id="model-2"),
        ]
        await store.write(*(statement("put_checkpoint", row) for row in (*others, d, c, b, a)))

        async def beyond(keep: int, before: float = 0.0, limit: int = 9) -> list[rows.CheckpointRow]:
            return await store.read(rows.CheckpointRow, "checkpoints_beyond", keep=keep, before=before, limit=limit)

        assert await beyond(2) == [a, b]
        assert await beyond(2, limit=1) == [a]
        assert await beyond(2**62, before=4.5) == [a, b, c]  # never the newest
        assert await beyond(3, before=2.5) == [a, b]
        assert await beyond(9) == []

    run(make_store, scenario)


def test_a_checkpoint_that_has_changed_is_not_deleted_as_it_was(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for changed in ({"directory": "/new"}, {"public": True}, {"expires_at": 9.0}, {"expires_at": None}):
            row = make.checkpoint("a", **{"expires_at": 5.0, "public": False} | changed)
            await store.write(statement("put_checkpoint", row))
            was = make.checkpoint("a", expires_at=5.0, public=False)
            assert await store.write(statement("delete_checkpoint_as_it_was", was, ends_at=5.0)) == 0
            end = row.expires_at if row.expires_at is not None else -1.0
            assert await store.write(statement("delete_checkpoint_as_it_was", row, ends_at=end)) == 1

    run(make_store, scenario)


def test_storage_is_added_up(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        owners = [("p", "u", 2**40), ("p", "u", 1), ("p", "v", 2), (None, "u", 3)]
        for index, (project, user, size) in enumerate(owners):
            row = make.checkpoint(str(index), project_id=project, user_id=user, size_bytes=size)
            await store.write(statement("put_checkpoint", row))
        in_p = [
            rows.StorageRow(project_id="p", user_id="u", count=2, size_bytes=2**40 + 1),
            rows.StorageRow(project_id="p", user_id="v", count=1, size_bytes=2),
        ]
        outside = rows.StorageRow(project_id=None, user_id="u", count=1, size_bytes=3)
        assert await store.read(rows.StorageRow, "storage_of_org", org_id="org-1") == [*in_p, outside]
        assert await store.read(rows.StorageRow, "storage_of_project", org_id="org-1", project_id="p") == in_p
        (whole,) = await store.read(rows.StorageRow, "storage_of_session", session_id="session-1")
        assert (whole.count, whole.size_bytes) == (4, 2**40 + 6)
        (nothing,) = await store.read(rows.StorageRow, "storage_of_session", session_id="other")
        assert (nothing.count, nothing.size_bytes) == (0, 0)

    run(make_store, scenario)


AMOUNTS = ("training", "prefill", "prefill_cached", "sampled", "checkpoints", "storage", "device_us", "jobs")


def test_usage_adds_up_by_hour_and_run(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        amounts = {name: 2**index for index, name in enumerate(AMOUNTS)}
        for hour, run_id in ((1, "a"), (1, "a"), (1, "b"), (2, "a")):
            await store.write(statement("add_usage", make.usage(hour, run_id=run_id, **amounts)))
        await store.write(statement("add_usage", make.usage(1, org_id="org-2")))
        period = {"org_id": "org-1", "since_hour": 1, "until_hour": 2}
        by_run = await store.read(rows.UsageRow, "usage_by_run", **period)
        assert [row.run_id for row in by_run] == ["a", "b"]
        (whole,) = await store.read(rows.UsageRow, "usage_of_org", **period)
        for name, amount in amounts.items():
            assert [getattr(row, name) for row in (*by_run, whole)] == [2 * amount, amount, 3 * amount]
        spent = await store.read(rows.CountRow, "tokens_of_user", org_id="org-1", user_id="user-1", since_hour=1)
        assert spent == [rows.CountRow(count=4 * (1 + 2 + 4 + 8))]

    run(make_store, scenario)


def test_a_jobs_usage_is_counted_while_it_has_no_result(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job()))
        counted = statement("add_job_usage", make.usage(1, device_us=2**40), request_id="model-1:1")
        done = statement("set_job_state", request_id="model-1:1", state="done")
        assert await store.write(counted, done) == 2
        assert await store.write(counted, done) == 0
        assert await store.write(statement("add_job_usage", make.usage(1), request_id="nobody's")) == 0
        (found,) = await store.read(rows.UsageRow, "usage_by_run", org_id="org-1", since_hour=1, until_hour=2)
        assert (found.training, found.device_us) == (7, 2**40)

    run(make_store, scenario)


def test_steps_of_a_run(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for number in range(1, 11):
            await store.write(statement("insert_step", make.step(2 * number, number)))
        await store.write(statement("insert_step", make.step(2, 1, model_id="model-2")))
        assert await store.write(statement("insert_step", make.step(20, 11))) == 0, "a step counts once"

        async def steps(after: int, limit: int) -> list[int]:
            found = await store.read(rows.StepRow, "steps_after", model_id="model-1", after=after, limit=limit)
            return [row.step for row in found]

        assert await steps(-1, 3) == [1, 2, 3]
        assert await steps(6, 99) == [4, 5, 6, 7, 8, 9, 10]
        assert await store.read(rows.StepRow, "last_step", model_id="model-1") == [make.step(20, 10)]
        await store.write(statement("thin_steps", model_id="model-1", stride=4, step=10))
        assert await steps(-1, 99) == [1, 5, 9, 10]
        assert await store.write(statement("delete_steps", model_id="model-1")) == 4
        assert await steps(-1, 99) == []
        assert await store.read(rows.StepRow, "last_step", model_id="model-2") == [make.step(2, 1, model_id="model-2")]

    run(make_store, scenario)


def test_runs_are_forgotten_when_nothing_else_is_left_of_them(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for name, ended_at, pruned in (
            ("old", 5.0, True),
            ("new", 15.0, True),
            ("kept", 5.0, False),
            ("on", None, False),
        ):
            await store.write(statement("insert_session", make.session(name, ended_at=ended_at, pruned=pruned)))
            for number in (1, 2):
                model = make.model(f"{name}-{number}", session_id=name)
                step = make.step(model_id=model.model_id)
                await store.write(statement("insert_model", model), statement("insert_step", step))
        await store.write(statement("insert_model", make.model("old-3", session_id="old")))
        saved = make.checkpoint(model_id="old-2")
        await store.write(statement("put_checkpoint", saved))
        found = await store.read(ModelIdRow, "runs_to_forget", before=10.0, limit=9)
        assert [row.model_id for row in found] == ["old-1"]
        await store.write(statement("delete_checkpoint", path=saved.path, directory=saved.directory))
        found = await store.read(ModelIdRow, "runs_to_forget", before=10.0, limit=9)
        assert [row.model_id for row in found] == ["old-1", "old-2"]

    run(make_store, scenario)


def test_steps_that_only_results_tell_of_are_counted(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for seq, kind, state in (
            (1, "optim_step", "done"),
            (2, "forward_backward", "done"),
            (3, "optim_step", "done"),
            (4, "optim_step", "failed"),
            (5, "optim_step", "queued"),
        ):
            await store.write(statement("insert_job", make.job(seq=seq, kind=kind, state=state)))
        for after, count in ((-1, 2), (1, 1), (3, 0)):
            found = await store.read(rows.CountRow, "count_steps_of_lane_after", lane="model-1", after=after)
            assert found == [rows.CountRow(count=count)]

    run(make_store, scenario)


def test_what_each_run_has_stored(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        for name, fields in {
            "a": {"size_bytes": 2},
            "b": {"size_bytes": 3},
            "c": {"size_bytes": 4, "project_id": None, "model_id": "model-2"},
            "d": {"size_bytes": 5, "org_id": "org-2"},
        }.items():
            await store.write(statement("put_checkpoint", make.checkpoint(name, **fields)))
        found = await store.read(StoredRow, "storage_of_runs", org_id="org-1")
        assert [(row.run_id, row.project_id, row.size_bytes) for row in found] == [
            ("model-1", "project-1", 5),
            ("model-2", "", 4),
        ]

    run(make_store, scenario)


def test_audit_by_day_and_group(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        entries = [(10.0, "projects"), (11.0, "teams"), (19.99, "projects"), (20.0, "projects")]
        await store.write(*(statement("insert_audit", make.audit(at, group_name=group)) for at, group in entries))
        await store.write(statement("insert_audit", make.audit(12.0, org_id="org-2")))
        day = {"org_id": "org-1", "since": 10.0, "until": 20.0, "limit": 10}
        assert [row.at for row in await store.read(rows.AuditRow, "audit_of_org", **day)] == [19.99, 11.0, 10.0]
        group = await store.read(rows.AuditRow, "audit_of_group", group_name="projects", **day)
        assert [row.at for row in group] == [19.99, 10.0]

    run(make_store, scenario)


def test_telemetry_keeps_the_newest(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        assert await store.write(statement("prune_telemetry", keep=3)) == 0
        await store.write(*(statement("insert_telemetry", make.telemetry(float(at))) for at in range(10)))
        assert await store.write(statement("prune_telemetry", keep=3)) == 7
        assert [row.at for row in await store.read(rows.TelemetryRow, "telemetry_newest", limit=2)] == [9.0, 8.0]

    run(make_store, scenario)

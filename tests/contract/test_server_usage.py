"""Usage by run, project and more, as the server sums it up, including device time; and the cost of counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process import (
    BASE,
    Client,
    Server,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
)

from tinsmith.store.base import Statement
from tinsmith.store.rows import UsageRow

DAY = {"starting_on": "2027-01-15T00:00:00Z", "ending_before": "2027-01-16T00:00:00Z"}


async def told(client: Client, by: str, **query: str) -> Any:
    answer = await client.get("/tinsmith/v1/usage", **{**DAY, "by": by, **query})
    assert answer.status == 200, answer.body
    return answer.json


async def worked(client: Client) -> tuple[str, str, str, str]:
    """Two runs, one of them saved and sampled, and a sampler on the base: the session, the runs and that sampler."""
    session = await client.session(project_id="p")
    one, two = await client.model(session), await client.model(session, 1)
    for model, passes in ((one, 2), (two, 1)):
        for seq in range(1, passes + 1):
            await client.result(await client.post("forward_backward", forward_backward(model, seq)))
        await client.result(await client.post("optim_step", optim_step(model, passes + 1)))
    path = await client.save(one, 4, "w", kind="save_weights_for_sampler")
    made = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    named = (await client.post("create_sampling_session", made)).json["sampling_session_id"]
    passing = await client.result(
        await client.post("save_weights_for_sampler", {"model_id": one, "seq_id": 5, "sampling_session_seq_id": 1})
    )
    bare = {"session_id": session, "sampling_session_seq_id": 2, "base_model": BASE}
    base = (await client.post("create_sampling_session", bare)).json["sampling_session_id"]
    for sampler in (named, passing.json["sampling_session_id"], base):
        await client.result(await client.post("asample", sample(sampler, 1)))
    return session, one, two, base


def test_usage_is_told_by_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            _, one, two, base = await worked(ann)
            answer = await told(ann, "run")
            groups = {group["run"]: group for group in answer["groups"]}
            assert set(groups) == {one, two, base}
            assert (groups[one]["training"], groups[two]["training"]) == (6, 3)
            assert (groups[one]["checkpoints"], groups[two]["checkpoints"]) == (1, 0)
            assert groups[base]["training"] == groups[two]["sampled"] == 0
            assert groups[one]["sampled"] == 2 * groups[base]["sampled"] > 0, "both samplers of its weights"
            assert all(group["device_s"] > 0 for group in groups.values())
            assert (groups[two]["jobs"], groups[base]["jobs"]) == (3, 1)
            assert set(answer["stored_bytes"]) == {one}
            assert answer["stored_bytes"][one] > 0

    run(scenario())


def test_every_grouping_adds_up_to_the_same(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            session, *_ = await worked(ann)
            names = {"project": "p", "model": BASE, "session": session, "day": "2027-01-15"}
            (whole,) = (await told(ann, "user"))["groups"]
            for by, name in names.items():
                answer = await told(ann, by)
                (group,) = answer["groups"]
                assert group[by] == name
                assert {**group, by: None} == {**{key: whole[key] for key in group if key != by}, by: None}
                assert bool(answer["stored_bytes"]) == (by != "day")
            runs = (await told(ann, "run"))["groups"]
            for name in ("training", "prefill", "sampled", "checkpoints", "jobs"):
                assert sum(group[name] for group in runs) == whole[name]
            assert sum(group["device_s"] for group in runs) == pytest.approx(whole["device_s"])

    run(scenario())


def test_the_protocols_events_do_not_know_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            session, *_ = await worked(ann)
            events = (await ann.get("billing/usage/events", **DAY)).json["data"]
            known = {"bucket_start", "bucket_end", "event_info", "base_model", "user_id", "session_id", "project_id"}
            assert set().union(*events) == known
            assert {event["session_id"] for event in events} == {session}
            assert sorted(event["event_info"]["type"] for event in events) == [
                "checkpoint",
                "sampling_prefill",
                "sampling_sample",
                "training",
            ]
            (trained,) = [event["event_info"] for event in events if event["event_info"]["type"] == "training"]
            assert trained["token_count"] == 9

    run(scenario())


def test_others_see_their_own_only_and_an_admin_sees_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, ben = await server.client("ann"), await server.client("ben")
            await worked(ann)
            assert (await told(ben, "run")) == {"by": "run", "groups": [], "stored_bytes": {}}
            boss = await server.client("boss", scopes=("all", "admin"))
            assert await told(boss, "run") == await told(ann, "run")
            assert (await told(await server.client("eve", org="other", scopes=("admin",)), "user"))["groups"] == []
            sampler = await server.client("sam", scopes=("sample",))
            assert (await sampler.get("/tinsmith/v1/usage", **DAY)).status == 403

    run(scenario())


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ({"by": "colour"}, "by: 'colour' is not one of run, project, model, session, user, day"),
        ({"starting_on": "yesterday"}, "starting_on"),
        ({"ending_before": "2027-02-16T00:00:00Z"}, "at most 14 days later"),
        ({"ending_before": "2027-01-15T00:30:00Z"}, "is not a whole hour"),
        ({"until": "now"}, "until"),
    ],
)
def test_a_wrong_question_is_refused(tmp_path: Path, query: dict[str, str], says: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            answer = await ann.get("/tinsmith/v1/usage", **{**DAY, **query})
            assert answer.status == 400
            assert says in answer.detail

    run(scenario())


def written(server: Server) -> list[list[str]]:
    """The statements of each write from now on."""
    writes: list[list[str]] = []
    write = server.store.write

    async def recorded(*statements: Statement) -> int:
        writes.append([made.name for made in statements])
        return await write(*statements)

    server.store.write = recorded  # type: ignore[method-assign]
    return writes


def test_a_finished_sample_is_one_write_with_one_statement_for_all_usage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            sampler = await ann.sampler(await ann.session())
            writes = written(server)
            await ann.result(await ann.post("asample", sample(sampler, 1)))
            assert writes == [["insert_job"], ["insert_result", "add_job_usage", "set_job_state"]]

    run(scenario())


def test_a_finished_step_brings_its_point_in_the_same_write(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await ann.model(await ann.session())
            writes = written(server)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))
            finished = ["insert_result", "add_job_usage", "set_job_state"]
            pointed = ["insert_result", "add_job_usage", "insert_step", "set_job_state"]
            assert writes == [["insert_job"], finished, ["insert_job"], pointed]

    run(scenario())


def test_what_was_written_without_an_answer_is_not_counted_twice(tmp_path: Path) -> None:
    """The store says that a write failed, and it had not; the server writes the result again."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await ann.model(await ann.session())
            write = server.store.write

            async def twice(*statements: Statement) -> int:
                await write(*statements)
                return await write(*statements) if statements[0].name == "insert_result" else 0

            server.store.write = twice  # type: ignore[method-assign]
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))
            await server.services.jobs.drain()
            rows = await server.rows(UsageRow, "usage_by_run", org_id="acme", since_hour=0, until_hour=10**6)
            assert [(row.run_id, row.training, row.jobs) for row in rows] == [(model, 3, 3)]

    run(scenario())

"""Weights that are copied, packed, loaded and sampled: concurrent requests each get what they named."""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path

from support.in_process import Client, Server, forward_backward, optim_step, run, serving

from tinsmith.store.rows import CheckpointRow, CountRow, SamplerRow

ADAPTER = "adapter_model.safetensors"


async def two_checkpoints(server: Server) -> tuple[Client, str, str, list[CheckpointRow]]:
    """A model that was saved, changed and saved again."""
    ann = await server.client()
    session = await ann.session()
    model = await ann.model(session)
    paths = [await ann.save(model, 1, "a")]
    await ann.result(await ann.post("forward_backward", forward_backward(model, 2)))
    await ann.result(await ann.post("optim_step", optim_step(model, 3)))
    paths.append(await ann.save(model, 4, "b"))
    rows = [(await server.rows(CheckpointRow, "checkpoint", path=path))[0] for path in paths]
    assert rows[0].digest != rows[1].digest
    return ann, session, model, rows


def adapter(directory: str | None) -> bytes:
    assert directory is not None
    return (Path(directory) / ADAPTER).read_bytes()


def test_a_copy_that_is_sent_again_is_made_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, _, rows = await two_checkpoints(server)
            copy = {"source_path": rows[0].path, "destination_project_id": "p"}

            async def made() -> int:
                counted = await server.rows(
                    CountRow, "count_checkpoints_of_user", org_id="acme", user_id="acme.ann", project_id=None
                )
                count: int = counted[0].count
                return count - len(rows)

            answers = [await ann.post("copy_weights", copy, x_idempotency_key="once") for _ in range(3)]
            assert {answer.status for answer in answers} == {200}
            assert len({answer.json["tinker_path"] for answer in answers}) == 1
            assert await made() == 1
            await ann.post("copy_weights", copy, x_idempotency_key="another")
            await ann.post("copy_weights", copy)
            await ann.post("copy_weights", copy)
            assert await made() == 4
            bob = await server.client("bob", "others")
            assert (
                await ann.call("POST", f"training_runs/{rows[0].model_id}/checkpoints/weights/a/publish")
            ).status == 200
            theirs = await bob.post("copy_weights", {**copy, "destination_project_id": "q"}, x_idempotency_key="once")
            assert theirs.status == 200
            assert theirs.json != answers[0].json, "a key means something to its user only"

    run(scenario())


def test_an_archive_that_several_ask_for_at_once_is_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model, rows = await two_checkpoints(server)
            address = f"training_runs/{model}/checkpoints/weights/a/archive"
            answers = await asyncio.gather(*(ann.get(address) for _ in range(8)))
            assert {answer.status for answer in answers} == {302}
            directory = Path(rows[0].directory)
            with tarfile.open(directory / ".archive.tar") as tar:
                packed = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
            assert packed == {
                path.name: path.read_bytes() for path in directory.iterdir() if not path.name.startswith(".")
            }
            assert [path.name for path in directory.iterdir() if path.suffix == ".new"] == []

    run(scenario())


def test_a_number_that_comes_again_with_another_path_loads_that_path(tmp_path: Path) -> None:
    """Its first request was too much at that time, so the number was still free."""

    async def scenario() -> None:
        async with serving(tmp_path, max_models=1) as server:
            ann, session, model, rows = await two_checkpoints(server)
            message = {"session_id": session, "model_seq_id": 1, "optimizer": True}
            assert (await ann.post("load_weights", {**message, "path": rows[0].path})).status == 429
            await ann.result(await ann.post("unload_model", {"model_id": model, "seq_id": 5}))
            made = await ann.post("load_weights", {**message, "path": rows[1].path})
            await ann.result(made)
            saved = await ann.save(made.json["model_id"], 1, "again")
            [row] = await server.rows(CheckpointRow, "checkpoint", path=saved)
            assert row.digest == rows[1].digest

    run(scenario())


def test_two_samplers_that_want_one_number_at_once_do_not_mix_their_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _, rows = await two_checkpoints(server)
            by_path = {row.path: row for row in rows}
            for number in range(4):
                message = {"session_id": session, "sampling_session_seq_id": number}
                wanted = [{**message, "model_path": row.path} for row in rows]
                answers = await asyncio.gather(*(ann.post("create_sampling_session", item) for item in wanted))
                assert sorted(answer.status for answer in answers) == [200, 400]
                [sampler] = await server.rows(SamplerRow, "sampler", sampler_id=f"{session}:sample:{number}")
                assert sampler.adapter_key == by_path[sampler.model_path].digest
                assert adapter(sampler.directory) == adapter(by_path[sampler.model_path].directory)

    run(scenario())

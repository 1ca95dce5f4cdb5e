"""Invalid requests about stored objects (models, samplers, checkpoints, sessions, losses): each error names the
field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.in_process import (
    create_model,
    forward_backward,
    optim_step,
    run,
)
from support.refusals import FROZEN, GOOD, READ_ONLY, bench


def test_bad_saves_and_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, model = made.client, made.model
            await ann.save(model, made.next(), "taken")
            sampler = await ann.save(model, made.next(), "sampler", "save_weights_for_sampler")
            export = await ann.save(model, made.next(), "export", "save_weights_external")
            other = await ann.model(made.session, 1, base_model="small", lora_config={"rank": 8, "seed": 1})
            of_other = await ann.save(other, 1, "w")
            stranger = await made.server.client("eve", org="other")
            theirs_model = await stranger.model(await stranger.session(), base_model="small")
            theirs = await stranger.save(theirs_model, 1, "w")
            cases: list[tuple[str, dict[str, Any], int, tuple[str, ...]]] = [
                (
                    "save_weights",
                    {"path": "taken"},
                    400,
                    ("path", "/weights/taken", "already exists", "overwrite=True"),
                ),
                ("save_weights_for_sampler", {"path": "sampler"}, 400, ("already exists",)),
                ("save_weights_external", {"path": "export"}, 400, ("already exists",)),
                ("save_weights", {"path": "../x"}, 400, ("path", "'../x'", "letters, digits")),
                ("save_weights", {"path": "a/b"}, 400, ("path", "'a/b'")),
                ("save_weights", {"path": "x", "ttl_seconds": 0}, 400, ("ttl_seconds", "0 is not between 1 and")),
                ("save_weights", {"path": "x", "user_metadata": {"a": "x" * 40_000}}, 422, ("user_metadata", "16384")),
                (
                    "save_weights",
                    {"path": "x", "user_metadata": dict.fromkeys("abc", "x" * 15_000)},
                    400,
                    ("user_metadata", "32768"),
                ),
                (
                    "save_weights_for_sampler",
                    {"path": "x", "sampling_session_seq_id": 1},
                    400,
                    ("give path (a lasting checkpoint) or sampling_session_seq_id",),
                ),
                (
                    "save_weights_external",
                    {"path": "x", "age_encryption_recipients": ["age1nonsense"]},
                    400,
                    ("age_encryption_recipients[0]", "age1nonsense"),
                ),
                (
                    "save_weights_external",
                    {"path": "x", "age_encryption_recipients": []},
                    400,
                    ("age_encryption_recipients: empty",),
                ),
                ("load_weights", {"path": "nonsense"}, 400, ("Invalid tinker path 'nonsense'", "tinker://")),
                ("load_weights", {"path": f"tinker://{model}/weights/none"}, 404, ("weights/none does not exist",)),
                ("load_weights", {"path": theirs}, 404, ("is not yours to use",)),
                ("load_weights", {"path": sampler, "optimizer": True}, 400, ("has no optimizer state",)),
                ("load_weights", {"path": export}, 400, ("is an export and cannot be loaded",)),
                ("load_weights", {"path": of_other}, 400, ("does not fit", "rank 8 instead of 4")),
            ]
            for route, fields, status, says in cases:
                submitted = len(made.server.backend.submitted)
                answer = await ann.post(route, {"model_id": model, "seq_id": made.next(), **fields})
                assert len(made.server.backend.submitted) == submitted
                await made.check(answer, status, says)

    run(scenario())


def test_a_copy_does_not_replace_what_has_its_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann = made.client
            other = await ann.model(made.session, 1, base_model="small")
            source = await ann.save(other, 1, "w")
            await ann.post("optim_step", optim_step(made.model, made.next()))
            await ann.result(await ann.post("forward_backward", forward_backward(made.model, made.next(), GOOD)))
            await ann.result(await ann.post("optim_step", optim_step(made.model, made.next())))
            mine = await ann.save(made.model, made.next(), "w")
            copy = {"source_path": source, "session_id": made.session}
            answer = await ann.post("copy_weights", {**copy, "model_seq_id": 0})
            await made.check(answer, 400, (mine, "already exists"))
            first = await ann.post("copy_weights", {**copy, "model_seq_id": 9})
            again = await ann.post("copy_weights", {**copy, "model_seq_id": 9})
            assert first.json == again.json == {"tinker_path": f"tinker://{made.session}:train:9/weights/w"}

    run(scenario())


def test_bad_models_and_samplers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, session = made.client, made.session
            good = {"base_model": "small", "lora_config": {"rank": 4}}
            stranger = await made.server.client("eve", org="other")
            theirs_model = await stranger.model(await stranger.session(), base_model="small")
            theirs = await stranger.save(theirs_model, 1, "w", "save_weights_for_sampler")
            export = await ann.save(made.model, made.next(), "export", "save_weights_external")
            own = await ann.save(made.model, made.next(), "own", "save_weights_for_sampler")
            models: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
                ({"base_model": "huge"}, 400, ("base_model", "'huge'", "served: small, only/sampled, only/trained")),
                ({"base_model": READ_ONLY.name}, 400, ("base_model", "cannot be trained here")),
                ({"lora_config": None}, 400, ("lora_config", "missing")),
                ({"lora_config": {"rank": 0}}, 422, ("lora_config.rank", "1")),
                ({"lora_config": {"rank": 513}}, 400, ("lora_config.rank", "513", "between 1 and 512")),
                ({"lora_config": {"rank": 4, "seed": 2**63}}, 422, ("lora_config.seed",)),
                (
                    {"lora_config": {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}},
                    400,
                    ("nothing to train",),
                ),
                ({"optimizer_config": {"type": "dimuon"}}, 400, ("optimizer_config", "only adamw")),
                ({"optimizer_config": {"type": "sgd"}}, 422, ("optimizer_config",)),
                ({"model_seq_id": -1}, 422, ("model_seq_id",)),
            ]
            for number, (fields, status, says) in enumerate(models, start=10):
                answer = await ann.post("create_model", {**create_model(session, number, **good), **fields})
                await made.check(answer, status, says)
            samplers: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
                ({"base_model": "huge"}, 400, ("base_model", "'huge'", "served: small")),
                ({"base_model": FROZEN.name}, 400, ("base_model", "cannot be sampled here")),
                ({}, 400, ("give model_path or base_model",)),
                ({"base_model": "small", "model_path": theirs}, 404, ("is not yours to use",)),
                ({"base_model": READ_ONLY.name, "model_path": own}, 400, ("base_model", READ_ONLY.name, "'small'")),
                ({"model_path": theirs}, 404, ("is not yours to use",)),
                ({"model_path": export}, 400, ("is an export",)),
                ({"model_path": "x"}, 400, ("Invalid tinker path 'x'",)),
            ]
            for number, (fields, status, says) in enumerate(samplers, start=10):
                message = {"session_id": session, "sampling_session_seq_id": number, **fields}
                await made.check(await ann.post("create_sampling_session", message), status, says)

    run(scenario())


def test_bad_sessions_queries_and_losses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path) as made:
            ann, session = made.client, made.session
            eve = await made.server.client("eve", org="other")
            await eve.session(project_id="theirs")
            big = {"user_metadata": {"x": "y" * 40_000}}
            graph = {"nodes": [{"op": "output", "name": "o", "target": "o"}]}
            loss = {"session_id": session, "custom_loss_seq_id": 0, "name": "x", "graph": graph}
            cases: list[tuple[str, str, Any, int, tuple[str, ...]]] = [
                ("POST", "create_session", big, 400, ("user_metadata: larger than 32768",)),
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "bored"}}, 422, ("reason", "bored")),
                ("GET", "sessions?limit=-1", None, 400, ("query: limit", "0")),
                ("GET", "sessions?access_scope=all", None, 400, ("access_scope", "accessible, owned")),
                ("POST", "sessions/search", {"limit": 0}, 422, ("limit", "1")),
                ("GET", "billing/usage/events", None, 400, ("starting_on",)),
                (
                    "GET",
                    "billing/usage/events?starting_on=2027-01-01T00:00:00Z&ending_before=2027-02-01T00:00:00Z",
                    None,
                    400,
                    ("ending_before", "at most 14 days"),
                ),
                (
                    "GET",
                    "billing/usage/events?starting_on=2027-01-01T00:30:00Z&ending_before=2027-01-02T00:00:00Z",
                    None,
                    400,
                    ("starting_on", "not a whole hour"),
                ),
                ("POST", "create_custom_loss", {**loss, "inputs": []}, 400, ("the first input", "logprobs")),
                (
                    "POST",
                    "create_custom_loss",
                    {**loss, "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": []}},
                    400,
                    ("graph: there is no output node",),
                ),
                ("POST", "create_custom_loss", {**loss, "inputs": [{"name": "x", "rank": 9}]}, 422, ("rank",)),
                ("PUT", f"training_runs/{made.model}/checkpoints/odd/x/ttl", {"ttl_seconds": 1}, 400, ("kind 'odd'",)),
            ]
            for method, path, message, status, says in cases:
                await made.check(await ann.call(method, path, message), status, says)

    run(scenario())


def test_a_full_disk_cap_refuses_saves_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, disk_cap_bytes=1) as made:
            first = await made.client.save(made.model, made.next(), "one")
            over = await made.client.post(
                "save_weights", {"model_id": made.model, "seq_id": made.next(), "path": "two"}
            )
            await made.check(over, 400, ("and this server allows", "delete some"))
            name = first.rpartition("/")[2]
            await made.client.call("DELETE", f"training_runs/{made.model}/checkpoints/weights/{name}")
            await made.client.save(made.model, made.next(), "two")

    run(scenario())

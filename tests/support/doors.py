"""Every door of the server: a call for each route, by those who name something and those about oneself, and keys that
must open none of them.

The tests that walk over all routes share these; which routes there are, they take from the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jwt

from support.in_process import BASE, Answer, Client, Server, create_model, forward_backward, optim_step, sample
from tinsmith.server.auth.authenticator import ISSUER
from tinsmith.server.auth.keys import installation_secret
from tinsmith.store.base import statement
from tinsmith.wire.routes.openai import PREFIXES
from tinsmith.wire.routes.served import SERVED_BY_NAME, SERVED_ROUTES
from tinsmith.wire.routes.table import Route

ALL = SERVED_ROUTES

GRAPH = {
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "logprobs"}]},
    ]
}


@dataclass(frozen=True)
class World:
    """The ids of what somebody has."""

    session: str
    model: str
    sampler: str
    request: str
    loss: str
    name: str = "mine"

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/{self.name}"

    @property
    def checkpoint(self) -> dict[str, str]:
        return {"training_run_id": self.model, "checkpoint_id": f"weights/{self.name}"}

    def hidden(self, answer: Answer) -> tuple[int, str]:
        """An answer without these ids, to compare it with another's."""
        text = answer.body.decode()
        for value in (self.path, self.sampler, self.model, self.session, self.request, self.loss, self.name):
            text = text.replace(value, "?")
        return answer.status, text


NOWHERE = World(
    session="00000000-0000-4000-8000-000000000000",
    model="00000000-0000-4000-8000-000000000000:train:0",
    sampler="00000000-0000-4000-8000-000000000000:sample:0",
    request="0" * 32,
    loss="loss-" + "0" * 32,
    name="none",
)

Ask = tuple[str, str, Any]
"""Method, path, message."""


def ask(name: str, message: Any = None, query: str = "", **parameters: str) -> Ask:
    route = SERVED_BY_NAME[name]
    return route.method, route.url_path(**parameters) + query, message


def target(world: World) -> dict[str, Any]:
    return {"target": {"sampling_session_id": world.sampler, "cloned_sampler_id": 0}, "timeout": 0.001}


def custom_loss(world: World) -> dict[str, Any]:
    inputs = [{"name": "logprobs", "rank": 1}]
    return {
        "session_id": world.session,
        "custom_loss_seq_id": 77,
        "name": "x",
        "inputs": inputs,
        "graph": GRAPH,
    }


def of_openai(prefix: str) -> dict[str, Callable[[World], list[Ask]]]:
    """Calls of OpenAI's clients that name a checkpoint."""
    turns = [{"role": "user", "content": "x"}]
    return {
        f"{prefix}_model": lambda w: [("GET", f"{PREFIXES[prefix]}/models/{w.path}", None)],
        f"{prefix}_completions": lambda w: [ask(f"{prefix}_completions", {"model": w.path, "prompt": [1, 2]})],
        f"{prefix}_chat": lambda w: [ask(f"{prefix}_chat", {"model": w.path, "messages": turns})],
    }


def of_anthropic(prefix: str) -> dict[str, Callable[[World], list[Ask]]]:
    """Calls of Anthropic's clients that name a checkpoint."""
    turns = [{"role": "user", "content": "x"}]
    return {
        f"{prefix}_messages": lambda w: [
            ask(f"{prefix}_messages", {"model": w.path, "messages": turns, "max_tokens": 2}),
        ],
        f"{prefix}_count_tokens": lambda w: [ask(f"{prefix}_count_tokens", {"model": w.path, "messages": turns})],
    }


OF_SOMEBODY: dict[str, Callable[[World], list[Ask]]] = {
    "session_heartbeat": lambda w: [ask("session_heartbeat", {"session_id": w.session})],
    "finish_session": lambda w: [
        ask("finish_session", {"reason": {"type": "success"}}, session_id=w.session),
    ],
    "get_session": lambda w: [ask("get_session", session_id=w.session)],
    "assign_session_project": lambda w: [
        ask("assign_session_project", {"project_id": "theirs"}, session_id=w.session),
    ],
    "export_session_trace": lambda w: [ask("export_session_trace", session_id=w.session)],
    "create_model": lambda w: [ask("create_model", create_model(w.session, 5))],
    "get_info": lambda w: [ask("get_info", {"model_id": w.model})],
    "forward_backward": lambda w: [ask("forward_backward", forward_backward(w.model, 50))],
    "forward": lambda w: [
        ask(
            "forward",
            {
                "model_id": w.model,
                "seq_id": 50,
                "forward_input": forward_backward(w.model, 1)["forward_backward_input"],
            },
        )
    ],
    "optim_step": lambda w: [ask("optim_step", optim_step(w.model, 50))],
    "unload_model": lambda w: [ask("unload_model", {"model_id": w.model})],
    "create_custom_loss": lambda w: [ask("create_custom_loss", custom_loss(w))],
    "save_weights": lambda w: [ask("save_weights", {"model_id": w.model, "seq_id": 50, "path": "x"})],
    "save_weights_for_sampler": lambda w: [
        ask("save_weights_for_sampler", {"model_id": w.model, "seq_id": 50, "path": "x"}),
        ask("save_weights_for_sampler", {"model_id": w.model, "seq_id": 50, "sampling_session_seq_id": 9}),
    ],
    "save_weights_external": lambda w: [
        ask("save_weights_external", {"model_id": w.model, "seq_id": 50, "path": "x"}),
    ],
    "load_weights": lambda w: [
        ask("load_weights", {"model_id": w.model, "seq_id": 50, "path": w.path}),
        ask("load_weights", {"session_id": w.session, "model_seq_id": 5, "path": w.path}),
    ],
    "weights_info": lambda w: [ask("weights_info", {"tinker_path": w.path})],
    "copy_weights": lambda w: [
        ask("copy_weights", {"source_path": w.path}),
        ask("copy_weights", {"source_path": w.path, "session_id": w.session, "model_seq_id": 3}),
    ],
    "create_sampling_session": lambda w: [
        ask("create_sampling_session", {"session_id": w.session, "sampling_session_seq_id": 9, "base_model": BASE}),
        ask("create_sampling_session", {"session_id": w.session, "sampling_session_seq_id": 9, "model_path": w.path}),
    ],
    "join_sampling_session": lambda w: [ask("join_sampling_session", {"sampling_session_id": w.sampler})],
    "asample": lambda w: [ask("asample", sample(w.sampler, 50)), ask("asample", sample(w.sampler))],
    "get_sampler": lambda w: [ask("get_sampler", sampler_id=w.sampler)],
    "retrieve_future": lambda w: [
        ask("retrieve_future", {"request_id": w.request}),
        ask("retrieve_future", {"request_id": w.request, "allow_metadata_only": True}),
    ],
    "retrieve_futures": lambda w: [ask("retrieve_futures", target(w))],
    "cancel_future": lambda w: [ask("cancel_future", {"request_id": w.request})],
    "get_training_run": lambda w: [ask("get_training_run", training_run_id=w.model)],
    "list_checkpoints": lambda w: [ask("list_checkpoints", training_run_id=w.model)],
    "list_model_checkpoints": lambda w: [ask("list_model_checkpoints", training_run_id=w.model)],
    "delete_checkpoint": lambda w: [ask("delete_checkpoint", **w.checkpoint)],
    "publish_checkpoint": lambda w: [ask("publish_checkpoint", **w.checkpoint)],
    "unpublish_checkpoint": lambda w: [ask("unpublish_checkpoint", **w.checkpoint)],
    "set_checkpoint_ttl": lambda w: [ask("set_checkpoint_ttl", {"ttl_seconds": 5}, **w.checkpoint)],
    "get_external_weights_urls": lambda w: [ask("get_external_weights_urls", **w.checkpoint)],
    "get_checkpoint_archive": lambda w: [ask("get_checkpoint_archive", **w.checkpoint)],
    "run_metrics": lambda w: [ask("run_metrics", training_run_id=w.model)],
    "delete_run": lambda w: [ask("delete_run", training_run_id=w.model)],
    "sample_stream": lambda w: [ask("sample_stream", sample(w.sampler, 50))],
    "sample_results": lambda w: [ask("sample_results", target(w))],
    **of_openai("openai"),
    **of_openai("hosted_openai"),
    **of_anthropic("anthropic"),
    **of_anthropic("hosted_anthropic"),
}
"""Calls that name something, by route; our own endpoints and other services' are the last. Each body of `samples` is
walked elsewhere."""

HOURS = "?starting_on=2027-01-15T00:00:00Z&ending_before=2027-01-16T00:00:00Z"
OF_ONESELF: dict[str, Ask] = {
    "get_server_capabilities": ask("get_server_capabilities"),
    "client_config": ask("client_config", {}),
    "client_dynamic_config": ask("client_dynamic_config", {}),
    "auth_token": ask("auth_token", {}),
    "get_api_key": ask("get_api_key"),
    "telemetry": ask("telemetry", {"events": [], "platform": "x", "sdk_version": "x", "session_id": "x"}),
    "create_session": ask("create_session", {}),
    "list_sessions": ask("list_sessions"),
    "search_sessions": ask("search_sessions", {}),
    "list_training_runs": ask("list_training_runs"),
    "list_user_checkpoints": ask("list_user_checkpoints"),
    "get_billing_usage": ask("get_billing_usage", query=HOURS),
    "get_current_checkpoint_storage_usage": ask("get_current_checkpoint_storage_usage"),
    "get_audit_log": ask("get_audit_log"),
    "import_weights": ask("import_weights", {}),
    "import_parts": ask("import_parts", {}),
    "quota": ask("quota"),
    "status": ask("status"),
    "usage": ask("usage", query=HOURS),
    "tokenizer": ask("tokenizer", query=f"?model={BASE}"),
    "samples": ask("samples", b"\x90"),
    **{f"{prefix}_models": ask(f"{prefix}_models") for prefix in PREFIXES},
    **{f"{prefix}_embeddings": ask(f"{prefix}_embeddings", {"model": BASE}) for prefix in PREFIXES},
    "delete_api_key": ask("delete_api_key"),
}
"""Calls that show or change what is the caller's own; the last one ends the key."""


ENDING = ("delete_checkpoint", "unload_model", "finish_session", "delete_api_key")
"""Routes that take away what others need."""


def questions_of(route: Route, world: World) -> list[Ask]:
    """What the walk asks a route, with somebody's ids where it names something."""
    if route.name in OF_SOMEBODY:
        return OF_SOMEBODY[route.name](world)
    if route.name in OF_ONESELF:
        return [OF_ONESELF[route.name]]
    assert route.door.open_to != "keys", f"{route.name}: the walk needs a question for it"
    return [(route.method, route.path.replace("{name}", "secret"), None)]


def walked() -> list[Route]:
    """All routes, those that end something last."""
    return sorted(ALL, key=lambda route: ENDING.index(route.name) if route.name in ENDING else -1)


async def send(client: Client, question: Ask) -> Answer:
    method, path, message = question
    return await client.call(method, path, message)


async def settle_in(server: Server, client: Client) -> World:
    """Somebody who has something of everything."""
    session = await client.session(display_name="mine", user_metadata={"secret": "plan"})
    model = await client.model(session)
    promise = await client.post("forward_backward", forward_backward(model, 1))
    await client.result(promise)
    await client.save(model, 2, "mine")
    sampler = await client.sampler(session)
    await client.result(await client.post("asample", sample(sampler, 1)))
    made = World(session=session, model=model, sampler=sampler, request=promise.json["request_id"], loss="")
    loss = await client.result(await client.post("create_custom_loss", custom_loss(made)))
    return World(
        session=session, model=model, sampler=sampler, request=made.request, loss=loss.json["loss_id"], name="mine"
    )


async def only_sampling(client: Client) -> World:
    """Somebody who samples and does not train; the other ids are of nothing."""
    session = await client.session()
    sampler = await client.sampler(session)
    promise = await client.post("asample", sample(sampler, 1))
    await client.result(promise)
    return replace(NOWHERE, session=session, sampler=sampler, request=promise.json["request_id"])


async def bad_credentials(server: Server, data: Path) -> dict[str, str]:
    """Keys and tokens that must open nothing, by what is wrong with them."""
    revoked = await server.client("revoked")
    expired = await server.client("expired", expires_at=server.clock() + 10)
    late = await server.client("late")
    tokens = {
        "a token that expired": late,
        "a token of a revoked key": revoked,
        "a token of an expired key": expired,
    }
    found = {name: (await client.post("auth/token")).json["jwt"] for name, client in tokens.items()}
    claims = {"iss": ISSUER, "kid": late.key_id, "exp": 10**11, "sub": "x"}
    found["a forged token"] = jwt.encode(claims, b"x" * 32, algorithm="HS256")
    found["an unsigned token"] = jwt.encode(claims, None, algorithm="none")
    found["a token of nobody"] = jwt.encode({**claims, "kid": 1}, installation_secret(data), algorithm="HS256")
    server.clock.advance(3601)
    await server.store.write(statement("revoke_key", key_id=revoked.key_id, revoked_at=server.clock()))
    found |= {"a revoked key": revoked.key, "an expired key": expired.key}
    found |= {"no key": "", "no such key": "tml-" + "x" * 43, "something else": "sk-123", "bytes": "\xff\xfe"}
    return found

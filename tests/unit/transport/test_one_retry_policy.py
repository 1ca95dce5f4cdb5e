"""Nothing in the client retries by itself: every pause is the retry policy's, or its other reason is listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src" / "tinsmith"
POLICY = {
    "transport.retry.retrying": "the loop around the policy",
    "client.connection.polling.Trouble.wait": "failed polls; the policy says how long",
    "client.connection.limits.Limits.wait_for_pause": "the pause of all samples after a 429; the policy says how long",
}
OTHER = {
    "cli.manage.run_curves._news": "the interval of `run watch`",
    "client.connection.connection.Connection._refresh_dynamic": "the interval of a background task",
    "client.connection.local_engine.stop_engine": "waits for a process to end",
    "client.connection.outage.ProgressWatch._watch": "the interval of a watch",
    "client.connection.polling._Wait._pending": "paces polls of a server without long polling",
    "client.connection.session.Session._beat": "the interval of heartbeats",
    "client.connection.telemetry.Telemetry._flush_forever": "the interval of a background task",
    "client.rest.RestClient.export_session_trace.run": "polls for a file that the server is making",
    "client.submit.poll_together.SamplingSessionPoller._ask": "paces polls of a server without long polling",
    "client.submit.stream.stream_sample.take": "waits for the consumer of a stream",
    "transport.pool.DirectTransport.close": "lets the loop close sockets",
}


def pauses(tree: ast.AST, path: str) -> Iterator[str]:
    """Yield the functions that sleep."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        inside = f"{path}.{node.name}" if named else path  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "sleep":
            yield path
        yield from pauses(node, inside)


def test_every_pause_in_the_client_is_the_policy_s_or_has_another_reason() -> None:
    found = set()
    for package in ("transport", "client", "cli"):
        for file in (SOURCE / package).rglob("*.py"):
            module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
            found |= set(pauses(ast.parse(file.read_text()), module))
    assert found == POLICY.keys() | OTHER.keys()


def test_the_walk_names_the_function() -> None:
    code = "class A:\n    async def b(self):\n        while True:\n            await asyncio.sleep(1)\n"
    assert list(pauses(ast.parse(code), "m")) == ["m.A.b"]

"""One program, run with the official client and with ours: both send the same requests."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from support.normalize import differences, normalize
from support.program_run import ALL_DYNAMIC_FLAGS, ALL_FLAGS, Steps, as_official, raised, run_module, run_official
from support.tinker_server import TinkerServer

DOCUMENTED = {
    "accept: application/x-protobuf != application/x-protobuf, application/json": (
        "results are read in either encoding, so that servers without protobuf work too"
    ),
    "accept: application/json != application/x-protobuf, application/json": "the same, beside a release before 0.19",
    "content-type: application/json != application/x-protobuf": "protobuf is tried first; the server refuses it once",
}
"""How differences that are meant end, with the reason."""


def official_stream(release: str, *options: str, **settings: Any) -> tuple[list[Any], Steps]:
    """What an official release sends. It hangs now and then on a busy machine; then it gets a second try."""
    for is_last in (False, True):
        with TinkerServer(**settings) as server:
            try:
                steps = run_official(server, release, *options)
            except subprocess.TimeoutExpired:
                if is_last:
                    raise
            else:
                return normalize(server.requests), steps
    raise AssertionError("not reached")


def streams(release: str, *options: str, **settings: Any) -> tuple[list[Any], list[Any], Steps, Steps]:
    official, theirs = official_stream(release, *options, **settings)
    with TinkerServer(**settings) as server:
        ours = run_module(server, "tinsmith", *options)
        assert server.violations == []
        return official, normalize(server.requests), theirs, ours


def undocumented(official: list[Any], ours: list[Any]) -> list[str]:
    return [text for text in map(str, differences(official, ours)) if not text.endswith(tuple(DOCUMENTED))]


@pytest.mark.parametrize("flags", [{}, ALL_FLAGS], ids=["flags off", "all flags on"])
def test_both_clients_send_the_same(flags: dict[str, Any]) -> None:
    dynamic = ALL_DYNAMIC_FLAGS if flags else {}
    official, ours, their_steps, our_steps = streams("0.36.0", flags=flags, dynamic_flags=dynamic)
    assert undocumented(official, ours) == []
    assert as_official(our_steps) == their_steps


def test_a_json_server_sees_what_a_json_release_sends() -> None:
    """Against a server of 0.15 our client speaks JSON, as 0.15.0 does."""
    official, ours, their_steps, our_steps = streams("0.15.0", "--old", vintage="0.15")
    bodies = [request for request in ours if "forward" in str(request)]
    assert bodies
    assert [name for name, _ in our_steps] == [name for name, _ in their_steps]
    # 0.15.0 sends a call without data; later releases and ours refuse it.
    assert raised(as_official(our_steps)) == raised(their_steps) | {"no data": "ValueError"}
    # Releases before 0.18 send only what was set, None included; we write defaults out, as later ones do.
    unset = (": <missing> != ", ": null != <missing>")
    changed = [text for text in undocumented(official, ours) if not any(form in text for form in unset)]
    assert [text for text in changed if "forward" in text] == []

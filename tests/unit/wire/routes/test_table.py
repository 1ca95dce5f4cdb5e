"""The route table, and the paths of checkpoints."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.releases import uses

from tinsmith.errors import InvalidInputError
from tinsmith.types import ParsedCheckpointTinkerPath
from tinsmith.wire.messages.weights import tinker_path
from tinsmith.wire.routes import table as routes
from tinsmith.wire.routes.door import ELSEWHERE
from tinsmith.wire.routes.table import BY_NAME, PREFIX, ROUTES, Route

PATHS_OF_0_36 = [
    "healthz",
    "get_server_capabilities",
    "client/config",
    "client/dynamic_config",
    "auth/token",
    "auth/apikey/me",
    "telemetry",
    "create_session",
    "session_heartbeat",
    "sessions",
    "sessions/search",
    "sessions/{session_id}",
    "sessions/{session_id}/finish",
    "sessions/{session_id}/project",
    "sessions/{session_id}/trace_export",
    "create_model",
    "get_info",
    "forward_backward",
    "optim_step",
    "create_custom_loss",
    "save_weights",
    "load_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "weights_info",
    "copy_weights",
    "create_sampling_session",
    "join_sampling_session",
    "asample",
    "samplers/{sampler_id}",
    "retrieve_future",
    "retrieve_futures",
    "cancel_future",
    "training_runs",
    "training_runs/{training_run_id}",
    "training_runs/{training_run_id}/checkpoints",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}/publish",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}/ttl",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}/external_weights_urls",
    "checkpoints",
    "billing/usage/events",
    "billing/usage/checkpoints/current",
    "audit",
]

OLD_ONLY = {
    "forward": ("0.24.9", "0.25.0"),
    "unload_model": ("0.25.0", "0.26.0"),
    "list_model_checkpoints": ("0.3.0", "0.4.0"),
    "get_checkpoint_archive": ("0.35.2", "0.36.0"),
}


# The table


def test_names_are_unique() -> None:
    assert len({route.name for route in ROUTES}) == len(ROUTES) == len(BY_NAME) == 50


def test_method_and_path_are_unique() -> None:
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


def test_no_two_routes_differ_in_parameter_names_only() -> None:
    shapes = {(route.method, re.sub(r"{\w+}", "{}", route.path)) for route in ROUTES}
    assert len(shapes) == len(ROUTES)


def test_the_newest_release_uses_these_44_paths() -> None:
    used = {route.path.removeprefix(PREFIX) for route in ROUTES if uses("0.36.0", route)}
    assert used == set(PATHS_OF_0_36)
    assert len(used) == 44


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_every_route_is_well_formed(route: Route) -> None:
    assert route.path.startswith("/api/v1/")
    assert not route.path.endswith("/")
    assert route.is_future is (route.result is not None) is (route.request_type is not None)
    assert route.method != "GET" or route.request is None
    assert route.query is None or route.method == "GET"
    assert "json" in route.body_encodings
    assert "json" in route.result_encodings
    assert BY_NAME[route.name] is route
    assert not hasattr(route, "__dict__")


def test_protobuf_is_spoken_here_only() -> None:
    assert {route.name for route in ROUTES if "protobuf" in route.body_encodings} == {"forward_backward"}
    results = {route.name for route in ROUTES if "protobuf" in route.result_encodings}
    assert results == {"forward_backward", "forward", "asample"}


def test_the_request_types_of_futures_are_the_protocols() -> None:
    assert {route.request_type for route in ROUTES if route.is_future} == {
        "CreateModel",
        "ForwardBackward",
        "Forward",
        "OptimStep",
        "SaveWeights",
        "LoadWeights",
        "SaveWeightsForSampler",
        "SaveWeightsExternal",
        "Sample",
        "CreateCustomLoss",
        "UnloadModel",
    }


@pytest.mark.parametrize(("name", "bounds"), OLD_ONLY.items())
def test_a_retired_route_is_used_up_to_its_last_release(name: str, bounds: tuple[str, str]) -> None:
    last, first_without = bounds
    assert uses("0.3.0", BY_NAME[name])
    assert uses(last, BY_NAME[name])
    assert not uses(first_without, BY_NAME[name])


@pytest.mark.parametrize(
    ("name", "before", "first"),
    [
        ("client_config", "0.17.0", "0.18.0"),
        ("client_dynamic_config", "0.24.3", "0.25.0"),
        ("search_sessions", "0.35.0", "0.36.0"),
        ("list_checkpoints", "0.3.0", "0.4.0"),
        ("list_sessions", "0.4.0", "0.5.0"),
        ("set_checkpoint_ttl", "0.12.0", "0.13.0"),
        ("cancel_future", "0.25.0", "0.26.0"),
        ("copy_weights", "0.26.0", "0.27.0"),
    ],
)
def test_a_route_is_used_from_its_first_release_on(name: str, before: str, first: str) -> None:
    assert not uses(before, BY_NAME[name])
    assert uses(first, BY_NAME[name])
    assert uses("0.36.0", BY_NAME[name])
    assert uses("1.0.0", BY_NAME[name])


def test_every_retired_route_is_listed_here() -> None:
    assert {route.name for route in ROUTES if route.until is not None} == set(OLD_ONLY)


def test_versions_are_compared_as_numbers() -> None:
    route = Route(name="x", method="GET", path="/x", since="0.9", until="0.10", door=ELSEWHERE)
    assert [uses(f"0.{minor}.0", route) for minor in (8, 9, 10, 11)] == [False, True, True, False]


# URLs


@pytest.mark.parametrize(
    ("route", "values", "path"),
    [
        (routes.HEALTHZ, {}, "/api/v1/healthz"),
        (
            routes.GET_TRAINING_RUN,
            {"training_run_id": "s-1:train:0"},
            "/api/v1/training_runs/s-1:train:0",
        ),
        (
            routes.SET_CHECKPOINT_TTL,
            {"training_run_id": "r", "checkpoint_id": "weights/0001"},
            "/api/v1/training_runs/r/checkpoints/weights/0001/ttl",
        ),
        (routes.GET_SESSION, {"session_id": "a%b"}, "/api/v1/sessions/a%25b"),
        (routes.GET_SESSION, {"session_id": "a/b"}, "/api/v1/sessions/a%2Fb"),
        (routes.GET_SESSION, {"session_id": "a?b#c"}, "/api/v1/sessions/a%3Fb%23c"),
        (routes.GET_SESSION, {"session_id": "é"}, "/api/v1/sessions/%C3%A9"),
        (routes.GET_SESSION, {"session_id": "..."}, "/api/v1/sessions/..."),
        (
            routes.DELETE_CHECKPOINT,
            {"training_run_id": "r", "checkpoint_id": "weights/a?b"},
            "/api/v1/training_runs/r/checkpoints/weights/a%3Fb",
        ),
    ],
)
def test_parameters_are_quoted(route: Route, values: dict[str, str], path: str) -> None:
    assert route.url_path(**values) == path


@pytest.mark.parametrize(
    "value",
    [
        "",
        ".",
        "..",
        "../x",
        "x/..",
        "x/../y",
        "./x",
        "a\nb",
        "a\rb",
        "a\x00b",
        "a\tb",
        "a b",
        "\x7f",
        "\ud800",
        None,
        5,
    ],
)
@pytest.mark.parametrize(
    ("route", "parameter", "rest"),
    [
        (routes.GET_SESSION, "session_id", {}),
        (routes.DELETE_CHECKPOINT, "training_run_id", {"checkpoint_id": "weights/x"}),
        (routes.DELETE_CHECKPOINT, "checkpoint_id", {"training_run_id": "r"}),
    ],
)
def test_what_cannot_stand_in_a_path_is_refused_by_name(
    route: Route, parameter: str, rest: dict[str, str], value: Any
) -> None:
    with pytest.raises(InvalidInputError, match=parameter) as caught:
        route.url_path(**{parameter: value}, **rest)
    assert caught.value.field == parameter


@pytest.mark.parametrize("checkpoint_id", ["/weights/x", "weights//x", "weights/x/", "//host/x"])
def test_a_checkpoint_id_has_no_empty_parts(checkpoint_id: str) -> None:
    with pytest.raises(InvalidInputError, match="checkpoint_id"):
        routes.DELETE_CHECKPOINT.url_path(training_run_id="r", checkpoint_id=checkpoint_id)


@pytest.mark.parametrize("values", [{}, {"session": "s"}, {"session_id": "s", "other": "x"}])
def test_parameters_must_be_those_of_the_path(values: dict[str, str]) -> None:
    with pytest.raises(InvalidInputError, match="get_session needs"):
        routes.GET_SESSION.url_path(**values)


@given(st.text(min_size=1, max_size=20))
@settings(deadline=None, max_examples=100)
def test_a_filled_path_leads_nowhere_else(value: str) -> None:
    try:
        path = routes.FINISH_SESSION.url_path(session_id=value)
    except InvalidInputError:
        return
    assert urlsplit(f"http://host{path}").path == path
    assert path.isascii()
    assert unquote(path) == f"/api/v1/sessions/{value}/finish"
    assert path.count("/") == 5


# tinker:// paths

parts = st.text(min_size=1, max_size=12).filter(lambda text: "/" not in text)
kinds = st.sampled_from([("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")])


@given(parts, kinds, parts)
@settings(deadline=None, max_examples=100)
def test_a_path_is_parsed_into_what_it_was_made_of(run: str, kind: tuple[str, str], name: str) -> None:
    path = tinker_path(run, kind[0], name)
    assert path == f"tinker://{run}/{kind[0]}/{name}"
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert (parsed.tinker_path, parsed.training_run_id) == (path, run)
    assert (parsed.checkpoint_type, parsed.checkpoint_id) == (kind[1], f"{kind[0]}/{name}")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://run",
        "tinker://run/weights",
        "tinker://run/weights/",
        "tinker:///weights/x",
        "tinker://run//x",
        "tinker://run/weights/x/y",
        "tinker://run/weights/x/",
        "tinker://run/checkpoints/x",
        "tinker://run/Weights/x",
        "TINKER://run/weights/x",
        "tinker:/run/weights/x",
        "run/weights/x",
        " tinker://run/weights/x",
        "http://run/weights/x",
        None,
        5,
        b"tinker://run/weights/x",
    ],
)
def test_other_paths_are_refused_with_the_reason(path: Any) -> None:
    with pytest.raises(ValueError, match="Invalid tinker path") as caught:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert isinstance(caught.value, InvalidInputError)
    assert caught.value.field == "tinker_path"
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(
    ("run", "kind", "name"),
    [("a/b", "weights", "c"), ("a", "weights", "b/c"), ("", "weights", "c"), ("a", "weights", ""), ("a", "other", "c")],
)
def test_a_path_that_would_not_parse_is_not_made(run: str, kind: str, name: str) -> None:
    with pytest.raises(InvalidInputError, match="Invalid tinker path"):
        tinker_path(run, kind, name)


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=100)
def test_no_text_breaks_the_parser(text: str) -> None:
    for path in (text, f"tinker://{text}", f"tinker://run/weights/{text}"):
        try:
            parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        except InvalidInputError:
            continue
        assert tinker_path(parsed.training_run_id, *parsed.checkpoint_id.split("/")) == path

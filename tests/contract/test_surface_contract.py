"""Programs written for the newest official SDK find its names, parameters, members and modules here.

Both packages are described by official/surface.py, each in its own environment. Every difference stands in DIFFERENCES
with its reason: one that is not listed fails, and so does a listed one that is no more.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.releases import NEWEST, OFFICIAL

import tinsmith
from tinsmith import types

STORED_KEY = '{"version": 1, "default": "a", "keys": {"a": {"type": "manual", "key": "tml-s", "name": "a"}}}'

SURFACE = Path(__file__).parent / "official" / "surface.py"

OWN = "ours alone"
CLOSED = "it can be closed, and is a context manager"
INSIDE = "the inside of the official client"
LENIENT = "may be left out here"
CODEC = "what our codecs call"
OLDER = "a field that other releases have on the wire"
ANSWERS = "on the wire, but without a public type there"
COROUTINE = "a plain function there that warns and returns the coroutine; awaited alike"
STRICT = "a wrong argument is an error here, before anything is sent"
WIDER = "accepted here, too"
PYDANTIC = "our types are no pydantic models and have only some of their methods"

DIFFERENCES: dict[str, str] = {
    # Names and errors.
    "ClientConfig: extra": OWN,
    "InvalidInputError: extra": OWN,
    "PrecisionWarning: extra": OWN,
    "RawResponse: extra": OWN,
    "RetryConfig: extra": OWN,
    "RunRecoveredError: extra": OWN,
    "WireError: extra": OWN,
    "as_tinker: extra": OWN,
    "deadline: extra": OWN,
    "local: extra": OWN,
    "API*Error(request): default None": LENIENT,
    "*Error(body): default None": LENIENT,
    "RequestFailedError(category): default 'unknown'": LENIENT,
    "APITimeoutError(message): extra": OWN,
    "APIResponseValidationError(message): keyword only": "raised by the client only",
    # Clients.
    "APIFuture.[a-z]*: extra": "it is a concurrent.futures.Future as well",
    "APIFuture.__init__(*): *": "made by the client only",
    "RestClient.*_async: coroutine function": COROUTINE,
    "AdminClient.__e*: extra": CLOSED,
    "AdminClient.close: extra": CLOSED,
    "AdminClient.with_raw_response: extra": OWN,
    "RestClient.__e*: extra": CLOSED,
    "RestClient.close: extra": CLOSED,
    "RestClient.download_external_weights*: extra": OWN,
    "RestClient.iter_*: extra": OWN,
    "RestClient.with_raw_response: extra": OWN,
    "RetryConfig.__init__(retryable_exceptions): default *": "one more there, of an HTTP library that is not used here",
    "SamplingClient.on_queue_state_change: missing": INSIDE,
    "SamplingClient.sample_stream: extra": OWN,
    "ServiceClient.__a*: extra": "an asynchronous context manager as well",
    "ServiceClient.__exit__(*": "called by position only",
    "ServiceClient.__init__(config): extra": OWN,
    "ServiceClient.__init__(transport): extra": OWN,
    "ServiceClient.close(status): default 'success'": LENIENT,
    "ServiceClient.metrics: extra": OWN,
    "ServiceClient.set_queue_observer: extra": OWN,
    "ServiceClient.with_recovery: extra": OWN,
    "TrainingClient.load_state*_async: coroutine function": COROUTINE,
    # Modules.
    "module lib.async_tinker_provider: missing": INSIDE,
    "module lib.base_url: missing": INSIDE,
    "module lib.chunked_fwdbwd_helpers: missing": INSIDE,
    "module lib.client_connection_pool_type: missing": INSIDE,
    "module lib.console_urls: missing": INSIDE,
    "module lib.credentials: missing": INSIDE,
    "module lib.internal_client_holder: missing": INSIDE,
    "module lib.public_interfaces.custom_loss.*: missing": INSIDE,
    "module lib.public_interfaces.rest_client_common: missing": INSIDE,
    "module lib.retry_handler.*: missing": INSIDE,
    "module lib.session_futures_poller: missing": INSIDE,
    "module lib.sync_only: missing": INSIDE,
    "module lib.telemetry*: missing": INSIDE,
    "module types.custom_loss_graph.CustomLossNodeOp: missing": INSIDE,
    "module types.optimizer.Optim*Base: missing": "base classes of optimizers that a newer release may bring",
    "module types.topk_logprobs.topk_to_lists: missing": INSIDE,
    # Types: constructors.
    "types.ClientConfigRequest(sdk_version): default ''": LENIENT,
    "types.ClientConfigResponse(*): extra": OLDER,
    "types.CreateSessionRequest(*): default *": LENIENT,
    "types.DimuonParams(*): extra": OLDER,
    "types.Forward*Request(*): keyword only": "taken by position, too: see the expressions",
    "types.ForwardBackwardInput(*): keyword only": "taken by position, too: see the expressions",
    "types.ForwardBackwardRequest(forward_only): extra": OLDER,
    "types.ForwardBackwardOutput(metrics): default None": "read as {}",
    "types.Image*Chunk(*): extra": OLDER,
    "types.LoadWeightsRequest(optimizer): default False": LENIENT,
    "types.OptimStepRequest(optim_params): default None": "needed here, too, in any of its three forms",
    "types.OptimStepRequest(*): extra": OLDER,
    "types.RequestFailedResponse(category): default 'unknown'": LENIENT,
    "types.SampledSequence(sequence_id): default ''": LENIENT,
    "types.SampledSequence(*): extra": WIDER,
    "types.SamplingParams(*): extra": OWN,
    "types.Telemetry*(process_uuid): default None": LENIENT,
    "types.*Event(event): default *": LENIENT,
    # Types: members.
    "types.*.estimated_bytes: extra": CODEC,
    "types.*.*_builtins: extra": CODEC,
    "types.DmelChunk.[CM]*: extra": CODEC,
    "types.EncodedTextChunk.to_ints: extra": CODEC,
    "types.TensorData.[ino]*: extra": OWN,
    "types.TensorData.array: extra": OWN,
    "types.*.serialize_d*: missing": "how pydantic reads and writes media",
    "types.*.validate_d*: missing": "how pydantic reads and writes media",
    "types.*: no dataclass": "the codec would take a dataclass apart; `replace` is a method here",
    "types.*Chunk: dataclass": "a pydantic model there",
    "types.Forward*.model_*: extra": WIDER,
    # Types: names.
    "types.ApiKeyResponse: extra": ANSWERS,
    "types.AssignProjectRequest: extra": ANSWERS,
    "types.CancelFutureRequest: extra": ANSWERS,
    "types.CheckpointArchiveUrlResponse: extra": OLDER,
    "types.CompleteMetadataResponse: extra": ANSWERS,
    "types.FinishSessionRequest: extra": ANSWERS,
    "types.GenericEvent: extra": "in its module only there",
    "types.ImageDimensions: extra": OLDER,
    "types.OutputFormat: extra": OWN,
    "types.SetTtlRequest: extra": ANSWERS,
    "types.TopkLogprobs: extra": "in its module only there",
    "types.TraceExportResponse: extra": ANSWERS,
    "types.TryAgainResponse: extra": "in its module only there",
    "types.WeightsInfoRequest: extra": ANSWERS,
    # Expressions.
    "t.TensorData(data=np.array([1, 2])).dtype": WIDER,
    "t.TensorData()": "an InvalidInputError (ValueError) here, a TypeError there",
    't.TensorData([1, 2], "int64") == t.TensorData([1, 2], "int64")': "compared by value here, by identity there",
    "t.ModelInput.from_ints(np.array([1, 2])).to_ints()": WIDER,
    "t.ModelInput(chunks=[], extra=1)": "a TypeError here, pydantic's ValidationError (ValueError) there",
    "t.EncodedTextChunk(tokens=[1], extra=2)": "a TypeError here, pydantic's ValidationError (ValueError) there",
    "t.AdamParams(1e-4)": WIDER,
    't.AdamParams(learning_rate="0.1").learning_rate': STRICT,
    'setattr(t.AdamParams(), "beta1", 0.5)': "an AttributeError here, pydantic's ValidationError (ValueError) there",
    "t.SamplingParams(max_token=8).max_tokens": STRICT,
    't.SampledSequence(stop_reason="stop", tokens=[1], logprobs=[-0.5]).tokens': WIDER,
    "checkpoint(new=1).public": STRICT,
    't.AdamParams.model_validate({"lr": 0.5}).learning_rate': "reads as an answer is read: unknown fields are ignored",
    "t.AdamParams(beta1=0.5).model_fields_set": PYDANTIC,
    "t.AdamParams(beta1=0.9).model_dump(exclude_unset=True)": "what holds its default counts as unset here",
    'MIXED.model_dump(include={"chunks": 5})': "an InvalidInputError (ValueError) here, a TypeError there",
    'MIXED.model_dump(excluding={"chunks"})': "an InvalidInputError that is both kinds here, a TypeError there",
    "dataclasses.replace(t.EncodedTextChunk(tokens=[1]), tokens=[2]).tokens": WIDER,
    'dataclasses.replace(datum({}), loss_fn_inputs={"weights": [1.0]}).loss_fn_inputs["weights"].tolist()': (
        "`replace` is a method here"
    ),
    "[field.name for field in dataclasses.fields(t.SampleResponse)][0]": "no dataclass here",
}


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON", "CLOUDFLARE"))}
    return kept | changes


def run_surface(package: str, *options: str, text: str = "", **changes: str) -> Any:
    """What official/surface.py says of `tinker` or of ours, each run by the interpreter it is installed for."""
    if package == "tinker":
        python, changes = OFFICIAL / "venv" / "bin" / "python", changes | {"PYTHONPATH": str(OFFICIAL / NEWEST)}
        if not python.exists():
            pytest.fail(f"tinker {NEWEST} is not installed: run tools/official (make test does)")
    else:
        python, changes = Path(sys.executable), changes | {"PYTHONPATH": str(Path(tinsmith.__file__).parents[1])}
    command = [python, "-W", "ignore", SURFACE, package, *options]
    done = subprocess.run(command, env=environment(**changes), input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def described(package: str) -> Any:
    return run_surface(package, "--modules") if package == "tinker" else run_surface(package)


def parameter_differences(where: str, theirs: list[list[Any]], ours: list[list[Any]]) -> Iterator[str]:
    their, our = ({name: rest for name, *rest in parameters} for parameters in (theirs, ours))
    for name, (kind, default) in their.items():
        if name not in our:
            yield f"{where}({name}): missing"
            continue
        if our[name][0] != kind:
            yield f"{where}({name}): {our[name][0].lower().replace('_', ' ')}"
        if our[name][1] != default:
            yield f"{where}({name}): default {our[name][1]!r}"
    for name, (kind, default) in our.items():
        if name not in their:
            is_optional = default != "required" or kind.startswith("VAR")
            yield f"{where}({name}): extra" + ("" if is_optional else " and required")
    by_position = [name for name, kind, _ in theirs if not kind.startswith("KEYWORD") and name in our]
    if [name for name, *_ in ours if name in by_position] != by_position:
        yield f"{where}: order of parameters"


def differences(where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """How our entries differ from theirs, one line each."""
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in ours or name not in theirs:
            yield f"{where}{name}: {'missing' if name in theirs else 'extra'}"
            continue
        their, our, here = theirs[name], ours[name], f"{where}{name}"
        for key in ("kind", "values", "ancestors"):
            if their.get(key) != our.get(key):
                yield f"{here}: {key}"
        if their.get("is_async") != our.get("is_async"):
            yield f"{here}: {'coroutine' if our.get('is_async') else 'plain'} function"
        if their.get("is_dataclass") != our.get("is_dataclass"):
            yield f"{here}: {'dataclass' if our.get('is_dataclass') else 'no dataclass'}"
        yield from parameter_differences(here, their.get("parameters", []), our.get("parameters", []))
        fields = {field for side in (their, our) for field, *_ in side.get("parameters", [])}
        members = [
            {member: value for member, value in side.get("members", {}).items() if member not in fields}
            | {method: {} for method in side.get("pydantic", [])}
            for side in (their, our)
        ]
        yield from differences(f"{here}.", *members)


def module_differences() -> Iterator[str]:
    for path, names in described("tinker")["modules"].items():
        try:
            module = importlib.import_module(f"tinsmith.{path}")
        except ModuleNotFoundError:
            yield f"module {path}: missing"
            continue
        for name in names:
            if not hasattr(module, name):
                yield f"module {path}.{name}: missing"
            elif name in tinsmith.__all__ or name in types.__all__:
                home = tinsmith if name in tinsmith.__all__ else types
                assert getattr(module, name) is getattr(home, name), f"{path}.{name} is another object"


def all_differences() -> set[str]:
    theirs, ours = described("tinker"), described("tinsmith")
    found = [*module_differences()]
    found += differences("", theirs["names"], ours["names"])
    found += differences("types.", theirs["types"], ours["types"])
    found += differences("auth.", theirs["auth"], ours["auth"])
    for name, members in theirs["members"].items():
        found += differences(f"{name}.", members, ours["members"][name])
    return set(found)


def expression_differences() -> set[str]:
    theirs, ours = run_surface("tinker", "--try"), run_surface("tinsmith", "--try")
    assert theirs.keys() == ours.keys()
    return {text for text, answer in theirs.items() if ours[text] != answer}


def is_listed(difference: str, key: str) -> bool:
    return key == difference or fnmatch.fnmatchcase(difference, key)


def test_every_difference_is_listed_and_every_listed_one_exists() -> None:
    found = all_differences() | expression_differences()
    unlisted = sorted(text for text in found if not any(is_listed(text, key) for key in DIFFERENCES))
    gone = sorted(key for key in DIFFERENCES if not any(is_listed(text, key) for text in found))
    assert not unlisted, "differences without a reason:\n" + "\n".join(unlisted)
    assert not gone, "listed, but the same by now:\n" + "\n".join(gone)


@pytest.mark.parametrize("stored", [None, "{", "{}", '{"default": "a", "keys": {}}', STORED_KEY])
def test_auth_sees_the_same_credentials(stored: str | None, tmp_path: Path) -> None:
    if stored is not None:
        (tmp_path / ".tinker").mkdir()
        (tmp_path / ".tinker" / "credentials.json").write_text(stored)
    environments = json.dumps(
        [
            {},
            {"TINKER_API_KEY": "tml-a"},
            {"TINKER_API_KEY": "eyJabc"},
            {"TINKER_API_KEY": "not-a-key"},
            {"TINKER_API_KEY": ""},
            {"TINKER_CREDENTIAL_CMD": "exit 1"},
            {"TINKER_CREDENTIAL_CMD": ""},
            {"TINKER_API_KEY": "not-a-key", "TINKER_CREDENTIAL_CMD": "echo tml-b"},
            {"TINKER_BASE_URL": "http://127.0.0.1:1"},
        ]
    )
    theirs = run_surface("tinker", "--auth", text=environments, HOME=str(tmp_path))
    ours = run_surface("tinsmith", "--auth", text=environments, HOME=str(tmp_path))
    assert ours[:-1] == theirs[:-1]
    # A key that an official client stored is for the hosted service; theirs would send it to any address that is set.
    assert ours[-1] == ([None, False] if stored == STORED_KEY else theirs[-1])

"""Aliases: the module paths that programs written for `tinker` import, `as_tinker`, and pydantic's methods."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tinsmith
from tinsmith import compat, errors, types
from tinsmith.client.connection import polling
from tinsmith.client.connection.official_options import RequestOptions, RetryConfig, Timeout
from tinsmith.client.runtime.futures import Future

ALIASES = {
    "types.tensor_data": {"TensorData": types.TensorData},
    "types.tensor_dtype": {"TensorDtype": types.TensorDtype},
    "types.model_input": {"ModelInput": types.ModelInput},
    "types.model_input_chunk": {"ModelInputChunk": types.ModelInputChunk},
    "types.model_id": {"ModelID": types.ModelID},
    "types.datum": {"Datum": types.Datum},
    "types.image_chunk": {"ImageChunk": types.ImageChunk},
    "types.encoded_text_chunk": {"EncodedTextChunk": types.EncodedTextChunk},
    "types.optim_step_request": {"OptimStepRequest": types.OptimStepRequest, "AdamParams": types.AdamParams},
    "types.optimizer": {"AdamParams": types.AdamParams, "OptimizerConfig": types.OptimizerConfig},
    "types.checkpoint": {"Checkpoint": types.Checkpoint, "CheckpointType": types.CheckpointType},
    "types.loss_fn_type": {"LossFnType": types.LossFnType},
    "types.sampled_sequence": {"SampledSequence": types.SampledSequence},
    "types.sample_response": {"SampleResponse": types.SampleResponse},
    "types.provenance_spans": {"PromptProvenanceSpan": types.PromptProvenanceSpan},
    "types.shared": {"UntypedAPIFuture": types.UntypedAPIFuture},
    "types.shared.untyped_api_future": {"UntypedAPIFuture": types.UntypedAPIFuture},
    "lib.public_interfaces": {
        "APIFuture": tinsmith.APIFuture,
        "AdminClient": tinsmith.AdminClient,
        "AwaitableConcurrentFuture": Future,
        "LossHandle": tinsmith.LossHandle,
        "PerDatumLossFn": tinsmith.PerDatumLossFn,
        "RestClient": tinsmith.RestClient,
        "SamplingClient": tinsmith.SamplingClient,
        "ServiceClient": tinsmith.ServiceClient,
        "TrainingClient": tinsmith.TrainingClient,
    },
    "lib.public_interfaces.admin_client": {"AdminClient": tinsmith.AdminClient},
    "lib.public_interfaces.api_future": {"APIFuture": tinsmith.APIFuture, "AwaitableConcurrentFuture": Future},
    "lib.public_interfaces.custom_loss": {"LossHandle": tinsmith.LossHandle},
    "lib.public_interfaces.rest_client": {"RestClient": tinsmith.RestClient},
    "lib.public_interfaces.sampling_client": {"SamplingClient": tinsmith.SamplingClient, "RetryConfig": RetryConfig},
    "lib.public_interfaces.service_client": {"ServiceClient": tinsmith.ServiceClient},
    "lib.public_interfaces.training_client": {"TrainingClient": tinsmith.TrainingClient},
    "lib.api_future_impl": {"QueueState": polling.QueueState},
    "lib.queue_state_logger": {"QueueStateLogger": polling.QueueStateLogger},
    "lib.experimental": {"ExperimentalWarning": errors.ExperimentalWarning},
    "lib.retry_handler": {"RetryConfig": RetryConfig},
    "lib.retryable_exception": {"RetryableException": errors.RetryableException},
    "_exceptions": {"APIError": errors.APIError, "RateLimitError": errors.RateLimitError},
    "_version": {"__version__": tinsmith.__version__},
}


def run(program: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, this package and then `path` on its path."""
    ours = str(Path(tinsmith.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), ours])}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def answer(program: str, *path: Path) -> object:
    """What the program's last line, an expression, gives."""
    *lines, last = program.strip().splitlines()
    done = run("\n".join([*lines, "import json", f"print(json.dumps({last}))"]), *path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which another package is installed as `tinker`."""
    (tmp_path / "tinker" / "types").mkdir(parents=True)
    (tmp_path / "tinker" / "__init__.py").write_text("OTHER = True\n")
    (tmp_path / "tinker" / "types" / "__init__.py").write_text("")
    (tmp_path / "tinker" / "proto.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("path", ALIASES)
def test_an_alias_module_gives_the_same_objects(path: str) -> None:
    module = importlib.import_module(f"tinsmith.{path}")
    for name, value in ALIASES[path].items():
        assert getattr(module, name) is value


@pytest.mark.parametrize("path", [*compat.MODULES, *(f"types.{name}" for name in compat.TYPE_MODULES)])
def test_every_name_of_the_tables_resolves(path: str) -> None:
    module = importlib.import_module(f"tinsmith.{path}")
    namespace: dict[str, object] = {}
    exec(f"from tinsmith.{path} import *", namespace)
    assert set(module.__all__) <= set(namespace)


def test_every_type_has_a_module() -> None:
    listed = {name for names in compat.TYPE_MODULES.values() for name in names}
    for name in types.__all__:
        if name not in listed:
            module = importlib.import_module(f"tinsmith.types.{compat._snake(name)}")
            assert getattr(module, name) is getattr(types, name)


@pytest.mark.parametrize("path", ["types.nothing", "types.tensor_data.nothing", "lib.nothing", "lib.retry_handler.x"])
def test_an_unknown_module_is_not_found(path: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"tinsmith.{path}")


def test_a_type_that_shares_a_module_has_none_of_its_own() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tinsmith.types.billing_usage_event")


def test_an_unknown_name_of_an_alias_module_is_an_attribute_error() -> None:
    module = importlib.import_module("tinsmith.types.tensor_data")
    with pytest.raises(AttributeError, match=r"module 'tinsmith\.types\.tensor_data' has no attribute 'Datum'"):
        module.Datum  # noqa: B018


def test_an_alias_package_has_its_modules_as_attributes() -> None:
    lib = importlib.import_module("tinsmith.lib")
    assert lib.public_interfaces.rest_client.RestClient is tinsmith.RestClient


@pytest.mark.parametrize(
    "path", ["lib.public_interfaces.service_client", "types.image_chunk", "_exceptions", "_version"]
)
def test_an_alias_module_can_be_the_first_import(path: str) -> None:
    assert answer(f"import tinsmith.{path} as first\nfirst.__name__") == f"tinsmith.{path}"


def test_alias_modules_are_attributes_from_the_start() -> None:
    program = """
import sys, tinsmith
heavy = [name for name in ("numpy", "msgspec", "aiohttp", "torch") if name in sys.modules]
[heavy, tinsmith._version.__version__ == tinsmith.__version__, tinsmith._exceptions.APIError is tinsmith.APIError, \
tinsmith.lib.public_interfaces.APIFuture is tinsmith.APIFuture, \
tinsmith.types.image_chunk.ImageChunk is tinsmith.types.ImageChunk]""".replace("\\\n", "")
    assert answer(program) == [[], True, True, True, True]


def test_an_unknown_type_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'tinsmith\.types' has no attribute 'Dathum'"):
        types.Dathum  # noqa: B018


def test_the_finder_is_installed_once() -> None:
    assert compat.install() is compat.install()
    assert sum(isinstance(finder, compat.AliasFinder) for finder in sys.meta_path) == 1


def test_without_asking_tinker_is_not_served() -> None:
    done = run("import tinsmith.types, tinker")
    assert "No module named 'tinker'" in done.stderr


PROGRAM = """
import tinsmith
tinsmith.as_tinker()
import tinker
import tinker.lib.public_interfaces as interfaces
import tinker.types
from tinker import types
from tinker._exceptions import APIError
from tinker.lib.retry_handler import RetryConfig
from tinker.types.tensor_data import TensorData
"""


def test_as_tinker_gives_this_package_under_the_other_name() -> None:
    expression = (
        "[tinker is tinsmith, types is tinsmith.types, tinker.types is types, TensorData is tinsmith.TensorData,"
        " interfaces.APIFuture is tinsmith.APIFuture, issubclass(tinker.RateLimitError, APIError),"
        " isinstance(tinker.TensorData([1], 'int64'), TensorData), tinker.auth is tinsmith.auth]"
    )
    assert answer(f"{PROGRAM}\n{expression}") == [True] * 8


def test_as_tinker_comes_before_an_installed_tinker(installed: Path) -> None:
    assert answer(f"{PROGRAM}\n[tinker is tinsmith, hasattr(tinker, 'OTHER')]", installed) == [True, False]


def test_as_tinker_can_be_called_again() -> None:
    assert answer(f"{PROGRAM}\ntinsmith.as_tinker() is tinker") is True


def test_as_tinker_refuses_when_another_tinker_is_imported(installed: Path) -> None:
    done = run("import tinker, tinsmith\ntinsmith.as_tinker()", installed)
    assert "ImportError: tinker is already imported" in done.stderr


def test_without_as_tinker_an_installed_tinker_is_left_alone(installed: Path) -> None:
    assert answer("import tinsmith.types, tinker\ntinker.OTHER", installed) is True


@pytest.mark.parametrize("module", ["tinker.nothing", "tinker.proto", "tinker.types.nothing", "tinker.lib.telemetry"])
def test_what_has_no_counterpart_is_not_found(module: str, installed: Path) -> None:
    done = run(f"import tinsmith\ntinsmith.as_tinker()\nimport {module}", installed)
    assert f"ModuleNotFoundError: tinsmith has no equivalent of {module}" in done.stderr


def test_a_module_that_lacks_a_dependency_says_which() -> None:
    program = """
import sys, tinsmith
tinsmith.as_tinker()
sys.modules["msgspec"] = None
try:
    import tinker.types
except ModuleNotFoundError as error:
    missing = error.name
missing"""
    assert answer(program) == "msgspec"


def test_a_module_under_two_names_is_loaded_once_and_unchanged() -> None:
    program = f"""{PROGRAM}
import tinker.auth, tinker.client.runtime.futures, tinsmith.client.runtime.futures
[tinker.client.runtime.futures is tinsmith.client.runtime.futures, tinsmith.types.__spec__.name, tinsmith.__spec__.name,
tinsmith.auth.__name__, hasattr(tinsmith.auth, "__path__")]""".replace("__spec__.name,\n", "__spec__.name, ")
    assert answer(program) == [True, "tinsmith.types", "tinsmith", "tinsmith.auth", False]


def test_what_is_pickled_under_one_name_is_read_under_the_other() -> None:
    pickled = pickle.dumps([types.TensorData([1, 2], "int64"), types.AdamParams(beta1=0.5), errors.APIError("no")])
    program = f"{PROGRAM}\nimport pickle\na, b, c = pickle.loads({pickled!r})\n"
    assert answer(f"{program}[isinstance(a, TensorData), a.data, b.beta1, isinstance(c, APIError)]") == [
        True,
        [1, 2],
        0.5,
        True,
    ]
    assert answer(
        f"{PROGRAM}\nimport pickle\npickle.loads(pickle.dumps(tinker.ModelInput.from_ints([1]))).to_ints()"
    ) == [1]


def test_as_tinker_alone_loads_nothing_heavy() -> None:
    program = "import sys, tinsmith\ntinsmith.as_tinker()\nimport tinker\n"
    assert answer(f"{program}[name for name in ('numpy', 'msgspec', 'aiohttp', 'torch') if name in sys.modules]") == []


def test_a_message_is_dumped_and_read_as_pydantic_models_are() -> None:
    params = types.SamplingParams(max_tokens=3, temperature=0.5)
    dumped = {"max_tokens": 3, "seed": None, "stop": None, "temperature": 0.5, "top_k": -1, "top_p": 1.0}
    assert params.model_dump() == dumped
    assert params.model_dump(exclude_none=True) == {"max_tokens": 3, "temperature": 0.5, "top_k": -1, "top_p": 1.0}
    assert json.loads(params.model_dump_json()) | {"seed": None, "stop": None} == dumped
    assert types.SamplingParams.model_validate(dumped) == types.SamplingParams(**dumped)
    assert types.SamplingParams.model_validate(params) == params


def test_a_message_is_copied_as_pydantic_models_are() -> None:
    params = types.AdamParams(learning_rate=0.1)
    changed = params.model_copy(update={"beta1": 0.5})
    assert (changed.learning_rate, changed.beta1, params.beta1) == (0.1, 0.5, 0.9)
    with pytest.raises(errors.InvalidInputError, match="beta9"):
        params.model_copy(update={"beta9": 0.5})


def test_nested_messages_and_times_are_dumped_plain() -> None:
    values = {"checkpoint_id": "c", "checkpoint_type": "training", "tinker_path": "tinker://r/weights/c"}
    checkpoint = types.Checkpoint.model_validate({**values, "time": "2026-01-02T03:04:05Z"})
    listed = types.CheckpointsListResponse(checkpoints=[checkpoint]).model_dump(mode="json", exclude_none=True)
    assert listed == {"checkpoints": [{**values, "time": "2026-01-02T03:04:05Z", "public": False}]}


def test_reading_refuses_a_wrong_value_and_names_it() -> None:
    with pytest.raises(errors.InvalidInputError, match="max_tokens"):
        types.SamplingParams.model_validate({"max_tokens": "many"})


def test_a_timeout_has_four_parts() -> None:
    assert Timeout(5.0, connect=1.0).as_dict() == {"connect": 1.0, "read": 5.0, "write": 5.0, "pool": 5.0}
    assert Timeout(None).read is None
    assert Timeout(5.0) == Timeout(connect=5.0, read=5.0, write=5.0, pool=5.0)
    with pytest.raises(errors.InvalidInputError, match="write"):
        Timeout(connect=1.0, read=1.0)


def test_request_options_are_a_dictionary() -> None:
    assert RequestOptions(max_retries=2, timeout=Timeout(1.0)) == {"max_retries": 2, "timeout": Timeout(1.0)}


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in os.environ:
        if name.startswith(("TINKER", "TINSMITH", "XDG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_auth_knows_the_key_that_is_set(nothing_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (tinsmith.auth.get_tinker_token(), tinsmith.auth.tinker_has_credentials()) == (None, False)
    monkeypatch.setenv("TINKER_API_KEY", "tml-a")
    assert (tinsmith.auth.get_tinker_token(), tinsmith.auth.tinker_has_credentials()) == ("tml-a", True)
    monkeypatch.setenv("TINKER_API_KEY", "not-a-key")
    assert (tinsmith.auth.get_tinker_token(), tinsmith.auth.tinker_has_credentials()) == (None, False)


def test_auth_does_not_run_a_credential_command(nothing_set: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {nothing_set}/ran")
    assert (tinsmith.auth.get_tinker_token(), tinsmith.auth.tinker_has_credentials()) == (None, True)
    assert not (nothing_set / "ran").exists()


def test_asking_whether_the_server_is_there_needs_a_credential(nothing_set: Path) -> None:
    with pytest.raises(errors.TinkerError, match="TINKER_API_KEY"):
        tinsmith.auth.raise_if_tinker_not_accessible()

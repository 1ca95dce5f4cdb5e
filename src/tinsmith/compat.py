"""Aliases: the module paths that programs written for `tinker` import, and `as_tinker`.

A table of aliases and an import hook that serves it. Alias modules contain nothing of their own.
(Compared with the official package in tests/contract/test_surface_contract.py.)
"""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # the import system only looks for methods; importing these base classes would double the import time
    Loader = MetaPathFinder = object

MODULES: Mapping[str, tuple[str, ...]] = {
    "lib": (),
    "lib.public_interfaces": (
        "APIFuture",
        "AdminClient",
        "AwaitableConcurrentFuture",
        "LossHandle",
        "PerDatumLossFn",
        "RestClient",
        "SamplingClient",
        "ServiceClient",
        "TrainingClient",
    ),
    "lib.public_interfaces.admin_client": ("AdminClient",),
    "lib.public_interfaces.api_future": ("APIFuture", "AwaitableConcurrentFuture"),
    "lib.public_interfaces.custom_loss": ("LossHandle", "PerDatumLossFn"),
    "lib.public_interfaces.rest_client": ("RestClient",),
    "lib.public_interfaces.sampling_client": ("SamplingClient", "RetryConfig"),
    "lib.public_interfaces.service_client": ("ServiceClient",),
    "lib.public_interfaces.training_client": ("CustomLossFnV1", "TrainingClient"),
    "lib.api_future_impl": ("QueueState", "QueueStateObserver"),
    "lib.experimental": ("ExperimentalWarning",),
    "lib.queue_state_logger": ("QueueStateLogger",),
    "lib.retry_handler": ("RetryConfig",),
    "lib.retryable_exception": ("RetryableException",),
    "_exceptions": (
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ConflictError",
        "InternalServerError",
        "NotFoundError",
        "PermissionDeniedError",
        "RateLimitError",
        "RequestFailedError",
        "TinkerError",
        "UnprocessableEntityError",
    ),
    "_version": ("__title__", "__version__"),
}
"""Alias modules in the package, and the names they contain."""

TYPE_MODULES: Mapping[str, tuple[str, ...]] = {
    "billing_usage_request": ("GetBillingUsageRequest",),
    "billing_usage_response": (
        "BillingEventInfo",
        "BillingUsageEvent",
        "BillingUsageResponse",
        "BillingUsageSession",
        "CheckpointBillingEvent",
        "SamplingPrefillBillingEvent",
        "SamplingSampleBillingEvent",
        "StorageBillingEvent",
        "TrainingBillingEvent",
    ),
    "checkpoint": ("Checkpoint", "CheckpointType", "ParsedCheckpointTinkerPath"),
    "current_checkpoint_storage_usage_request": ("GetCurrentCheckpointStorageUsageRequest",),
    "current_checkpoint_storage_usage_response": (
        "CurrentCheckpointStorageUsageItem",
        "CurrentCheckpointStorageUsageResponse",
    ),
    "custom_loss_graph": ("CustomLossGraph", "CustomLossNode"),
    "custom_loss_input": ("CustomLossInput", "CustomLossInputRank"),
    "future_completion": ("FutureCompletion", "FutureFailed", "FutureFinished"),
    "futures_retrieve_request": ("FuturesRetrieveRequest", "SamplingSessionFuturesTarget"),
    "get_info_response": ("GetInfoResponse", "ModelData"),
    "get_server_capabilities_response": ("GetServerCapabilitiesResponse", "SupportedModel"),
    "optimizer": (
        "AdamOptimizerConfig",
        "AdamParams",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "OptimParams",
        "OptimizerConfig",
    ),
    # AdamParams had its home here before there were other optimizers.
    "optim_step_request": ("AdamParams", "OptimStepRequest"),
    "provenance_spans": ("PromptProvenanceSpan", "ProvenanceSpans", "SampledProvenanceSpan"),
    "save_weights_external_response": ("SaveWeightsExternalResponse", "SaveWeightsExternalResponseInternal"),
    "save_weights_for_sampler_response": ("SaveWeightsForSamplerResponse", "SaveWeightsForSamplerResponseInternal"),
    "search_owner": ("AccessibleSearchOwner", "OwnSearchOwner", "SearchOwner", "UserSearchOwner"),
    "session_status": (
        "ClientSessionFinishErrored",
        "ClientSessionFinishInterrupted",
        "ClientSessionFinishReason",
        "ClientSessionFinishSuccess",
        "ClientSessionFinished",
        "SessionActive",
        "SessionCancelled",
        "SessionFailed",
        "SessionFailedReason",
        "SessionFailedRequestReason",
        "SessionFailedSamplingSessionReason",
        "SessionFailedTrainingRunReason",
        "SessionStatus",
    ),
    "session_status_query": (
        "ActiveSessionStatusQuery",
        "CancelledSessionStatusQuery",
        "ClientFinishedSessionStatusQuery",
        "ClientSessionFinishReasonType",
        "FailedSessionStatusQuery",
        "SessionStatusQuery",
    ),
    "shared": ("UntypedAPIFuture",),
    "shared.untyped_api_future": ("UntypedAPIFuture",),
}
"""Modules in `types` that contain more or other than the one type they are named after."""

HOMES: Mapping[str, tuple[str, str]] = {
    "AwaitableConcurrentFuture": ("tinsmith.client.runtime.futures", "Future"),
    "CustomLossFnV1": ("tinsmith.client.losses.custom_loss", "LossFn"),
    "QueueState": ("tinsmith.client.connection.polling", "QueueState"),
    "QueueStateLogger": ("tinsmith.client.connection.polling", "QueueStateLogger"),
    "QueueStateObserver": ("tinsmith.client.connection.polling", "QueueStateObserver"),
    "RetryConfig": ("tinsmith.client.connection.official_options", "RetryConfig"),
    "RetryableException": ("tinsmith.errors", "RetryableException"),
}
"""Names that only alias modules have, and what they refer to."""


class AliasLoader(Loader):
    """Creates an alias module, in which each name is looked up when it is first used."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let the import system create the module."""

    def exec_module(self, module: ModuleType) -> None:
        def find(name: str) -> Any:
            value = lookup(name) if name in self._names else submodule(module.__name__, name)
            module.__dict__[name] = value
            return value

        module.__dict__.update({"__getattr__": find, "__all__": list(self._names)})


class SameModuleLoader(Loader):
    """Returns a loaded module under a second name, unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has written the second name's spec into it.
        module.__spec__ = self._spec


class AliasFinder(MetaPathFinder):
    """Finds alias modules in `tinsmith` and, after `as_tinker`, everything in `tinker`."""

    serves_tinker = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root, _, rest = fullname.partition(".")
        if root == "tinker" and self.serves_tinker:
            module = _counterpart(rest)
            return importlib.machinery.ModuleSpec(
                fullname, SameModuleLoader(module), is_package=hasattr(module, "__path__")
            )
        names = names_in(rest) if root == "tinsmith" else None
        if names is None:
            return None
        is_package = rest in ("lib", "lib.public_interfaces", "types.shared")
        return importlib.machinery.ModuleSpec(fullname, AliasLoader(names), is_package=is_package)


def names_in(module: str) -> tuple[str, ...] | None:
    """Return the names in an alias module of the package; None if there is no such alias."""
    if module in MODULES:
        return MODULES[module]
    if not module.startswith("types."):
        return None
    name = module.removeprefix("types.")
    if name in TYPE_MODULES:
        return TYPE_MODULES[name]
    from tinsmith import types

    elsewhere = {public for names in TYPE_MODULES.values() for public in names}
    matching = tuple(public for public in types.__all__ if _snake(public) == name and public not in elsewhere)
    return matching or None


def lookup(name: str) -> Any:
    """Return what a name in an alias module refers to."""
    import tinsmith
    from tinsmith import types

    if name in HOMES:
        module, attribute = HOMES[name]
        return getattr(importlib.import_module(module), attribute)
    return getattr(tinsmith if name in tinsmith.__all__ else types, name)


def submodule(package: str, name: str) -> ModuleType:
    """Return an alias module as an attribute of its package: programs use `types.image_chunk` without importing it."""
    if names_in(f"{package}.{name}".partition(".")[2]) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    alias = package + "." + name
    return importlib.import_module(alias)


def install() -> AliasFinder:
    """Install the finder, once."""
    for finder in sys.meta_path:
        if isinstance(finder, AliasFinder):
            return finder
    finder = AliasFinder()
    sys.meta_path.append(finder)
    return finder


def as_tinker() -> ModuleType:
    """Make `import tinker`, and everything in it, return this package. Call it before the first such import."""
    import tinsmith

    already = sys.modules.get("tinker")
    if already is not None and already is not tinsmith:
        raise ImportError("tinker is already imported; call tinsmith.as_tinker() before anything imports it")
    finder = install()
    finder.serves_tinker = True
    # Before the path finder, so that an installed tinker is not found first.
    sys.meta_path.remove(finder)
    sys.meta_path.insert(0, finder)
    sys.modules["tinker"] = tinsmith
    return tinsmith


def _counterpart(module: str) -> ModuleType:
    """Return our module for one of `tinker`. Never "not found", which would load our files a second time."""
    ours = f"tinsmith.{module}"
    try:
        return importlib.import_module(ours)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{ours}.".startswith(f"{error.name}."):
            raise
        raise ModuleNotFoundError(f"tinsmith has no equivalent of tinker.{module}", name=f"tinker.{module}") from None


def _snake(name: str) -> str:
    """`TensorData` -> `tensor_data`, `ModelID` -> `model_id`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()

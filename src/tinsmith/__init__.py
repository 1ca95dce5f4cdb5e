"""tinsmith: a client for the Tinker protocol, with the same names as the official `tinker` package.

Names are loaded on first use: importing the package loads neither numpy nor an HTTP library nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinsmith import compat
from tinsmith.version import __version__

if TYPE_CHECKING:
    from tinsmith import auth, types
    from tinsmith.client.admin import AdminClient, RawResponse
    from tinsmith.client.connection.official_options import RequestOptions, RetryConfig, Timeout
    from tinsmith.client.losses.loss_graph import LossHandle, PerDatumLossFn
    from tinsmith.client.rest import RestClient
    from tinsmith.client.runtime.deadlines import deadline
    from tinsmith.client.runtime.futures import Future as APIFuture
    from tinsmith.client.sampling import SamplingClient
    from tinsmith.client.service import ServiceClient, local
    from tinsmith.client.training import TrainingClient
    from tinsmith.compat import as_tinker
    from tinsmith.config import ClientConfig
    from tinsmith.errors import (
        APIConnectionError,
        APIError,
        APIResponseValidationError,
        APIStatusError,
        APITimeoutError,
        AuthenticationError,
        BadRequestError,
        BillingError,
        ConflictError,
        ExperimentalWarning,
        InternalServerError,
        InvalidInputError,
        NotFoundError,
        PermissionDeniedError,
        PrecisionWarning,
        RateLimitError,
        RequestFailedError,
        RunRecoveredError,
        TinkerError,
        UnprocessableEntityError,
        WireError,
    )
    from tinsmith.types import (
        AdamOptimizerConfig,
        AdamParams,
        Checkpoint,
        CheckpointType,
        Datum,
        DimuonOptimizerConfig,
        DimuonParams,
        DmelChunk,
        EncodedTextChunk,
        ForwardBackwardOutput,
        LoraConfig,
        ModelID,
        ModelInput,
        ModelInputChunk,
        OptimParams,
        OptimStepRequest,
        OptimStepResponse,
        ParsedCheckpointTinkerPath,
        PromptProvenanceSpan,
        SampledProvenanceSpan,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        SamplingParams,
        StopReason,
        TensorData,
        TensorDtype,
        TrainingRun,
    )

__title__ = "tinsmith"

_HOMES = {
    "APIFuture": ("tinsmith.client.runtime.futures", "Future"),
    "AdminClient": ("tinsmith.client.admin", "AdminClient"),
    "ClientConfig": ("tinsmith.config", "ClientConfig"),
    "LossHandle": ("tinsmith.client.losses.loss_graph", "LossHandle"),
    "PerDatumLossFn": ("tinsmith.client.losses.loss_graph", "PerDatumLossFn"),
    "RawResponse": ("tinsmith.client.admin", "RawResponse"),
    "RequestOptions": ("tinsmith.client.connection.official_options", "RequestOptions"),
    "RestClient": ("tinsmith.client.rest", "RestClient"),
    "RetryConfig": ("tinsmith.client.connection.official_options", "RetryConfig"),
    "SamplingClient": ("tinsmith.client.sampling", "SamplingClient"),
    "ServiceClient": ("tinsmith.client.service", "ServiceClient"),
    "Timeout": ("tinsmith.client.connection.official_options", "Timeout"),
    "TrainingClient": ("tinsmith.client.training", "TrainingClient"),
    "as_tinker": ("tinsmith.compat", "as_tinker"),
    "deadline": ("tinsmith.client.runtime.deadlines", "deadline"),
    "local": ("tinsmith.client.service", "local"),
    "APIConnectionError": ("tinsmith.errors", "APIConnectionError"),
    "APIError": ("tinsmith.errors", "APIError"),
    "APIResponseValidationError": ("tinsmith.errors", "APIResponseValidationError"),
    "APIStatusError": ("tinsmith.errors", "APIStatusError"),
    "APITimeoutError": ("tinsmith.errors", "APITimeoutError"),
    "AuthenticationError": ("tinsmith.errors", "AuthenticationError"),
    "BadRequestError": ("tinsmith.errors", "BadRequestError"),
    "BillingError": ("tinsmith.errors", "BillingError"),
    "ConflictError": ("tinsmith.errors", "ConflictError"),
    "ExperimentalWarning": ("tinsmith.errors", "ExperimentalWarning"),
    "InternalServerError": ("tinsmith.errors", "InternalServerError"),
    "InvalidInputError": ("tinsmith.errors", "InvalidInputError"),
    "NotFoundError": ("tinsmith.errors", "NotFoundError"),
    "PermissionDeniedError": ("tinsmith.errors", "PermissionDeniedError"),
    "PrecisionWarning": ("tinsmith.errors", "PrecisionWarning"),
    "RateLimitError": ("tinsmith.errors", "RateLimitError"),
    "RequestFailedError": ("tinsmith.errors", "RequestFailedError"),
    "RunRecoveredError": ("tinsmith.errors", "RunRecoveredError"),
    "TinkerError": ("tinsmith.errors", "TinkerError"),
    "UnprocessableEntityError": ("tinsmith.errors", "UnprocessableEntityError"),
    "WireError": ("tinsmith.errors", "WireError"),
}
"""The module and attribute of each public name; all other names are in `tinsmith.types`."""

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIFuture",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AdminClient",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
    "ClientConfig",
    "ConflictError",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "ExperimentalWarning",
    "ForwardBackwardOutput",
    "InternalServerError",
    "InvalidInputError",
    "LoraConfig",
    "LossHandle",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PerDatumLossFn",
    "PermissionDeniedError",
    "PrecisionWarning",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RawResponse",
    "RequestFailedError",
    "RequestOptions",
    "RestClient",
    "RetryConfig",
    "RunRecoveredError",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "ServiceClient",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "Timeout",
    "TinkerError",
    "TrainingClient",
    "TrainingRun",
    "UnprocessableEntityError",
    "WireError",
    "__title__",
    "__version__",
    "as_tinker",
    "auth",
    "deadline",
    "local",
    "types",
]


def __getattr__(name: str) -> Any:
    if name == "auth":
        return importlib.import_module("tinsmith.auth")
    if name == "types":
        return importlib.import_module("tinsmith.types")
    if name not in __all__:
        return compat.submodule("tinsmith", name)
    module, attribute = _HOMES.get(name, ("tinsmith.types", name))
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


compat.install()

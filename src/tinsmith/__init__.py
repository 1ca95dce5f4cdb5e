"""tinsmith: the Tinker protocol, spoken from Python, under the names that programs written for `tinker` use.

Names are loaded when they are first used: importing the package loads neither numpy nor an HTTP library nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinsmith.version import __version__

if TYPE_CHECKING:
    from tinsmith import types
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

_ERRORS = frozenset(
    {
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ConflictError",
        "ExperimentalWarning",
        "InternalServerError",
        "InvalidInputError",
        "NotFoundError",
        "PermissionDeniedError",
        "PrecisionWarning",
        "RateLimitError",
        "RequestFailedError",
        "TinkerError",
        "UnprocessableEntityError",
        "WireError",
    }
)

__all__ = [
    "APIConnectionError",
    "APIError",
    "APIResponseValidationError",
    "APIStatusError",
    "APITimeoutError",
    "AdamOptimizerConfig",
    "AdamParams",
    "AuthenticationError",
    "BadRequestError",
    "BillingError",
    "Checkpoint",
    "CheckpointType",
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
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "NotFoundError",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath",
    "PermissionDeniedError",
    "PrecisionWarning",
    "PromptProvenanceSpan",
    "RateLimitError",
    "RequestFailedError",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "TensorData",
    "TensorDtype",
    "TinkerError",
    "TrainingRun",
    "UnprocessableEntityError",
    "WireError",
    "__title__",
    "__version__",
    "types",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    if name == "types":
        return importlib.import_module("tinsmith.types")
    value = getattr(importlib.import_module("tinsmith.errors" if name in _ERRORS else "tinsmith.types"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

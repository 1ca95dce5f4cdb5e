"""The public names are pinned: a change here is a change for users."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tinsmith
import tinsmith.types

PACKAGE = [
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

TYPES = [
    "AccessibleSearchOwner",
    "ActiveSessionStatusQuery",
    "AdamOptimizerConfig",
    "AdamParams",
    "ApiKeyResponse",
    "AssignProjectRequest",
    "AuditLogEntry",
    "AuditLogResponse",
    "AuthTokenResponse",
    "BillingEventInfo",
    "BillingUsageEvent",
    "BillingUsageResponse",
    "BillingUsageSession",
    "CancelFutureRequest",
    "CancelledSessionStatusQuery",
    "Checkpoint",
    "CheckpointArchiveUrlResponse",
    "CheckpointBillingEvent",
    "CheckpointType",
    "CheckpointsListResponse",
    "ClientConfigRequest",
    "ClientConfigResponse",
    "ClientDynamicConfigResponse",
    "ClientFinishedSessionStatusQuery",
    "ClientSessionFinishErrored",
    "ClientSessionFinishInterrupted",
    "ClientSessionFinishReason",
    "ClientSessionFinishReasonType",
    "ClientSessionFinishSuccess",
    "ClientSessionFinished",
    "CompleteMetadataResponse",
    "CopyWeightsRequest",
    "CopyWeightsResponse",
    "CreateCustomLossRequest",
    "CreateCustomLossResponse",
    "CreateModelRequest",
    "CreateModelResponse",
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "CreateSessionRequest",
    "CreateSessionResponse",
    "CurrentCheckpointStorageUsageItem",
    "CurrentCheckpointStorageUsageResponse",
    "Cursor",
    "CustomLossGraph",
    "CustomLossInput",
    "CustomLossInputRank",
    "CustomLossNode",
    "Datum",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "DmelChunk",
    "EncodedTextChunk",
    "EventType",
    "ExternalWeightsUrlsResponse",
    "FailedSessionStatusQuery",
    "FinishSessionRequest",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "FutureCompletion",
    "FutureFailed",
    "FutureFinished",
    "FutureRetrieveRequest",
    "FutureRetrieveResponse",
    "FuturesRetrieveRequest",
    "FuturesRetrieveResponse",
    "GenericEvent",
    "GetBillingUsageRequest",
    "GetCurrentCheckpointStorageUsageRequest",
    "GetInfoRequest",
    "GetInfoResponse",
    "GetSamplerResponse",
    "GetServerCapabilitiesResponse",
    "GetSessionResponse",
    "HealthResponse",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "ImageDimensions",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "ListSessionsResponse",
    "LoadWeightsRequest",
    "LoadWeightsResponse",
    "LoraConfig",
    "LossFnInputs",
    "LossFnOutput",
    "LossFnType",
    "ModelData",
    "ModelID",
    "ModelInput",
    "ModelInputChunk",
    "OptimParams",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
    "OutputFormat",
    "OwnSearchOwner",
    "ParsedCheckpointTinkerPath",
    "PromptAltTokens",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "RequestErrorCategory",
    "RequestFailedResponse",
    "RequestID",
    "SampleRequest",
    "SampleResponse",
    "SampledProvenanceSpan",
    "SampledSequence",
    "SamplingParams",
    "SamplingPrefillBillingEvent",
    "SamplingSampleBillingEvent",
    "SamplingSessionFuturesTarget",
    "SaveWeightsExternalRequest",
    "SaveWeightsExternalResponse",
    "SaveWeightsExternalResponseInternal",
    "SaveWeightsForSamplerRequest",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsForSamplerResponseInternal",
    "SaveWeightsRequest",
    "SaveWeightsResponse",
    "SearchOwner",
    "SessionActive",
    "SessionCancelled",
    "SessionEndEvent",
    "SessionFailed",
    "SessionFailedReason",
    "SessionFailedRequestReason",
    "SessionFailedSamplingSessionReason",
    "SessionFailedTrainingRunReason",
    "SessionHeartbeatRequest",
    "SessionHeartbeatResponse",
    "SessionSearchCursor",
    "SessionSearchRequest",
    "SessionSearchResponse",
    "SessionStartEvent",
    "SessionStatus",
    "SessionStatusQuery",
    "SessionSummary",
    "SetTtlRequest",
    "Severity",
    "StopReason",
    "StorageBillingEvent",
    "SupportedModel",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "TensorData",
    "TensorDtype",
    "TopkLogprobs",
    "TraceExportResponse",
    "TrainingBillingEvent",
    "TrainingRun",
    "TrainingRunsResponse",
    "TryAgainResponse",
    "UnhandledExceptionEvent",
    "UnloadModelRequest",
    "UnloadModelResponse",
    "UntypedAPIFuture",
    "UserSearchOwner",
    "WeightsInfoRequest",
    "WeightsInfoResponse",
    "WhoamiResponse",
]

LATER = ["torch", "numpy", "aiohttp", "msgspec", "starlette", "uvicorn", "transformers"]


def loaded_by(program: str, watched: list[str]) -> list[str]:
    """Which of the watched modules a fresh interpreter has loaded after the program."""
    program += f"\nimport json, sys\nprint(json.dumps([name for name in {watched!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_the_packages_names_are_these() -> None:
    assert tinsmith.__all__ == PACKAGE


def test_the_types_are_these() -> None:
    assert tinsmith.types.__all__ == TYPES


def test_every_name_of_the_package_resolves() -> None:
    for name in PACKAGE:
        assert getattr(tinsmith, name) is not None


def test_every_type_resolves() -> None:
    for name in TYPES:
        assert getattr(tinsmith.types, name) is not None


def test_a_name_in_both_places_is_one_object() -> None:
    for name in set(PACKAGE) & set(TYPES):
        assert getattr(tinsmith, name) is getattr(tinsmith.types, name)


def test_dir_lists_exactly_the_public_names() -> None:
    assert dir(tinsmith) == sorted(PACKAGE)


def test_star_import_brings_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from tinsmith import *", namespace)
    assert set(PACKAGE) <= set(namespace)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tinsmith' has no attribute 'Dathum'"):
        tinsmith.Dathum  # noqa: B018


def test_an_unknown_name_cannot_be_imported() -> None:
    with pytest.raises(ImportError, match="Dathum"):
        exec("from tinsmith import Dathum")


def test_private_names_are_not_served() -> None:
    assert not hasattr(tinsmith, "UnknownFieldError")


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import tinsmith", LATER) == []


def test_naming_an_error_loads_nothing_heavy() -> None:
    assert loaded_by("from tinsmith import TinkerError, RateLimitError", LATER) == []


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert loaded_by("import tinsmith.cli.main", LATER) == []


def test_building_a_datum_from_lists_and_numpy_loads_no_torch() -> None:
    program = """
import numpy as np
import tinsmith
datum = tinsmith.Datum(
    model_input=tinsmith.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": np.ones(3, np.float32)},
)
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs import proto_training
from tinsmith.wire.routes import table as routes
json_codec.encode(datum)
"""
    assert loaded_by(program, ["torch", "aiohttp"]) == []


def test_the_version_is_told() -> None:
    from tinsmith.version import __version__

    assert tinsmith.__version__ == __version__
    assert tinsmith.__title__ == "tinsmith"

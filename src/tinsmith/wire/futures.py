"""Promises: the answer to a submit, and what asking for the result can bring."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from tinsmith.errors import RequestErrorCategory
from tinsmith.wire.message import NOT_GIVEN, Message, since
from tinsmith.wire.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    OptimStepResponse,
    UnloadModelResponse,
)
from tinsmith.wire.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

RequestID: TypeAlias = str


class UntypedAPIFuture(Message, frozen=True, kw_only=True):
    """The server's promise of a result."""

    request_id: RequestID
    model_id: str | None = NOT_GIVEN
    sample_sequence_ids: Annotated[list[str] | None, since("0.26")] = NOT_GIVEN


class FutureRetrieveRequest(Message, frozen=True, kw_only=True):
    request_id: RequestID
    allow_metadata_only: Annotated[bool, since("0.14")] = False


class TryAgainResponse(Message, frozen=True, kw_only=True):
    """Not yet; `queue_state` is active, paused_capacity, paused_rate_limit, or something a newer server says."""

    request_id: RequestID
    queue_state: str
    type: Literal["try_again"] = "try_again"
    queue_state_reason: str | None = NOT_GIVEN


class CompleteMetadataResponse(Message, frozen=True, kw_only=True):
    """The result is there and this large; ask again without `allow_metadata_only` to get it."""

    response_payload_size: int
    status: Literal["complete_metadata"] = "complete_metadata"


class RequestFailedResponse(Message, frozen=True, kw_only=True):
    """The operation failed. The category is written in lower case and read in any."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""What the result of an operation other than sampling can be, under the name that programs annotate it with."""


class SamplingSessionFuturesTarget(Message, frozen=True, kw_only=True):
    sampling_session_id: str
    cloned_sampler_id: int = 0
    type: Literal["sampling_session"] = "sampling_session"


class FuturesRetrieveRequest(Message, frozen=True, kw_only=True):
    """One poll for all samples of a sampling session."""

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = NOT_GIVEN
    retrieved_request_ids: Annotated[list[str], since("0.36")] = []


class FutureFinished(Message, frozen=True, kw_only=True, tag_field="state", tag="finished"):
    request_id: RequestID
    response_payload_uncompressed_size: int | None = NOT_GIVEN

    @property
    def state(self) -> str:
        return "finished"


class FutureFailed(Message, frozen=True, kw_only=True, tag_field="state", tag="failed"):
    request_id: RequestID

    @property
    def state(self) -> str:
        return "failed"


FutureCompletion: TypeAlias = FutureFinished | FutureFailed


class FuturesRetrieveResponse(Message, frozen=True, kw_only=True):
    completions: list[FutureCompletion]
    cursor: int


class CancelFutureRequest(Message, frozen=True, kw_only=True):
    request_id: RequestID

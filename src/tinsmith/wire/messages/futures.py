"""Promises: the answer to a submit, and the possible answers when a client asks for the result."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from tinsmith.errors import RequestErrorCategory
from tinsmith.wire.limits import Id, Ids, Int64
from tinsmith.wire.message import NOT_GIVEN, Message, since
from tinsmith.wire.messages.training import (
    CreateModelResponse,
    ForwardBackwardOutput,
    OptimStepResponse,
    UnloadModelResponse,
)
from tinsmith.wire.messages.weights import (
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
    request_id: Id
    allow_metadata_only: Annotated[bool, since("0.14")] = False


class TryAgainResponse(Message, frozen=True, kw_only=True):
    """No result yet; `queue_state` is active, paused_capacity, paused_rate_limit, or a value of a newer server."""

    request_id: RequestID
    queue_state: str
    type: Literal["try_again"] = "try_again"
    queue_state_reason: str | None = NOT_GIVEN


class CompleteMetadataResponse(Message, frozen=True, kw_only=True):
    """The result is ready and has this size; ask again without `allow_metadata_only` to get it."""

    response_payload_size: int
    status: Literal["complete_metadata"] = "complete_metadata"


class RequestFailedResponse(Message, frozen=True, kw_only=True):
    """The operation failed. The category is written in lower case and read in any case."""

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
"""The possible results of an operation other than sampling, under the name that programs use in annotations."""


class SamplingSessionFuturesTarget(Message, frozen=True, kw_only=True):
    sampling_session_id: Id
    cloned_sampler_id: Int64 = 0
    type: Literal["sampling_session"] = "sampling_session"


class FuturesRetrieveRequest(Message, frozen=True, kw_only=True):
    """A poll for all samples of a sampling session at once."""

    target: SamplingSessionFuturesTarget
    prev_cursor: Int64 = 0
    timeout: float | None = NOT_GIVEN
    retrieved_request_ids: Annotated[Ids, since("0.36")] = []


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
    request_id: Id

"""Sampling: requests and responses.

Responses keep numpy arrays and make lists only when a program reads them. On the wire a missing logprob is NaN in a row
of floats and FILL_LOGPROB in a top-k table (tests/contract/test_protobuf_contract.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np

from tinsmith.errors import InvalidInputError
from tinsmith.wire.limits import (
    MAX_SAMPLES,
    GrammarText,
    Id,
    Int64,
    Name,
    Path,
    Stops,
    StopText,
    StopTokens,
    TokenBiases,
)
from tinsmith.wire.message import EXTENSION, NOT_GIVEN, Count, Message, PositiveInt, SeqId, since
from tinsmith.wire.values.frozen import Frozen
from tinsmith.wire.values.inputs import ModelInput
from tinsmith.wire.values.numbers import Array, float_array, token_ids
from tinsmith.wire.values.tensors import TensorData

StopReason: TypeAlias = Literal["length", "stop"]
TopkRow: TypeAlias = list[tuple[int, float]] | None

FILL_TOKEN = 0
FILL_LOGPROB = -99999.0
"""The logprob of an unused cell of a top-k table."""
MAX_TOPK_CELLS = 2**22
"""The most cells of one table of a request or response: 32 MB, as an id and a logprob take 8 bytes."""


class OutputFormat(Message, frozen=True, kw_only=True):
    """What a sample must look like. Tokens that cannot lead to such a text are never drawn."""

    type: Literal["json_object", "json_schema", "regex", "lark"]
    schema: GrammarText = ""
    """A JSON schema, regular expression or Lark grammar, by `type`; empty for `json_object`."""


class SamplingParams(Message, frozen=True, kw_only=True):
    """How to sample. Without `stop` a sample ends at the end-of-sequence token; with `[]` not even there.

    The fields from `min_p` on are tinsmith's own, and are sent only if they are set. They change which tokens are
    drawn, never the logprobs that are reported: those are the model's own, at temperature 1 and without restrictions.
    The order is: penalties and bias, then the output format, then temperature, top_k, top_p and min_p. With temperature
    0 the likeliest token after penalties, bias and output format is taken.
    """

    max_tokens: Count | None = NOT_GIVEN
    seed: Int64 | None = NOT_GIVEN
    stop: StopText | Stops | None = NOT_GIVEN
    temperature: float = 1.0
    top_k: Int64 = -1
    top_p: float = 1.0
    min_p: Annotated[float | None, EXTENSION] = NOT_GIVEN
    """Draw only tokens at least this many times as likely as the likeliest one: 0 to 1."""
    frequency_penalty: Annotated[float | None, EXTENSION] = NOT_GIVEN
    """Subtracted from a token's logit for each time it was drawn before in this sample: -2 to 2."""
    presence_penalty: Annotated[float | None, EXTENSION] = NOT_GIVEN
    """Subtracted once from the logit of every token that was drawn before in this sample: -2 to 2."""
    repetition_penalty: Annotated[float | None, EXTENSION] = NOT_GIVEN
    """Divides positive and multiplies negative logits of tokens in the prompt or the sample: above 0, at most 10."""
    logit_bias: Annotated[TokenBiases | None, EXTENSION] = NOT_GIVEN
    """Added to the logits of these tokens: -100 to 100."""
    stop_token_ids: Annotated[StopTokens | None, EXTENSION] = NOT_GIVEN
    """Tokens that end a sample besides what `stop` says, so that strings and tokens can be combined."""
    output_format: Annotated[OutputFormat | None, EXTENSION] = NOT_GIVEN

    def __post_init__(self) -> None:
        if isinstance(self.stop, list) and len({type(item) for item in self.stop}) > 1:
            raise InvalidInputError("stop: a list must hold either strings or token ids, not both", field="stop")


class SampleRequest(Message, frozen=True, kw_only=True):
    """A request for samples; `wire/rules/sample_rules.py` says which ones are valid."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=MAX_SAMPLES)] = 1
    base_model: Name | None = NOT_GIVEN
    model_path: Path | None = NOT_GIVEN
    sampling_session_id: Id | None = NOT_GIVEN
    seq_id: SeqId | None = NOT_GIVEN
    prompt_logprobs: bool | None = NOT_GIVEN
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Annotated[Count, since("0.29")] = 0
    target_prompt_logprobs: Annotated[TensorData | None, since("0.30")] = NOT_GIVEN
    prompt_alt_tokens_k: Annotated[Count, since("0.31")] = 0
    prompt_logprobs_last_n: Annotated[PositiveInt | None, since("0.33")] = NOT_GIVEN
    record_stability_info: Annotated[bool | None, since("0.27")] = NOT_GIVEN
    type: Literal["sample"] = "sample"


class TopkLogprobs(Frozen):
    """The k likeliest tokens at each position, as two [length, k] tables."""

    __slots__ = ("logprobs", "token_ids")
    token_ids: Array
    logprobs: Array

    def __init__(self, token_ids: Array, logprobs: Array) -> None:
        if token_ids.ndim != 2 or token_ids.shape != logprobs.shape:
            raise InvalidInputError(
                f"top-k tables must both be [length, k], got {token_ids.shape} and {logprobs.shape}"
            )
        self._init(token_ids=token_ids, logprobs=logprobs)

    def to_rows(self) -> list[TopkRow]:
        """Return for each position a list of (token, logprob), likeliest first; None where nothing was requested."""
        rows: list[TopkRow] = []
        for tokens, logprobs in zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True):
            used = 0 if (tokens[0], logprobs[0]) == (FILL_TOKEN, FILL_LOGPROB) else len(logprobs)
            while used and (tokens[used - 1], logprobs[used - 1]) == (FILL_TOKEN, FILL_LOGPROB):
                used -= 1
            rows.append(list(zip(tokens[:used], logprobs[:used], strict=True)) if used else None)
        return rows

    @classmethod
    def from_rows(cls, rows: Sequence[Any], where: str) -> TopkLogprobs | None:
        """Make the tables from such a list; None if all rows are empty."""
        k = max((len(row) for row in rows if row), default=0)
        if k == 0:
            return None
        if len(rows) * k > MAX_TOPK_CELLS:
            raise InvalidInputError(
                f"{where}: a table of {len(rows)} x {k} has more than the {MAX_TOPK_CELLS} cells that are allowed",
                field=where,
            )
        tokens_LK = np.full((len(rows), k), FILL_TOKEN, np.int32)
        logprobs_LK = np.full((len(rows), k), FILL_LOGPROB, np.float32)
        for i, row in enumerate(rows):
            if row:
                tokens_LK[i, : len(row)] = token_ids([token for token, _ in row], f"{where}[{i}]")
                logprobs_LK[i, : len(row)] = float_array([logprob for _, logprob in row], f"{where}[{i}]")
        return cls(tokens_LK, logprobs_LK)


class PromptAltTokens(Frozen):
    """For each prompt position after the first, k alternatives and their logprobs: two [prompt - 1, k] tensors."""

    __slots__ = ("logprobs", "tokens")
    tokens: TensorData
    logprobs: TensorData

    def __init__(self, tokens: TensorData, logprobs: TensorData) -> None:
        if tokens.array.shape != logprobs.array.shape:
            raise InvalidInputError(
                f"tokens and logprobs must have the same shape, got {tokens.array.shape} and {logprobs.array.shape}"
            )
        self._init(tokens=tokens, logprobs=logprobs)


class SampledSequence(Frozen):
    """One sample: why it stopped, its tokens, and their logprobs under the model's distribution."""

    __slots__ = ("logprobs_np", "sequence_id", "stop_reason", "tokens_np", "topk_logprobs_np")
    stop_reason: StopReason
    sequence_id: str
    tokens_np: Array | None
    logprobs_np: Array | None
    topk_logprobs_np: TopkLogprobs | None

    def __init__(
        self,
        stop_reason: StopReason,
        sequence_id: str = "",
        tokens_np: Array | None = None,
        logprobs_np: Array | None = None,
        topk_logprobs_np: TopkLogprobs | None = None,
        _tokens_list: Sequence[int] | None = None,
        _logprobs_list: Sequence[float | None] | None = None,
        _topk_logprobs_list: Sequence[TopkRow] | None = None,
        *,
        tokens: Sequence[int] | None = None,
        logprobs: Sequence[float] | None = None,
    ) -> None:
        if stop_reason not in ("length", "stop"):
            raise InvalidInputError(
                f"stop_reason: {stop_reason!r} is not allowed; it must be 'stop' or 'length'", field="stop_reason"
            )
        listed_tokens = tokens if tokens is not None else _tokens_list
        listed_logprobs = logprobs if logprobs is not None else _logprobs_list
        if tokens_np is None and listed_tokens is not None:
            tokens_np = np.array(token_ids(listed_tokens, "tokens"), np.int32)
        if logprobs_np is None and listed_logprobs is not None:
            logprobs_np = _floats_or_nan(listed_logprobs, "logprobs")
        if topk_logprobs_np is None and _topk_logprobs_list is not None:
            topk_logprobs_np = TopkLogprobs.from_rows(_topk_logprobs_list, "topk_logprobs")
        self._init(
            stop_reason=stop_reason,
            sequence_id=sequence_id,
            tokens_np=tokens_np,
            logprobs_np=logprobs_np,
            topk_logprobs_np=topk_logprobs_np,
        )

    @property
    def tokens(self) -> list[int]:
        listed: list[int] = [] if self.tokens_np is None else self.tokens_np.tolist()
        return listed

    @property
    def logprobs(self) -> list[float] | None:
        listed: list[float] | None = None if self.logprobs_np is None else self.logprobs_np.tolist()
        return listed

    @property
    def topk_logprobs(self) -> list[TopkRow] | None:
        return None if self.topk_logprobs_np is None else self.topk_logprobs_np.to_rows()

    def to_builtins(self) -> dict[str, Any]:
        encoded: dict[str, Any] = {"stop_reason": self.stop_reason, "tokens": self.tokens}
        if self.logprobs_np is not None:
            encoded["logprobs"] = _json_floats(self.logprobs_np, "logprobs")
        if self.topk_logprobs_np is not None:
            encoded["topk_logprobs"] = _json_topk(self.topk_logprobs_np, "topk_logprobs")
        return encoded

    @classmethod
    def from_builtins(cls, value: Any) -> SampledSequence:
        read = msgspec.convert(value, _JsonSequence)
        return cls(
            read.stop_reason,
            read.sequence_id,
            _tokens_list=read.tokens,
            _logprobs_list=read.logprobs,
            _topk_logprobs_list=read.topk_logprobs,
        )


class SampleResponse(Frozen):
    """The samples of one prompt, and the scores of the prompt that were requested."""

    __slots__ = (
        "prompt_alt_tokens",
        "prompt_cache_hit_tokens",
        "prompt_logprobs_np",
        "sequences",
        "target_prompt_logprobs",
        "topk_prompt_logprobs_np",
    )
    sequences: Sequence[SampledSequence]
    prompt_logprobs_np: Array | None
    """One float per prompt token; NaN where there is none, as for the first token."""
    topk_prompt_logprobs_np: TopkLogprobs | None
    target_prompt_logprobs: TensorData | None
    prompt_cache_hit_tokens: int
    prompt_alt_tokens: PromptAltTokens | None

    def __init__(
        self,
        sequences: Sequence[SampledSequence],
        prompt_logprobs_np: Array | None = None,
        topk_prompt_logprobs_np: TopkLogprobs | None = None,
        target_prompt_logprobs: TensorData | None = None,
        prompt_cache_hit_tokens: int = 0,
        prompt_alt_tokens: PromptAltTokens | None = None,
        _prompt_logprobs_list: Sequence[float | None] | None = None,
        _topk_prompt_logprobs_list: Sequence[TopkRow] | None = None,
    ) -> None:
        if prompt_logprobs_np is None and _prompt_logprobs_list is not None:
            prompt_logprobs_np = _floats_or_nan(_prompt_logprobs_list, "prompt_logprobs")
        if topk_prompt_logprobs_np is None and _topk_prompt_logprobs_list is not None:
            topk_prompt_logprobs_np = TopkLogprobs.from_rows(_topk_prompt_logprobs_list, "topk_prompt_logprobs")
        self._init(
            sequences=sequences,
            prompt_logprobs_np=prompt_logprobs_np,
            topk_prompt_logprobs_np=topk_prompt_logprobs_np,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_cache_hit_tokens=prompt_cache_hit_tokens,
            prompt_alt_tokens=prompt_alt_tokens,
        )

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        return None if self.prompt_logprobs_np is None else _none_for_nan(self.prompt_logprobs_np)

    @property
    def topk_prompt_logprobs(self) -> list[TopkRow] | None:
        return None if self.topk_prompt_logprobs_np is None else self.topk_prompt_logprobs_np.to_rows()

    def to_builtins(self) -> dict[str, Any]:
        """Return the JSON form, which releases up to 0.24 read; refuse what it cannot hold instead of dropping it."""
        if self.target_prompt_logprobs is not None or self.prompt_alt_tokens is not None:
            raise InvalidInputError(
                "target_prompt_logprobs and prompt_alt_tokens cannot be sent as JSON, only as protobuf"
            )
        encoded: dict[str, Any] = {
            "type": "sample",
            "sequences": [sequence.to_builtins() for sequence in self.sequences],
            "prompt_cache_hit_tokens": self.prompt_cache_hit_tokens,
        }
        if self.prompt_logprobs_np is not None:
            encoded["prompt_logprobs"] = _json_floats(self.prompt_logprobs_np, "prompt_logprobs")
        if self.topk_prompt_logprobs_np is not None:
            encoded["topk_prompt_logprobs"] = _json_topk(self.topk_prompt_logprobs_np, "topk_prompt_logprobs")
        return encoded

    @classmethod
    def from_builtins(cls, value: Any) -> SampleResponse:
        read = msgspec.convert(value, _JsonSample)
        return cls(
            [_read_sequence(sequence, i) for i, sequence in enumerate(read.sequences)],
            prompt_cache_hit_tokens=read.prompt_cache_hit_tokens,
            _prompt_logprobs_list=read.prompt_logprobs,
            _topk_prompt_logprobs_list=read.topk_prompt_logprobs,
        )


class _JsonSequence(msgspec.Struct):
    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float | None] | None = None
    topk_logprobs: list[list[tuple[int, float]] | None] | None = None
    sequence_id: str = ""


class _JsonSample(msgspec.Struct):
    sequences: list[Any]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
    prompt_cache_hit_tokens: int = 0


class CreateSamplingSessionRequest(Message, frozen=True, kw_only=True):
    session_id: Id
    sampling_session_seq_id: SeqId
    base_model: Name | None = NOT_GIVEN
    model_path: Path | None = NOT_GIVEN
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(Message, frozen=True, kw_only=True):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionRequest(Message, frozen=True, kw_only=True):
    sampling_session_id: Id
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(Message, frozen=True, kw_only=True):
    """A number that no other client of the sampling session has; the first client has 0."""

    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class GetSamplerResponse(Message, frozen=True, kw_only=True):
    sampler_id: str
    base_model: str
    model_path: str | None = NOT_GIVEN


def _read_sequence(value: Any, index: int) -> SampledSequence:
    try:
        return SampledSequence.from_builtins(value)
    except (msgspec.ValidationError, InvalidInputError) as error:
        raise InvalidInputError(f"sequences[{index}]: {error}", field=f"sequences[{index}]") from None


def _floats_or_nan(values: Sequence[float | None], where: str) -> Array:
    return float_array([float("nan") if value is None else value for value in values], where)


def _json_floats(values: Array, where: str) -> list[float | None]:
    """Return the values with None for NaN, which JSON writes as null; refuse infinity, which it cannot hold."""
    for index in np.flatnonzero(np.isinf(values)):
        raise InvalidInputError(f"{where}[{index}]: {values[index]} cannot be sent as JSON", field=where)
    return _none_for_nan(values)


def _json_topk(topk: TopkLogprobs, where: str) -> list[TopkRow]:
    if not np.isfinite(topk.logprobs).all():
        raise InvalidInputError(f"{where}: NaN and infinity cannot be sent as JSON", field=where)
    return topk.to_rows()


def _none_for_nan(values: Array) -> list[float | None]:
    listed: list[float | None] = values.tolist()
    return [None if value != value else value for value in listed]

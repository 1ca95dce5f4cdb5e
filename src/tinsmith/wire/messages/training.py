"""Models and training: the messages of `create_model`, `forward_backward`, `optim_step` and uploaded losses.

Datums are in `wire/values/inputs.py`, tensors in `wire/values/tensors.py`, and the losses by name in `wire/losses.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.wire.limits import (
    MAX_DATUMS,
    MAX_GRAPH_NODES,
    MAX_LOSS_INPUTS,
    Id,
    Int64,
    JsonList,
    JsonObject,
    LossName,
    Name,
    ShortText,
)
from tinsmith.wire.losses import LossFnType
from tinsmith.wire.message import (
    NOT_GIVEN,
    Count,
    Message,
    PositiveInt,
    SeqId,
    Tagged,
    describe,
    is_given,
    raw,
    since,
    store,
)
from tinsmith.wire.values.frozen import Frozen
from tinsmith.wire.values.inputs import Datum
from tinsmith.wire.values.tensors import TensorData, tensors_from_builtins

ModelID: TypeAlias = str
LossFnOutput: TypeAlias = dict[str, TensorData]
LossFnConfig: TypeAlias = Annotated[dict[LossName, float | Id], msgspec.Meta(max_length=MAX_LOSS_INPUTS)]

Beta: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]
NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class LoraConfig(Message, frozen=True, kw_only=True):
    """The adapter to train: its rank, the seed of its initial weights, and which parts of the model it adapts."""

    rank: PositiveInt
    seed: Int64 | None = NOT_GIVEN
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamParams(Message, frozen=True, kw_only=True):
    """The parameters of one AdamW step; weight decay is decoupled, and `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: Annotated[float, since("0.7")] = 0.0
    grad_clip_norm: Annotated[float, since("0.7")] = 0.0


class DimuonParams(Tagged, frozen=True, kw_only=True, tag="dimuon"):
    """The parameters of one Dimuon step. Only 0.30 sends the last two fields."""

    learning_rate: NonNegative
    grad_clip_norm: float = 0.0
    beta1: Beta = 0.9
    damping: float | None = NOT_GIVEN
    rank_lr_correction_exponent: float | None = NOT_GIVEN


OptimParams: TypeAlias = AdamParams | DimuonParams


class AdamOptimizerConfig(Tagged, frozen=True, kw_only=True, tag="adamw"):
    """AdamW, the default optimizer."""


class DimuonOptimizerConfig(Tagged, frozen=True, kw_only=True, tag="dimuon"):
    """Dimuon."""

    version: Literal[1] = 1


class OtherOptimizerConfig(Message, frozen=True, kw_only=True):
    """An optimizer that a newer server reports and this version does not know."""

    type: str


OptimizerConfig: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig
ReportedOptimizer: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig | OtherOptimizerConfig


def read_optimizer(message: Message) -> None:
    """Turn the `optimizer_config` of a response into its type; an unknown one must not make the whole response
    unreadable."""
    value = getattr(message, "optimizer_config")  # noqa: B009
    if isinstance(value, Mapping):
        kinds: dict[Any, type[Message]] = {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig}
        kind = kinds.get(value.get("type"), OtherOptimizerConfig)
        try:
            store(message, "optimizer_config", kind.model_validate(dict(value)))
        except InvalidInputError:  # an unknown version of a known optimizer
            if not isinstance(value.get("type"), str):
                raise InvalidInputError("optimizer_config: type is missing", field="optimizer_config") from None
            store(message, "optimizer_config", OtherOptimizerConfig(type=value["type"]))
    elif not isinstance(value, ReportedOptimizer):
        raise InvalidInputError(f"optimizer_config: expected an object, got {type(value).__name__}")


class CreateModelRequest(Message, frozen=True, kw_only=True):
    session_id: Id
    model_seq_id: SeqId
    base_model: Name
    user_metadata: JsonObject | None = NOT_GIVEN
    lora_config: LoraConfig | None = NOT_GIVEN
    optimizer_config: Annotated[OptimizerConfig, since("0.30")] = msgspec.field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Message, frozen=True, kw_only=True):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Message, frozen=True, kw_only=True):
    model_id: Id
    type: Literal["get_info"] = "get_info"


class ModelData(Message, frozen=True, kw_only=True):
    arch: str | None = NOT_GIVEN
    model_name: str | None = NOT_GIVEN
    tokenizer_id: str | None = NOT_GIVEN


class GetInfoResponse(Message, frozen=True, kw_only=True):
    model_data: ModelData
    model_id: ModelID
    type: Literal["get_info"] | None = NOT_GIVEN
    optimizer_config: Annotated[Any, since("0.30")] = msgspec.field(default_factory=AdamOptimizerConfig)
    is_lora: bool | None = NOT_GIVEN
    lora_rank: int | None = NOT_GIVEN
    model_name: str | None = NOT_GIVEN

    def __post_init__(self) -> None:
        read_optimizer(self)


class ForwardBackwardInput(Message, frozen=True, kw_only=True):
    data: Annotated[list[Datum], msgspec.Meta(max_length=MAX_DATUMS)]
    loss_fn: LossFnType
    loss_fn_config: LossFnConfig | None = NOT_GIVEN


class ForwardBackwardRequest(Message, frozen=True, kw_only=True):
    """A pass: JSON up to release 0.24, protobuf from 0.25 on; `forward_only` exists only in protobuf."""

    forward_backward_input: ForwardBackwardInput
    model_id: Id
    seq_id: SeqId | None = NOT_GIVEN
    forward_only: Annotated[bool | None, since("0.23")] = NOT_GIVEN


class ForwardRequest(Message, frozen=True, kw_only=True):
    """A forward pass, as releases up to 0.24 request it."""

    forward_input: ForwardBackwardInput
    model_id: Id
    seq_id: SeqId | None = NOT_GIVEN


class ForwardBackwardOutput(Frozen):
    """The result of a pass: per datum the tensors that the loss returns, and metrics named `name:reduction`."""

    __slots__ = ("loss_fn_output_type", "loss_fn_outputs", "metrics")
    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float]

    def __init__(
        self, loss_fn_output_type: str, loss_fn_outputs: list[LossFnOutput], metrics: dict[str, float] | None = None
    ) -> None:
        self._init(
            loss_fn_output_type=loss_fn_output_type,
            loss_fn_outputs=loss_fn_outputs,
            metrics={} if metrics is None else metrics,
        )

    def to_builtins(self) -> dict[str, Any]:
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise InvalidInputError(
                    f"metrics[{name!r}]: {value} cannot be sent as JSON", field=f"metrics[{name!r}]"
                )
        return {
            "loss_fn_output_type": self.loss_fn_output_type,
            "loss_fn_outputs": [
                {name: tensor.to_builtins() for name, tensor in output.items()} for output in self.loss_fn_outputs
            ],
            "metrics": self.metrics,
        }

    @classmethod
    def from_builtins(cls, value: Any) -> ForwardBackwardOutput:
        read = msgspec.convert(value, _JsonOutput)
        outputs = [
            tensors_from_builtins(output, f"loss_fn_outputs[{i}]") for i, output in enumerate(read.loss_fn_outputs)
        ]
        return cls(read.loss_fn_output_type, outputs, _checked_metrics(read.metrics))


class _JsonOutput(msgspec.Struct):
    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, Any]]
    metrics: dict[str, Any] = {}


def _checked_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            where = f"metrics[{name!r}]"
            raise InvalidInputError(f"{where}: expected a number, got {type(value).__name__}", field=where)
    return metrics


class OptimStepRequest(Message, frozen=True, kw_only=True):
    """An optimizer step. `adam_params` holds AdamW's parameters, `optimizer_params` those of others.

    `optim_params` is accepted as another name for either, and never sent.
    """

    model_id: Id
    seq_id: SeqId | None = NOT_GIVEN
    type: Literal["optim_step"] = "optim_step"
    adam_params: AdamParams | None = NOT_GIVEN
    optimizer_params: Annotated[DimuonParams | None, since("0.30")] = NOT_GIVEN
    optim_params: Annotated[Any, since("0.30")] = NOT_GIVEN

    def __post_init__(self) -> None:
        given = raw(self, "optim_params")
        if given is not NOT_GIVEN and given is not None:
            is_tagged = isinstance(given, DimuonParams) or (isinstance(given, Mapping) and "type" in given)
            name, kind = ("optimizer_params", DimuonParams) if is_tagged else ("adam_params", AdamParams)
            try:
                store(self, name, msgspec.convert(given, kind))
            except msgspec.ValidationError as error:
                raise InvalidInputError(f"optim_params: {describe(error)}", field="optim_params") from None
        store(self, "optim_params", NOT_GIVEN)
        if (self.adam_params is None) == (self.optimizer_params is None):
            raise InvalidInputError("an optimizer step needs exactly one of adam_params or optimizer_params")
        for name in ("adam_params", "optimizer_params"):
            if is_given(self, name) and getattr(self, name) is None:
                store(self, name, NOT_GIVEN)

    def _read_optim_params(self) -> OptimParams | None:
        """Return the parameters of the step, of whichever optimizer."""
        return self.adam_params if self.adam_params is not None else self.optimizer_params


class OptimStepResponse(Message, frozen=True, kw_only=True):
    metrics: dict[str, float] | None = NOT_GIVEN


class UnloadModelRequest(Message, frozen=True, kw_only=True):
    model_id: Id
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Message, frozen=True, kw_only=True):
    model_id: ModelID
    type: Literal["unload_model"] | None = NOT_GIVEN


CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Message, frozen=True, kw_only=True):
    """A tensor that an uploaded loss reads, and its number of dimensions."""

    name: LossName
    rank: CustomLossInputRank


class CustomLossNode(Message, frozen=True, kw_only=True):
    """One node of an uploaded loss, in the form of torch.fx."""

    op: CustomLossNodeOp
    name: ShortText
    target: ShortText
    args: JsonList = []
    kwargs: JsonObject = {}


class CustomLossGraph(Message, frozen=True, kw_only=True):
    nodes: Annotated[list[CustomLossNode], msgspec.Meta(max_length=MAX_GRAPH_NODES)]
    format: Literal[1] = 1


class CreateCustomLossRequest(Message, frozen=True, kw_only=True):
    session_id: Id
    custom_loss_seq_id: Count
    name: Name
    inputs: Annotated[list[CustomLossInput], msgspec.Meta(max_length=MAX_LOSS_INPUTS)]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Message, frozen=True, kw_only=True):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"

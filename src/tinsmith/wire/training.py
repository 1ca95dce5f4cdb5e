"""Models and training: what `create_model`, `forward_backward` and `optim_step` carry.

Losses are named here and computed by the engine; datums are in `inputs`, tensors in `tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.wire.frozen import Frozen
from tinsmith.wire.inputs import Datum
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
from tinsmith.wire.tensors import TensorData, tensors_from_builtins

ModelID: TypeAlias = str
LossFnType: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]
LossFnOutput: TypeAlias = dict[str, TensorData]
LossFnConfig: TypeAlias = dict[str, float | str]

Beta: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1)]
NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class LoraConfig(Message, frozen=True, kw_only=True):
    """The adapter to train: its rank, the seed of its initial weights, and which parts of the model it touches."""

    rank: PositiveInt
    seed: int | None = NOT_GIVEN
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class AdamParams(Message, frozen=True, kw_only=True):
    """One AdamW step: decay is decoupled, `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: Annotated[float, since("0.7")] = 0.0
    grad_clip_norm: Annotated[float, since("0.7")] = 0.0


class DimuonParams(Tagged, frozen=True, kw_only=True, tag="dimuon"):
    """One Dimuon step. The last two fields were sent by 0.30 only."""

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
    """An optimizer that a newer server reports and this release does not know."""

    type: str


OptimizerConfig: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig
ReportedOptimizer: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig | OtherOptimizerConfig


def read_optimizer(message: Message) -> None:
    """Turn an answer's `optimizer_config` into its type; one that we do not know must not cost the whole answer."""
    value = getattr(message, "optimizer_config")  # noqa: B009
    if isinstance(value, Mapping):
        kinds: dict[Any, type[Message]] = {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig}
        kind = kinds.get(value.get("type"), OtherOptimizerConfig)
        try:
            store(message, "optimizer_config", kind.model_validate(dict(value)))
        except InvalidInputError:  # a version of a known optimizer that we do not know
            if not isinstance(value.get("type"), str):
                raise InvalidInputError("optimizer_config: has no type", field="optimizer_config") from None
            store(message, "optimizer_config", OtherOptimizerConfig(type=value["type"]))
    elif not isinstance(value, ReportedOptimizer):
        raise InvalidInputError(f"optimizer_config: expected an object, got {type(value).__name__}")


class CreateModelRequest(Message, frozen=True, kw_only=True):
    session_id: str
    model_seq_id: SeqId
    base_model: str
    user_metadata: dict[str, Any] | None = NOT_GIVEN
    lora_config: LoraConfig | None = NOT_GIVEN
    optimizer_config: Annotated[OptimizerConfig, since("0.30")] = msgspec.field(default_factory=AdamOptimizerConfig)
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Message, frozen=True, kw_only=True):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Message, frozen=True, kw_only=True):
    model_id: ModelID
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
    data: list[Datum]
    loss_fn: LossFnType
    loss_fn_config: LossFnConfig | None = NOT_GIVEN


class ForwardBackwardRequest(Message, frozen=True, kw_only=True):
    """JSON up to 0.24, protobuf since; `forward_only` exists in protobuf alone."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: SeqId | None = NOT_GIVEN
    forward_only: Annotated[bool | None, since("0.23")] = NOT_GIVEN


class ForwardRequest(Message, frozen=True, kw_only=True):
    """A forward pass as releases up to 0.24 ask for it."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: SeqId | None = NOT_GIVEN


class ForwardBackwardOutput(Frozen):
    """Result of a forward or forward_backward: per datum what the loss returns, and metrics named `name:reduction`."""

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
                raise InvalidInputError(f"metrics[{name!r}]: JSON has no {value}", field=f"metrics[{name!r}]")
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
    """Adam's parameters travel as `adam_params`, others' as `optimizer_params`; `optim_params` is read too."""

    model_id: ModelID
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
            raise InvalidInputError("an optimizer step needs adam_params or optimizer_params, exactly one of them")
        for name in ("adam_params", "optimizer_params"):
            if is_given(self, name) and getattr(self, name) is None:
                store(self, name, NOT_GIVEN)

    def _read_optim_params(self) -> OptimParams | None:
        """The step's parameters, whichever optimizer they are for."""
        return self.adam_params if self.adam_params is not None else self.optimizer_params


class OptimStepResponse(Message, frozen=True, kw_only=True):
    metrics: dict[str, float] | None = NOT_GIVEN


class UnloadModelRequest(Message, frozen=True, kw_only=True):
    model_id: ModelID
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

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Message, frozen=True, kw_only=True):
    """One step of an uploaded loss, as torch.fx would describe it."""

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CustomLossGraph(Message, frozen=True, kw_only=True):
    nodes: list[CustomLossNode]
    format: Literal[1] = 1


class CreateCustomLossRequest(Message, frozen=True, kw_only=True):
    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Message, frozen=True, kw_only=True):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"

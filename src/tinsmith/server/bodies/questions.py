"""What the server asks about a body, and what it gets: small values that are sent between processes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError, LimitExceededError, TinkerError, WireError

BodyEncoding: TypeAlias = Literal["json", "protobuf"]


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """An error that is sent between processes."""

    kind: Literal["invalid", "wire", "limit"]
    text: str
    field: str | None = None

    @classmethod
    def of(cls, error: InvalidInputError | WireError) -> Fault:
        if isinstance(error, InvalidInputError):
            return cls("invalid", error.message, error.field)
        return cls("limit" if isinstance(error, LimitExceededError) else "wire", error.message, error.field)

    def error(self) -> TinkerError:
        kinds: dict[str, type[InvalidInputError | WireError]] = {
            "invalid": InvalidInputError,
            "wire": WireError,
            "limit": LimitExceededError,
        }
        return kinds[self.kind](self.text, field=self.field)


class PassQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="pass"):
    """A forward or backward pass: may it run on one of these models?"""

    route: str
    """`forward` or `forward_backward`."""
    encoding: BodyEncoding
    cards: tuple[ModelCard, ...]
    max_datums: int
    max_tokens: int
    custom_inputs: list[dict[str, Any]] | None = None
    """What an uploaded loss declares, once it is known which one is meant."""


class PassReading(msgspec.Struct, frozen=True, kw_only=True, tag="pass"):
    model_id: str
    seq_id: int | None
    is_forward: bool = False
    is_custom: bool = False
    loss_id: str | None = None
    tokens: int = 0
    fault: Fault | None = None
    """Why it cannot be decoded."""
    faults: dict[str, Fault] = {}
    """Why it cannot run on a model, by the model's name."""


class SampleQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    """A sample: may it be drawn from one of these models?"""

    cards: tuple[ModelCard, ...]
    max_samples: int


class SampleReading(msgspec.Struct, frozen=True, kw_only=True, tag="sample"):
    sampling_session_id: str | None
    seq_id: int | None
    num_samples: int
    max_tokens: int | None
    seed: int | None
    length: int = 0
    """Tokens of the prompt."""
    faults: dict[str, Fault] = {}


class LossQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    """An uploaded loss."""


class LossReading(msgspec.Struct, frozen=True, kw_only=True, tag="loss"):
    session_id: str
    number: int
    name: str


class JsonQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    """A result in protobuf: how is it in JSON, for releases that read that?"""

    kind: str


class JsonReading(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    body: bytes


Question: TypeAlias = PassQuestion | SampleQuestion | LossQuestion | JsonQuestion
Reading: TypeAlias = PassReading | SampleReading | LossReading | JsonReading

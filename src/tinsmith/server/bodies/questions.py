"""What the server asks about a body, and what it gets: small values that are sent between processes."""

from __future__ import annotations

from array import array
from typing import Any, Literal, TypeAlias

import msgspec

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import ContextLengthError, InvalidInputError, LimitExceededError, TinkerError, WireError

BodyEncoding: TypeAlias = Literal["json", "protobuf"]


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """An error that is sent between processes."""

    kind: Literal["invalid", "context", "wire", "limit"]
    text: str
    field: str | None = None

    @classmethod
    def of(cls, error: InvalidInputError | WireError) -> Fault:
        if isinstance(error, InvalidInputError):
            return cls("context" if isinstance(error, ContextLengthError) else "invalid", error.message, error.field)
        return cls("limit" if isinstance(error, LimitExceededError) else "wire", error.message, error.field)

    def error(self) -> TinkerError:
        kinds: dict[str, type[InvalidInputError | WireError]] = {
            "invalid": InvalidInputError,
            "context": ContextLengthError,
            "wire": WireError,
            "limit": LimitExceededError,
        }
        return kinds[self.kind](self.text, field=self.field)


class ReaderFailure(msgspec.Struct, frozen=True, tag="failure"):
    """An exception that nobody expected; the process's log has its traceback."""

    name: str


class PassQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="pass"):
    """A forward or backward pass, to be checked against each of these models."""

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
    """A sample request, to be checked against each of these models."""

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
    """A protobuf result to convert to JSON, for releases that read JSON."""

    kind: str


class JsonReading(msgspec.Struct, frozen=True, kw_only=True, tag="json"):
    body: bytes


class HeadQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """A request of another service's client: which model does it name? Its tokenizer is needed to read the rest."""


class HeadReading(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    model: str


class PromptQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """A request of another service's client: which samples does it ask for?"""

    kind: Literal["completions", "chat", "messages"]
    card: ModelCard
    max_samples: int
    chat_template: str | None = None
    """A file with the template to use instead of the model's own."""


class PromptSample(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as a sample of the protocol: its body, what the server must know of it, and its tokens if they are
    echoed."""

    body: bytes
    reading: SampleReading
    packed: bytes = b""
    """The tokens as 64-bit integers: a list of a million would take the loop 20 ms to decode."""

    @property
    def tokens(self) -> list[int]:
        return array("q", self.packed).tolist()


class PromptReading(msgspec.Struct, frozen=True, kw_only=True, tag="prompt"):
    """The samples to draw, one for each prompt, and the form of the answer."""

    samples: list[PromptSample]
    n: int
    is_stream: bool = False
    has_usage: bool = False
    """Whether a stream ends with the usage."""
    echo: bool = False
    logprobs: int | None = None
    """How many likely tokens are listed for each position; None: logprobs are not wanted."""
    stops: list[str] = []
    """Strings that end a sample, and are cut from its text."""
    thinking: Literal["none", "marked", "begun"] = "none"
    """Whether the model thinks before it answers: never, between marks, or from its first token on."""
    tool_form: Literal["none", "hermes", "llama", "mistral", "forced"] = "none"
    """How the model writes calls of tools; `forced`: the whole answer is the JSON of a call."""
    is_one_call: bool = False
    """Whether an answer has one call at most."""


class CountQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """A conversation of an Anthropic client: how many tokens does it have?"""

    card: ModelCard
    chat_template: str | None = None
    """A file with the template to use instead of the model's own."""


class CountReading(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    length: int


class VocabularyQuestion(msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary"):
    """The bytes of a tokenizer's tokens, from which the server makes text."""

    directory: str


class VocabularyReading(msgspec.Struct, frozen=True, kw_only=True, tag="vocabulary"):
    pieces: bytes
    """The bytes of all tokens, one after another."""
    ends: bytes
    """Where each ends, as 32-bit numbers."""
    special: list[int]
    """Tokens that are not text, such as the end of a sequence."""


Question: TypeAlias = (
    PassQuestion
    | SampleQuestion
    | LossQuestion
    | JsonQuestion
    | HeadQuestion
    | PromptQuestion
    | CountQuestion
    | VocabularyQuestion
)
Reading: TypeAlias = (
    PassReading
    | SampleReading
    | LossReading
    | JsonReading
    | HeadReading
    | PromptReading
    | CountReading
    | VocabularyReading
)

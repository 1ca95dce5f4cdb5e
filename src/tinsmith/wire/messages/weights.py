"""Saving, loading, exporting and copying weights, and the `tinker://` paths that name them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.wire.limits import Credential, Id, JsonObject, Labels, Name, Path
from tinsmith.wire.message import NOT_GIVEN, Count, Message, SeqId, since
from tinsmith.wire.messages.training import AdamOptimizerConfig, OptimizerConfig, read_optimizer

CheckpointType: TypeAlias = Literal["training", "sampler", "external"]

HOSTED_CONSOLE = "https://tinker.thinkingmachines.ai"
"""Where the hosted service shows sessions, runs and checkpoints."""
PATH_PREFIX = "tinker://"
KINDS: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
"""The middle part of a path, and the checkpoint type that it means."""


class ParsedCheckpointTinkerPath(Message, frozen=True, kw_only=True):
    """The parts of `tinker://<training run>/<kind>/<name>`; `checkpoint_id` is `<kind>/<name>`."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> ParsedCheckpointTinkerPath:
        if not isinstance(tinker_path, str) or not tinker_path.startswith(PATH_PREFIX):
            raise _bad_path(tinker_path, f"it must start with {PATH_PREFIX}")
        parts = tinker_path.removeprefix(PATH_PREFIX).split("/")
        if len(parts) != 3 or not all(parts):
            raise _bad_path(tinker_path, f"it must be {PATH_PREFIX}<training run>/<kind>/<name>")
        run, kind, name = parts
        if kind not in KINDS:
            raise _bad_path(tinker_path, f"the kind {kind!r} is unknown (allowed: {', '.join(KINDS)})")
        return cls(
            tinker_path=tinker_path, training_run_id=run, checkpoint_type=KINDS[kind], checkpoint_id=f"{kind}/{name}"
        )


def tinker_path(training_run_id: str, kind: str, name: str) -> str:
    """Return the path of a checkpoint; refuse parts that would not parse back."""
    path = f"{PATH_PREFIX}{training_run_id}/{kind}/{name}"
    return ParsedCheckpointTinkerPath.from_tinker_path(path).tinker_path


def _bad_path(path: Any, reason: str) -> InvalidInputError:
    return InvalidInputError(f"Invalid tinker path {path!r}: {reason}", field="tinker_path")


class SaveWeightsRequest(Message, frozen=True, kw_only=True):
    model_id: Id
    path: Path | None = NOT_GIVEN
    seq_id: SeqId | None = NOT_GIVEN
    ttl_seconds: Annotated[Count | None, since("0.9")] = NOT_GIVEN
    overwrite: Annotated[bool, since("0.20")] = False
    user_metadata: Annotated[Labels | None, since("0.28")] = NOT_GIVEN
    type: Literal["save_weights"] = "save_weights"


class _Saved(Message, frozen=True, kw_only=True, dict=True):
    """A response that names a checkpoint; `with_console` adds the address of the console."""

    path: str

    def get_console_url(self) -> str:
        """Return the page of this checkpoint on the console of its server, or on the hosted one if that is unknown."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(self.path)
        place = f"{quote(parsed.training_run_id, safe='')}/{quote(parsed.checkpoint_id, safe='')}"
        return f"{_console_of(self)}/checkpoints/{place}"

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), dict(vars(self))


Saved = TypeVar("Saved", bound=_Saved)


def with_console(answer: Saved, console: str) -> Saved:
    """Attach the address of the server's console; it is not sent, and `==` ignores it."""
    vars(answer)["console"] = console
    return answer


def _console_of(answer: _Saved) -> str:
    console: str = vars(answer).get("console", HOSTED_CONSOLE)
    return console


class SaveWeightsResponse(_Saved, frozen=True, kw_only=True):
    type: Literal["save_weights"] | None = NOT_GIVEN


class LoadWeightsRequest(Message, frozen=True, kw_only=True):
    """Loads weights into a model (`model_id`, `seq_id`), or into a new one (`session_id`, `model_seq_id`)."""

    path: Path
    optimizer: Annotated[bool, since("0.6")] = False
    model_id: Id | None = NOT_GIVEN
    seq_id: SeqId | None = NOT_GIVEN
    session_id: Annotated[Id | None, since("0.25")] = NOT_GIVEN
    model_seq_id: Annotated[SeqId | None, since("0.25")] = NOT_GIVEN
    base_model: Annotated[Name | None, since("0.25")] = NOT_GIVEN
    user_metadata: Annotated[JsonObject | None, since("0.25")] = NOT_GIVEN
    optimizer_config: Annotated[OptimizerConfig | None, since("0.30")] = NOT_GIVEN
    weights_access_token: Annotated[Credential | None, since("0.18")] = NOT_GIVEN
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Message, frozen=True, kw_only=True):
    path: str | None = NOT_GIVEN
    model_id: str | None = NOT_GIVEN
    type: Literal["load_weights"] | None = NOT_GIVEN


class SaveWeightsForSamplerRequest(Message, frozen=True, kw_only=True):
    """Saves a lasting checkpoint (`path`), or a sampler for the life of its session (`sampling_session_seq_id`)."""

    model_id: Id
    path: Path | None = NOT_GIVEN
    sampling_session_seq_id: SeqId | None = NOT_GIVEN
    seq_id: SeqId | None = NOT_GIVEN
    ttl_seconds: Annotated[Count | None, since("0.9")] = NOT_GIVEN
    user_metadata: Annotated[Labels | None, since("0.28")] = NOT_GIVEN
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponseInternal(Message, frozen=True, kw_only=True):
    """The server's response; which of the two fields is set depends on the request."""

    path: str | None = NOT_GIVEN
    sampling_session_id: str | None = NOT_GIVEN
    type: Literal["save_weights_for_sampler"] | None = NOT_GIVEN


class SaveWeightsForSamplerResponse(_Saved, frozen=True, kw_only=True):
    """The result that the client returns to the user."""

    type: Literal["save_weights_for_sampler"] | None = NOT_GIVEN

    def get_playground_url(self) -> str:
        """Return the page to try these weights on, of the same console as `get_console_url`."""
        return f"{_console_of(self)}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsExternalRequest(Message, frozen=True, kw_only=True):
    model_id: Id
    path: Path
    seq_id: SeqId | None = NOT_GIVEN
    ttl_seconds: Count | None = NOT_GIVEN
    age_encryption_recipients: Annotated[Annotated[list[Id], msgspec.Meta(max_length=10)] | None, since("0.33")] = (
        NOT_GIVEN
    )
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Message, frozen=True, kw_only=True):
    """The server's response."""

    path: str | None = NOT_GIVEN
    size_bytes: int | None = NOT_GIVEN
    type: Literal["save_weights_external"] | None = NOT_GIVEN


class SaveWeightsExternalResponse(Message, frozen=True, kw_only=True):
    """The result that the client returns to the user."""

    path: str
    type: Literal["save_weights_external"] | None = NOT_GIVEN


class WeightsInfoRequest(Message, frozen=True, kw_only=True):
    tinker_path: Path


class WeightsInfoResponse(Message, frozen=True, kw_only=True):
    base_model: str
    is_lora: bool
    optimizer_config: Annotated[Any, since("0.30")] = msgspec.field(default_factory=AdamOptimizerConfig)
    lora_rank: int | None = NOT_GIVEN
    train_unembed: Annotated[bool | None, since("0.8")] = NOT_GIVEN
    train_mlp: Annotated[bool | None, since("0.8")] = NOT_GIVEN
    train_attn: Annotated[bool | None, since("0.8")] = NOT_GIVEN

    def __post_init__(self) -> None:
        read_optimizer(self)


class CopyWeightsRequest(Message, frozen=True, kw_only=True):
    """Copies into a project, or (0.27 to 0.30) into a session; since 0.31 the access token is a header."""

    source_path: Path
    destination_project_id: Annotated[Id | None, since("0.31")] = NOT_GIVEN
    session_id: Id | None = NOT_GIVEN
    model_seq_id: SeqId | None = NOT_GIVEN
    ttl_seconds: Count | None = NOT_GIVEN
    weights_access_token: Credential | None = NOT_GIVEN


class CopyWeightsResponse(Message, frozen=True, kw_only=True):
    tinker_path: str


class ExternalWeightsUrlsResponse(Message, frozen=True, kw_only=True):
    """Signed URLs of the files of an export, by relative path."""

    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(Message, frozen=True, kw_only=True):
    """The URL from which releases up to 0.35 download a checkpoint as one archive."""

    url: str
    expires: datetime

"""The seam between the server and the engine: jobs go in, results come out.

A backend is a deterministic machine with volatile state. It runs the jobs of one model in the order in which they were
submitted, runs samples in any order, and may lose everything it holds for a base model at any time; it then increments
that base model's epoch and fails the unfinished jobs with `BackendLostError`. Storing, ordering, retrying and
journalling are the server's work. So a backend needs no database, knows nothing of HTTP, keys or sequence numbers, and
every backend passes the same contract suite (tests/contract/test_backends.py).

Bodies are the bytes that the client sent (decompressed), and results are the bytes that the client receives: what was
journalled is what is computed, and the digest of a result is the digest of what was delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import msgspec

from tinsmith.errors import TinkerError

Category: TypeAlias = Literal["user", "server", "unknown"]
Encoding: TypeAlias = Literal["json", "protobuf"]
State: TypeAlias = Literal["starting", "ready", "restarting", "failed"]


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The complete description of a new adapter; the seed has already been drawn."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """One unit of work. The scheduler shares the device fairly between tenants."""

    job_id: str
    tenant: str
    base_model: str


class CreateModel(Job, frozen=True, kw_only=True, tag="create_model"):
    """Create an adapter: from the checkpoint in `directory` if one is given, with its optimizer state if `optimizer`.

    The result is a JSON `Created`.
    """

    model_id: str
    lora: LoraSpec
    directory: str | None = None
    optimizer: bool = False


class ForwardBackward(Job, frozen=True, kw_only=True, tag="forward_backward"):
    """A wire ForwardBackwardRequest (ForwardRequest if `is_forward`); returns a protobuf ForwardBackwardOutput."""

    model_id: str
    body: bytes
    encoding: Encoding
    is_forward: bool = False
    custom_loss: bytes | None = None
    """The CreateCustomLossRequest that the request's `loss_id` names, as JSON."""
    max_device_s: float | None = None
    """Device seconds after which the job fails and changes nothing; None: no limit, as in a replay."""
    max_loss_device_s: float | None = None
    """The same, for the part that an uploaded loss computes."""


class OptimStep(Job, frozen=True, kw_only=True, tag="optim_step"):
    """A wire OptimStepRequest; the result is a JSON OptimStepResponse."""

    model_id: str
    body: bytes


class SaveState(Job, frozen=True, kw_only=True, tag="save_state"):
    """Write the model atomically to `directory`, which must not exist; the result is a JSON `SavedFiles`."""

    model_id: str
    directory: str
    optimizer: bool
    beside: bool = False
    """Whether the model's next jobs may run, and return their results, before the files are written."""


class LoadState(Job, frozen=True, kw_only=True, tag="load_state"):
    """Replace the model's weights with those in `directory`; the optimizer state too, or else reset it."""

    model_id: str
    directory: str
    optimizer: bool


class Unload(Job, frozen=True, kw_only=True, tag="unload"):
    """Forget a model."""

    model_id: str


class Sample(Job, frozen=True, kw_only=True, tag="sample"):
    """A wire SampleRequest as JSON, for the base model (no directory) or a saved adapter.

    The result is a protobuf SampleResponse. The seed is fixed when the request is accepted, so running the job again
    gives the same tokens.
    """

    body: bytes
    seed: int
    directory: str | None = None
    adapter_key: str | None = None
    """Identifies the frozen weights in `directory`; equal keys mean equal weights."""


AnyJob: TypeAlias = CreateModel | ForwardBackward | OptimStep | SaveState | LoadState | Unload | Sample


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `CreateModel`. Engines with equal fingerprints compute equal bits; an empty one is unknown."""

    fingerprint: dict[str, str] = {}


class SavedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a save wrote."""

    size_bytes: int
    digest: str


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens that a job used, by kind."""

    training: int = 0
    prefill: int = 0
    prefill_cached: int = 0
    sampled: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished job: the bytes of its result, the tokens it used, and the device time it took."""

    body: bytes = b"{}"
    encoding: Encoding = "json"
    usage: Usage = Usage()
    device_s: float = 0.0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the server needs to know about a base model to validate requests for it."""

    name: str
    vocab_size: int
    max_context_length: int
    arch: str = "unknown"
    trainable: bool = True
    sampleable: bool = True
    tokenizer_id: str | None = None
    tokenizer_directory: str | None = None
    """Where `tokenizer.json` and its companions are, for clients to download; None: not available."""
    lora_alpha: float = 32.0


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """A job's place in the queue: how many jobs are ahead of it, and a sentence for its owner on why it waits."""

    ahead: int
    reason: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a backend, with the reason where it is not ready."""

    state: State
    reason: str = ""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a streamed sample."""

    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"] | None = None
    topk_tokens: tuple[int, ...] = ()
    """The most likely tokens at each position, one position after another; none unless the request asks for them."""
    topk_logprobs: tuple[float, ...] = ()


class JobFailedError(TinkerError):
    """The job failed and the model's state is unchanged. The message says why, and what to change."""

    def __init__(self, message: str, category: Category = "server") -> None:
        super().__init__(message)
        self.category = category


class EngineDownError(JobFailedError):
    """The engine cannot start; the message has the reason. The job did not start and can be submitted again later."""


class JobCancelledError(TinkerError):
    """The job was cancelled before it finished."""


class BackendLostError(TinkerError):
    """The backend lost its state before the job finished; rebuild the state, then submit the job again."""


OnTokens: TypeAlias = Callable[[TokenEvent], None]


class Backend(Protocol):
    """Whatever computes the jobs. Called on the server's event loop only."""

    def epoch_of(self, base_model: str) -> int:
        """Return how often this base model's state was lost, plus one. A model created in another epoch is gone."""

    @property
    def status(self) -> Status: ...

    async def open(self) -> None:
        """Start, and return when jobs may be submitted. Models may still be loading."""

    async def close(self, grace_s: float) -> None:
        """Stop. Running jobs may finish within the grace time; the others fail with BackendLostError."""

    def cards(self) -> Sequence[ModelCard]:
        """Return the base models that are served, whether loaded or not."""

    def submit(self, job: AnyJob, on_tokens: OnTokens | None = None) -> asyncio.Future[Done]:
        """Queue a job. The future returns Done, or raises JobFailedError, JobCancelledError or BackendLostError."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job; its future raises JobCancelledError. Unknown and finished ids are ignored.

        A sample stops at once. A running pass stops at its next pause and adds nothing to the gradients. Any other
        running job finishes, as does a pass that ends before its next pause, and its future returns the result: a
        model's state is never in doubt.
        """

    def position(self, job_id: str) -> Position:
        """Return a submitted job's place in the queue."""


def encode_job(job: AnyJob) -> bytes:
    """Return a job as bytes, for a pipe or the journal."""
    return msgspec.msgpack.encode(job)


_JOB_DECODER: msgspec.msgpack.Decoder[AnyJob] = msgspec.msgpack.Decoder(AnyJob)


def decode_job(data: bytes) -> AnyJob:
    return _JOB_DECODER.decode(data)

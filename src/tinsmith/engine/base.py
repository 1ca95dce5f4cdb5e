"""The seam between the server and what computes: jobs go in, results come out.

A backend is a deterministic machine with volatile state. It executes jobs of one model in the order in which they were
submitted, samples in any order, and may lose everything it holds of a base model at any moment; it then counts up that
base model's epoch and fails what was under way with `BackendLostError`. Keeping, ordering, repeating and journalling
are the server's work, so a backend has no database and every backend passes one contract suite
(tests/contract/test_backends.py).

Bodies are the bytes that the client sent (decompressed), results the bytes that a client may be given: what was
journalled is what is computed, and a digest of the result is a digest of what was delivered.

Does not know: HTTP, keys, sequence numbers, torch.
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
    """The adapter of a model, with nothing left open: the seed has been drawn."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind"):
    """One unit of work. `tenant` is who shares fairly with whom."""

    job_id: str
    tenant: str
    base_model: str


class CreateModel(Job, frozen=True, kw_only=True, tag="create_model"):
    """Make an adapter; from the checkpoint in `directory` when one is given, with its optimizer state if asked.

    The result is a JSON `Created`.
    """

    model_id: str
    lora: LoraSpec
    directory: str | None = None
    optimizer: bool = False


class ForwardBackward(Job, frozen=True, kw_only=True, tag="forward_backward"):
    """A wire ForwardBackwardRequest, or ForwardRequest where `is_forward`; gives a protobuf ForwardBackwardOutput."""

    model_id: str
    body: bytes
    encoding: Encoding
    is_forward: bool = False
    custom_loss: bytes | None = None
    """The CreateCustomLossRequest that the request's `loss_id` names, as JSON."""


class OptimStep(Job, frozen=True, kw_only=True, tag="optim_step"):
    """A wire OptimStepRequest; the result is a JSON OptimStepResponse."""

    model_id: str
    body: bytes


class SaveState(Job, frozen=True, kw_only=True, tag="save_state"):
    """Write the model to `directory` (which must not exist), atomically; the result is a JSON `SavedFiles`."""

    model_id: str
    directory: str
    optimizer: bool
    beside: bool = False
    """Whether the model's next jobs may be done, and their results told, before it is written."""


class LoadState(Job, frozen=True, kw_only=True, tag="load_state"):
    """Replace the model's weights by those in `directory`; with `optimizer` its state too, else a fresh one."""

    model_id: str
    directory: str
    optimizer: bool


class Unload(Job, frozen=True, kw_only=True, tag="unload"):
    """Forget a model."""

    model_id: str


class Sample(Job, frozen=True, kw_only=True, tag="sample"):
    """A wire SampleRequest as JSON on the base (no directory) or on a saved adapter; gives a protobuf SampleResponse.

    The seed is fixed at acceptance, so that the same job gives the same tokens again.
    """

    body: bytes
    seed: int
    directory: str | None = None
    adapter_key: str | None = None
    """Says which frozen weights `directory` holds; equal keys are equal weights."""


AnyJob: TypeAlias = CreateModel | ForwardBackward | OptimStep | SaveState | LoadState | Unload | Sample


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """A model was made. Engines with equal fingerprints give equal bits; an empty one says nothing."""

    fingerprint: dict[str, str] = {}


class SavedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a save wrote."""

    size_bytes: int
    digest: str


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens that a job cost, by how they are counted."""

    training: int = 0
    prefill: int = 0
    prefill_cached: int = 0
    sampled: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A finished job: the result's bytes, what it cost, and the seconds of device time it took."""

    body: bytes = b"{}"
    encoding: Encoding = "json"
    usage: Usage = Usage()
    device_s: float = 0.0


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What the server must know of a base model to judge requests for it."""

    name: str
    vocab_size: int
    max_context_length: int
    arch: str = "unknown"
    trainable: bool = True
    sampleable: bool = True
    tokenizer_id: str | None = None
    tokenizer_directory: str | None = None
    """Where `tokenizer.json` and its companions are, for clients to fetch; None: this server has none to give."""
    lora_alpha: float = 32.0


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job stands: how many are ahead of it, and why it waits, in words for its owner."""

    ahead: int
    reason: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a backend, with the reason where it is not ready."""

    state: State
    reason: str = ""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a sample just gained, for streams."""

    sample: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"] | None = None


class JobFailedError(TinkerError):
    """The job cannot be done; the model's state is as it was before. The text says why and what to change."""

    def __init__(self, message: str, category: Category = "server") -> None:
        super().__init__(message)
        self.category = category


class EngineDownError(JobFailedError):
    """The engine cannot start, and says why. The job was not begun; it can be submitted again later."""


class JobCancelledError(TinkerError):
    """The job was cancelled before it finished."""


class BackendLostError(TinkerError):
    """The backend lost its state while the job was under way; submit it again when the state has been rebuilt."""


OnTokens: TypeAlias = Callable[[TokenEvent], None]


class Backend(Protocol):
    """What computes. Called on the server's event loop only."""

    def epoch_of(self, base_model: str) -> int:
        """Counts how often the state of this base model's models was lost; a model made in another epoch is gone."""

    @property
    def status(self) -> Status: ...

    async def open(self) -> None:
        """Start; returns when jobs may be submitted. Loading models may go on behind it."""

    async def close(self, grace_s: float) -> None:
        """Stop: what runs may finish within the grace time, the rest ends with BackendLostError."""

    def cards(self) -> Sequence[ModelCard]:
        """The base models that are served, loaded or not."""

    def submit(self, job: AnyJob, on_tokens: OnTokens | None = None) -> asyncio.Future[Done]:
        """Queue a job. The future ends with Done, JobFailedError, JobCancelledError or BackendLostError."""

    def cancel(self, job_id: str) -> None:
        """Drop a job; its future ends with JobCancelledError. Unknown and finished ids are ignored.

        A sample ends at once. Any other job that has begun is finished and its future ends with its result: a model's
        state is never in doubt.
        """

    def position(self, job_id: str) -> Position:
        """Where a submitted job stands."""


def encode_job(job: AnyJob) -> bytes:
    """A job as bytes, for a pipe or a journal."""
    return msgspec.msgpack.encode(job)


_JOB_DECODER: msgspec.msgpack.Decoder[AnyJob] = msgspec.msgpack.Decoder(AnyJob)


def decode_job(data: bytes) -> AnyJob:
    return _JOB_DECODER.decode(data)

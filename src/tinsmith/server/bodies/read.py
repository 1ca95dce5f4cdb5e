"""What the server needs to know of a large body: its numbers, what it asks for, and what is wrong with it.

Pure functions from bytes to small values; `reader_pool` runs them in another process.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError, LimitExceededError, WireError
from tinsmith.server.bodies.questions import (
    CountQuestion,
    Fault,
    HeadQuestion,
    JsonQuestion,
    JsonReading,
    LossQuestion,
    LossReading,
    PassQuestion,
    PassReading,
    PromptQuestion,
    Question,
    Reading,
    SampleQuestion,
    SampleReading,
)
from tinsmith.server.bodies.read_anthropic import read_count, read_messages
from tinsmith.server.bodies.read_openai import read_head, read_prompts, read_vocabulary
from tinsmith.wire.codecs import json_codec, proto_outputs, proto_sampling, proto_training, protobuf
from tinsmith.wire.limits import MAX_ID, Id, check_size
from tinsmith.wire.message import SeqId, describe, field_of
from tinsmith.wire.messages import training as wire
from tinsmith.wire.messages.sampling import SampleRequest
from tinsmith.wire.rules.grammar_rules import check_grammar
from tinsmith.wire.rules.loss_rules import check_loss
from tinsmith.wire.rules.sample_rules import check_sample


class NeedsProcessError(Exception):
    """Answering may take long, however small the body is: it holds a grammar to compile, or text to tokenize."""


MAX_CONTAINERS = 1_000_000
"""Lists and objects in one JSON body: each takes two bytes on the wire and many times that in memory."""
MAX_LOOSE_BYTES = 8 * 1024 * 1024
"""Invalid JSON up to this size is parsed a second time by Python, which is slow."""
_NOT_JSON = re.compile(rb"\b(?:NaN|Infinity)\b")


def read(question: Question, body: bytes, *, is_on_loop: bool = False) -> Reading:
    """Answer a question about a body; on the API's loop, raise NeedsProcessError if that may take long."""
    if isinstance(question, PassQuestion):
        return read_pass(question, body)
    if isinstance(question, SampleQuestion):
        return read_sample(question, body, may_compile=not is_on_loop)
    if isinstance(question, LossQuestion):
        return read_loss(body)
    if isinstance(question, JsonQuestion):
        return JsonReading(body=as_json(question.kind, body))
    if isinstance(question, HeadQuestion):
        return read_head(body)
    if is_on_loop:
        raise NeedsProcessError
    if isinstance(question, PromptQuestion):
        check_containers(body)
        return read_messages(question, body) if question.kind == "messages" else read_prompts(question, body)
    if isinstance(question, CountQuestion):
        check_containers(body)
        return read_count(question, body)
    return read_vocabulary(question.directory)


def read_pass(question: PassQuestion, body: bytes) -> PassReading:
    """Read a pass. One that cannot be decoded still has its model and number."""
    model_id, number = read_numbers(body, question.route, is_protobuf=question.encoding == "protobuf")
    try:
        request = _read_pass(question, body)
    except WireError as error:
        explained = explain(error, body) if question.encoding == "json" else error
        return PassReading(model_id=model_id, seq_id=number, fault=Fault.of(explained))
    except InvalidInputError as error:
        return PassReading(model_id=model_id, seq_id=number, fault=Fault.of(error))
    is_forward = isinstance(request, wire.ForwardRequest) or bool(request.forward_only)
    work = request.forward_input if isinstance(request, wire.ForwardRequest) else request.forward_backward_input
    is_custom = work.loss_fn == "custom"
    loss_id = (work.loss_fn_config or {}).get("loss_id")
    faults = {}
    if not is_custom or question.custom_inputs is not None:
        check = _pass_check(question, request, work)
        faults = _faults(question.cards, check)
    return PassReading(
        model_id=model_id,
        seq_id=number,
        is_forward=is_forward,
        is_custom=is_custom,
        loss_id=loss_id if isinstance(loss_id, str) else None,
        tokens=0 if faults else sum(datum.model_input.length for datum in work.data),
        faults=faults,
    )


def _read_pass(question: PassQuestion, body: bytes) -> wire.ForwardBackwardRequest | wire.ForwardRequest:
    request: wire.ForwardBackwardRequest | wire.ForwardRequest
    if question.encoding == "protobuf":
        request = proto_training.decode_request(body, question.max_datums)
    else:
        check_containers(body)
        kinds: dict[str, type[wire.ForwardBackwardRequest | wire.ForwardRequest]] = {
            "forward": wire.ForwardRequest,
            "forward_backward": wire.ForwardBackwardRequest,
        }
        request = json_codec.decode(body, kinds[question.route])
    data = (request.forward_input if isinstance(request, wire.ForwardRequest) else request.forward_backward_input).data
    if len(data) > question.max_datums:
        raise InvalidInputError(
            f"data: {len(data)} datums in one request; the limit is {question.max_datums}", field="data"
        )
    return request


def _pass_check(
    question: PassQuestion,
    request: wire.ForwardBackwardRequest | wire.ForwardRequest,
    work: wire.ForwardBackwardInput,
) -> Callable[[ModelCard], object]:
    inputs = question.custom_inputs

    def check(card: ModelCard) -> None:
        check_loss(
            request,
            vocab_size=card.vocab_size,
            max_context_length=card.max_context_length,
            custom_inputs=[wire.CustomLossInput(**item) for item in inputs] if inputs is not None else None,
        )
        tokens = sum(datum.model_input.length for datum in work.data)
        if tokens > question.max_tokens:
            raise InvalidInputError(
                f"data: {tokens} tokens in one request; the limit is {question.max_tokens}", field="data"
            )

    return check


def _faults(cards: Iterable[ModelCard], check: Callable[[ModelCard], object]) -> dict[str, Fault]:
    faults = {}
    for card in cards:
        try:
            check(card)
        except (InvalidInputError, WireError) as error:
            faults[card.name] = Fault.of(error)
    return faults


def read_sample(question: SampleQuestion, body: bytes, *, may_compile: bool = True) -> SampleReading:
    """Read a sample."""
    check_containers(body)
    request = json_codec.decode(body, SampleRequest)
    if request.num_samples > question.max_samples:
        raise InvalidInputError(
            f"num_samples: {request.num_samples} is more than the limit of {question.max_samples}", field="num_samples"
        )
    output = request.sampling_params.output_format
    if output is not None and not may_compile:
        raise NeedsProcessError

    def check(card: ModelCard) -> None:
        check_sample(request, vocab_size=card.vocab_size, max_context_length=card.max_context_length)
        if output is not None:
            check_grammar(output, card.vocab_size)

    faults = _faults(question.cards, check)
    return SampleReading(
        sampling_session_id=request.sampling_session_id,
        seq_id=request.seq_id,
        num_samples=request.num_samples,
        max_tokens=request.sampling_params.max_tokens,
        seed=request.sampling_params.seed,
        length=request.prompt.length if len(faults) < len(question.cards) else 0,
        faults=faults,
    )


def read_loss(body: bytes) -> LossReading:
    """Read an uploaded loss. The engine runs it through an allow-list; nothing of it is executed here."""
    check_containers(body)
    request = json_codec.decode(body, wire.CreateCustomLossRequest)
    if not request.inputs or request.inputs[0].name != "logprobs":
        raise InvalidInputError("inputs: the first input of a loss must be logprobs", field="inputs")
    if not any(node.op == "output" for node in request.graph.nodes):
        raise InvalidInputError("graph: there is no output node", field="graph")
    return LossReading(session_id=request.session_id, number=request.custom_loss_seq_id, name=request.name)


def as_json(kind: str, body: bytes) -> bytes:
    """Return a protobuf result as JSON, for releases that read JSON."""
    if kind == "sample":
        return json_codec.encode(proto_sampling.decode_response(body))
    return json_codec.encode(proto_outputs.decode_output(body))


def check_containers(body: bytes) -> None:
    """Refuse JSON that is mostly brackets before it is decoded."""
    if len(body) > MAX_CONTAINERS and body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        raise LimitExceededError(f"body: more than {MAX_CONTAINERS} lists and objects in the JSON", field="body")


class _Numbers(msgspec.Struct):
    model_id: Id = ""
    seq_id: SeqId | None = None


def read_numbers(body: bytes, route: str, *, is_protobuf: bool = False) -> tuple[str, int | None]:
    """Return the model and number of a request, even if the rest of it is invalid; number 0 means none."""
    if is_protobuf:
        return _protobuf_numbers(body, route)
    try:
        numbers = msgspec.json.decode(body or b"{}", type=_Numbers)
    except msgspec.ValidationError as error:
        raise WireError(f"{route}: {describe(error)}", field=field_of(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        numbers = _loose_numbers(body, route, error)
    except RecursionError:
        raise WireError(f"{route}: the JSON is nested too deeply") from None
    return numbers.model_id, numbers.seq_id or None


def _protobuf_numbers(body: bytes, route: str) -> tuple[str, int | None]:
    model_id, seq = "", 0
    try:
        for number, kind, value in protobuf.read_fields(memoryview(body), route):
            if number == 1:
                model_id = protobuf.as_text(value, kind, "model_id")
            elif number == 2:
                seq = protobuf.as_int(value, kind, "seq_id", 32)
    except WireError:
        if not model_id or not seq:
            raise
    check_size(len(model_id), MAX_ID, "model_id", "characters")
    return model_id, seq or None


def _loose_numbers(body: bytes, route: str, error: Exception) -> _Numbers:
    """Read the numbers of a body that holds NaN or Infinity, which some clients write and JSON does not have."""
    try:
        return msgspec.convert(_loosely(body), _Numbers)
    except (ValueError, RecursionError):
        raise WireError(f"{route}: {error}") from None


def explain(error: WireError, body: bytes) -> WireError:
    """Say where a NaN or infinite number is, if that is why a body is not valid JSON."""
    if not _NOT_JSON.search(body):
        return error
    try:
        where = _not_finite(_loosely(body))
    except (ValueError, RecursionError):
        return error
    if where is None:
        return error
    text = f"{where}: NaN and infinity are not valid JSON; only finite numbers are allowed"
    return WireError(text, field=where)


def _loosely(body: bytes) -> Any:
    if len(body) > MAX_LOOSE_BYTES:
        raise ValueError("too large to parse again")
    return json.loads(body)


def _not_finite(value: Any, where: str = "") -> str | None:
    """Return the path of the first number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return where
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        items = ((f"{where}.{key}" if where else key, item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    return next((found for place, item in items if (found := _not_finite(item, place)) is not None), None)

"""Limits on requests: the length of every string, list and map, and the depth of every nesting.

They are far above what programs send and far below what would hurt a server. A test walks the types of all requests and
fails if a string or list has no limit. Responses have none: a client trusts its server. How many bytes a body may have
is declared with its route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from tinsmith.errors import InvalidInputError

MAX_CHUNKS = 65_536
"""Chunks of one model input."""
MAX_SPANS = 65_536
"""Provenance spans of one datum."""
MAX_LOSS_INPUTS = 64
"""Tensors of one datum, and settings of one loss."""
MAX_DATUMS = 65_536
"""Datums of one request; a server's settings may allow fewer."""
MAX_GRAPH_NODES = 65_536
"""Nodes of an uploaded loss; the engine allows fewer."""
MAX_NAME = 128
"""Characters of such a tensor's or setting's name."""
MAX_SEQUENCE_ID = 512
"""Characters of the name of a sampled sequence."""
MAX_LOCATION = 4096
"""Characters of an image's address."""
MAX_SAMPLES = 1_000_000
"""Samples of one request; a server's settings may allow fewer."""
MAX_STOPS = 64
MAX_STOP_CHARS = 1000
"""Stop sequences of one request, and characters of each."""
MAX_STOP_BYTES = 4096
"""Bytes of all stop strings together: each is searched for after every token, in a step that other requests share."""
MAX_BIASES = 1024
"""Tokens of one request that may have a bias."""
MAX_GRAMMAR_BYTES = 64 * 1024
"""Of a JSON schema, regular expression or grammar that constrains a sample."""
MAX_DEPTH = 16
MAX_VALUES = 8192
MAX_CHARACTERS = 512 * 1024
"""Of JSON in any form (metadata): how deep lists and objects nest, how many values there are, and how many characters
all strings have together."""

MAX_ID = 512
Id: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ID)]
"""An id that the server or an administrator assigned."""
Path: TypeAlias = Annotated[str, msgspec.Meta(max_length=2048)]
"""`tinker://...`, or the name of a checkpoint."""
Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=1024)]
"""A name that a user chose."""
ShortText: TypeAlias = Annotated[str, msgspec.Meta(max_length=256)]
LossName: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Note: TypeAlias = Annotated[str, msgspec.Meta(max_length=32 * 1024)]
"""A remark for people to read."""
Report: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
"""A report of a program: an error message, a traceback."""
Credential: TypeAlias = Annotated[str, msgspec.Meta(max_length=8192)]
Ids: TypeAlias = Annotated[list[Id], msgspec.Meta(max_length=32_768)]
Tags: TypeAlias = Annotated[list[ShortText], msgspec.Meta(max_length=256)]
Label: TypeAlias = Annotated[str, msgspec.Meta(max_length=16 * 1024)]
Labels: TypeAlias = Annotated[dict[ShortText, Label], msgspec.Meta(max_length=256)]
"""Metadata whose values are strings."""
Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
StopText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_STOP_CHARS)]
Stops: TypeAlias = Annotated[list[StopText | Int64], msgspec.Meta(max_length=MAX_STOPS)]
StopTokens: TypeAlias = Annotated[list[Int64], msgspec.Meta(max_length=MAX_STOPS)]
TokenBiases: TypeAlias = Annotated[dict[Int64, float], msgspec.Meta(max_length=MAX_BIASES)]
GrammarText: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_BYTES)]


def check_json(value: Any, where: str) -> None:
    """Refuse JSON that is nested too deeply, or holds too many values or characters."""
    values = characters = 0
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        values += 1
        if isinstance(item, str):
            characters += len(item)
            continue
        if isinstance(item, Mapping):
            characters += sum(len(key) for key in item if isinstance(key, str))
        elif not isinstance(item, (list, tuple)):
            continue
        if depth == MAX_DEPTH:
            raise _too_much(where, f"is nested more than {MAX_DEPTH} levels deep")
        if values + len(waiting) + len(item) > MAX_VALUES:
            raise _too_much(where, f"has more than {MAX_VALUES} values")
        waiting += [(inner, depth + 1) for inner in (item.values() if isinstance(item, Mapping) else item)]
    if characters > MAX_CHARACTERS:
        raise _too_much(where, f"has more than {MAX_CHARACTERS} characters")


def check_size(size: int, limit: int, where: str, what: str) -> None:
    """Refuse more than `limit` of something."""
    if size > limit:
        raise _too_much(where, f"has {size} {what}; at most {limit} are allowed")


def _too_much(where: str, reason: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: {reason}", field=where)


if TYPE_CHECKING:
    JsonObject: TypeAlias = dict[str, Any]
    JsonList: TypeAlias = list[Any]
else:

    class JsonObject(dict):
        """A JSON object of any form, within the limits above."""

        @classmethod
        def from_builtins(cls, value):
            if not isinstance(value, Mapping):
                raise InvalidInputError(f"expected an object, got {type(value).__name__}")
            check_json(value, "the object")
            return cls(value)

    class JsonList(list):
        """A JSON list of any form, within the limits above."""

        @classmethod
        def from_builtins(cls, value):
            if not isinstance(value, (list, tuple)):
                raise InvalidInputError(f"expected a list, got {type(value).__name__}")
            check_json(value, "the list")
            return cls(value)

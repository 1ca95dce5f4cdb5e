"""Forms with files, `multipart/form-data` as browsers and `curl -F` send them, read by python-multipart.

The body has already been received within the route's limit, so what is bounded here is how much work and how many
objects it can cause. A part is known by its field name alone: file names, content types and the order of the parts are
the sender's and are ignored. Run it in a thread: it takes time in proportion to the body.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tinsmith.errors import InvalidInputError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MEDIA_TYPE = "multipart/form-data"
MAX_PARTS = 16
MAX_HEADERS = 8
MAX_HEADER_BYTES = 1024
"""Of each part: how many headers it may have, and how long each may be."""
MAX_NAME_BYTES = 255
BLOCK_BYTES = 1024 * 1024
"""Bytes that are searched in one call. Python's lock is held meanwhile, so other threads wait for about a
millisecond."""

_BOUNDARY = re.compile(rb"[0-9A-Za-z'()+_,\-./:=? ]{0,69}[0-9A-Za-z'()+_,\-./:=?]")  # RFC 2046, 5.1.1
_ENCODINGS = (b"7bit", b"8bit", b"binary")


def is_form(content_type: str) -> bool:
    """Whether a content-type header announces a form with files."""
    return content_type.partition(";")[0].strip().lower() == MEDIA_TYPE


def read_form(body: bytes, content_type: str) -> dict[str, bytes]:
    """Return the content of each part by its field name, or raise InvalidInputError."""
    boundary = _boundary(content_type)
    count = _count_parts(body, boundary)
    form = _Form()
    parser = MultipartParser(boundary, form.callbacks(), max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES)
    try:
        for start in range(0, len(body), BLOCK_BYTES):
            parser.write(body[start : start + BLOCK_BYTES])
        parser.finalize()
    except FormParserError as error:
        raise _invalid(f"{str(error)[:200]!a}") from None
    if not form.is_complete or len(form.parts) != count:
        raise _invalid("a boundary neither begins nor ends a part, or something follows the closing one")
    return {name: b"".join(pieces) for name, pieces in form.parts.items()}


def _boundary(content_type: str) -> bytes:
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidInputError(
            f"content-type: a {MEDIA_TYPE} body needs a boundary of 1 to 70 of the characters that RFC 2046 allows",
            field="content-type",
        )
    return boundary


def _count_parts(body: bytes, boundary: bytes) -> int:
    """Return how many parts a body has; refuse too many, and a body that does not begin and end with a delimiter.

    The parser takes a Python step for each delimiter that it meets, complete or not, and skips whatever follows the
    last one. Senders choose a boundary that does not occur in their files, so counting delimiters counts parts.
    """
    delimiter = b"--" + boundary
    if not body.startswith(delimiter):
        raise _invalid("it does not begin with the boundary that the content-type header names")
    if not body.endswith((delimiter + b"--", delimiter + b"--\r\n")):
        raise _invalid("it does not end with the closing boundary; it was truncated, or something follows it")
    sought, at, count = b"\r\n" + delimiter, 0, 0
    while at < len(body):
        end = at + BLOCK_BYTES
        found = body.find(sought, at, end + len(sought) - 1)
        if found < 0:
            at = end
            continue
        count += 1
        if count > MAX_PARTS:
            raise _invalid(f"it has more than {MAX_PARTS} parts")
        at = found + len(sought)
    return count


class _Form:
    """What the parser has found so far."""

    def __init__(self) -> None:
        self.parts: dict[str, list[bytes]] = {}
        self.is_complete = False
        self._pieces: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._headers.clear,
            "on_header_begin": self._begin_header,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_content,
            "on_part_data": self._add_content,
            "on_end": self._end,
        }

    def _begin_header(self) -> None:
        self._header_name = self._header_value = b""

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        name = self._header_name.lower()
        if name in self._headers:
            raise _invalid(f"a part has two {name.decode('latin-1')!r} headers")
        self._headers[name] = self._header_value

    def _begin_content(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"")
        if kind != b"form-data" or not 0 < len(name) <= MAX_NAME_BYTES:
            raise _invalid(
                f"each part needs a header `content-disposition: form-data; name=...` with a name of at most "
                f"{MAX_NAME_BYTES} bytes"
            )
        if self._headers.get(b"content-transfer-encoding", b"binary").strip().lower() not in _ENCODINGS:
            raise _invalid("a part has a content-transfer-encoding; send its bytes as they are")
        try:
            field = name.decode()
        except UnicodeDecodeError:
            raise _invalid(f"the name {name[:100]!r} is not UTF-8") from None
        if field in self.parts:
            raise InvalidInputError(f"{field[:100]!r}: the form has two fields of this name", field=field)
        self._pieces = self.parts[field] = []

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _end(self) -> None:
        self.is_complete = True


def _invalid(reason: str) -> InvalidInputError:
    return InvalidInputError(f"body: not a valid {MEDIA_TYPE} form: {reason}", field="body")

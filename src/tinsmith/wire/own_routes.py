"""Endpoints of our own that client and server both know, outside the protocol's table, and what they carry.

A server announces them in the `tinsmith` object of its answer to client/config; a client uses what is announced.
"""

from __future__ import annotations

import msgspec

from tinsmith.wire.futures import FuturesRetrieveRequest
from tinsmith.wire.routes import Route
from tinsmith.wire.sampling import SampleRequest

OWN_PREFIX = "/tinsmith/v1"
MSGPACK_TYPE = "application/msgpack"

SAMPLE_RESULTS = Route(
    name="sample_results", method="POST", path=f"{OWN_PREFIX}/sample_results", request=FuturesRetrieveRequest
)
"""As retrieve_futures, with the results in the answer: one request brings many."""

SAMPLE_STREAM = Route(name="sample_stream", method="POST", path=f"{OWN_PREFIX}/sample_stream", request=SampleRequest)
"""A sample as server-sent events. The same number again is the same sample, from the start or behind `?have=3,0`: so
many tokens of each of its sequences."""
REQUEST_ID_HEADER = "x-tinsmith-request-id"
"""By which a streamed sample can be taken back."""

SAMPLES = Route(name="samples", method="POST", path=f"{OWN_PREFIX}/samples")
"""Many bodies of asample in one request, a msgpack array; each has its own answer."""
MAX_SAMPLES_AT_ONCE = 256


class SubmitAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What asample would have answered to one of the bodies."""

    status: int
    body: bytes
    headers: dict[str, str] = {}


class SampleResult(msgspec.Struct, frozen=True, array_like=True):
    """A finished sample. Without a body it is to be fetched by retrieve_future, since it is large or old."""

    request_id: str
    content_type: str = ""
    body: bytes | None = None


class SampleResults(msgspec.Struct, frozen=True, array_like=True):
    """What has finished since a cursor, and the cursor of the next poll."""

    cursor: int
    results: list[SampleResult]

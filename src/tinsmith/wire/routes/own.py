"""The routes that only tinsmith has, declared like the protocol's, and their messages.

A server announces the ones for clients in the `tinsmith` object of its answer to client/config, and a client uses only
what is announced.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

import msgspec

from tinsmith.wire.limits import Name, Report, ShortText
from tinsmith.wire.message import Count
from tinsmith.wire.messages.futures import FuturesRetrieveRequest
from tinsmith.wire.messages.sampling import SampleRequest
from tinsmith.wire.routes.door import BULK, IDS, LARGE, Door, any_key, everybody, needs
from tinsmith.wire.routes.table import Route

OWN_PREFIX = "/tinsmith/v1"
MSGPACK_TYPE = "application/msgpack"
DOWNLOAD_PREFIX = f"{OWN_PREFIX}/download/"
REQUEST_ID_HEADER = "x-tinsmith-request-id"
"""The header with the request id of a streamed sample, by which it can be cancelled."""
IMPORT_MULTIPART = "import_multipart"
"""Announced by servers that accept imports as multipart/form-data, too."""
MAX_SAMPLES_AT_ONCE = 256
MAX_POINTS = 1000
"""The most points of one page of a run's metrics."""


class TokenizerQuery(msgspec.Struct, frozen=True, kw_only=True):
    model: Name = ""
    """The base model."""


class UsageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A period of whole UTC hours, at most 14 days long, and how usage is grouped."""

    starting_on: datetime
    ending_before: datetime
    by: ShortText = "run"


class RunMetricsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of points after a request's number."""

    after: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)] = -1
    limit: Count = MAX_POINTS


class DeletedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted with a run."""

    training_run_id: str
    checkpoints: int
    size_bytes: int
    """The size of the checkpoints."""


class ImportPartQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a part belongs: the upload, under a name that its client chose, the file in it, and the offset in that."""

    upload: Name
    file: Name
    offset: Annotated[int, msgspec.Meta(ge=-(2**48), le=2**48)]


class SampleStreamQuery(msgspec.Struct, frozen=True, kw_only=True):
    have: Report | None = None
    """How many tokens of each sequence the client already has: `3,0`."""


class DownloadQuery(msgspec.Struct, frozen=True, kw_only=True):
    expires: ShortText = ""
    signature: ShortText = ""


# For operators
HEALTHZ = Route(name="alive", method="GET", path="/healthz", door=everybody("nothing", "memory"))
READYZ = Route(name="readyz", method="GET", path="/readyz", door=everybody("nothing", "memory"))
METRICS = Route(
    name="metrics",
    method="GET",
    path="/metrics",
    door=Door(scopes=frozenset({"admin"}), open_to="machine", owner="nothing", cost="memory"),
)
"""Figures of all organisations together."""
OPENAPI = Route(name="openapi", method="GET", path="/openapi.json", door=everybody("nothing", "memory"))
VERSION = Route(name="version", method="GET", path=f"{OWN_PREFIX}/version", door=everybody("nothing", "memory"))
STATUS = Route(
    name="status", method="GET", path=f"{OWN_PREFIX}/status", door=needs("read", owner="caller", cost="memory")
)

# For clients
TOKENIZER = Route(
    name="tokenizer",
    method="GET",
    path=f"{OWN_PREFIX}/tokenizer",
    query=TokenizerQuery,
    door=any_key("nothing", "files"),
)
QUOTA = Route(name="quota", method="GET", path=f"{OWN_PREFIX}/quota", door=any_key("caller", "memory"))
USAGE = Route(
    name="usage",
    method="GET",
    path=f"{OWN_PREFIX}/usage",
    query=UsageQuery,
    door=needs("read", owner="caller", cost="scan"),
)
RUN_METRICS = Route(
    name="run_metrics",
    method="GET",
    path=f"{OWN_PREFIX}/training_runs/{{training_run_id}}/metrics",
    query=RunMetricsQuery,
    door=needs("read", owner="model", cost="scan"),
)
DELETE_RUN = Route(
    name="delete_run",
    method="DELETE",
    path=f"{OWN_PREFIX}/training_runs/{{training_run_id}}",
    response=DeletedRun,
    door=needs("train", owner="model", cost="files"),
)
IMPORT_WEIGHTS = Route(
    name="import_weights",
    method="POST",
    path=f"{OWN_PREFIX}/import_weights",
    body_encodings=("msgpack", "multipart"),
    door=needs("train", owner="caller", cost="files", body=BULK),
)
IMPORT_PARTS = Route(
    name="import_parts",
    method="POST",
    path=f"{OWN_PREFIX}/import_parts",
    query=ImportPartQuery,
    body_encodings=("bytes", "multipart"),
    door=needs("train", owner="caller", cost="files", body=BULK),
)
SAMPLE_STREAM = Route(
    name="sample_stream",
    method="POST",
    path=f"{OWN_PREFIX}/sample_stream",
    request=SampleRequest,
    query=SampleStreamQuery,
    door=needs("sample", owner="sampler", cost="wait", body=LARGE),
)
"""A sample as server-sent events. The same seq_id again resumes the same sample: from the start, or with `?have=3,0`
after that many tokens of each of its sequences."""
SAMPLES = Route(
    name="samples",
    method="POST",
    path=f"{OWN_PREFIX}/samples",
    body_encodings=("msgpack",),
    door=needs("sample", owner="sampler", cost="work", body=BULK),
)
"""Many asample bodies in one request, as a msgpack array; each has its own answer."""
SAMPLE_RESULTS = Route(
    name="sample_results",
    method="POST",
    path=f"{OWN_PREFIX}/sample_results",
    request=FuturesRetrieveRequest,
    door=needs("sample", owner="sampler", cost="wait", body=IDS),
)
"""Like retrieve_futures, but the results are in the answer: one request returns many."""
DOWNLOAD = Route(
    name="download",
    method="GET",
    path=f"{DOWNLOAD_PREFIX}{{name}}",
    query=DownloadQuery,
    door=everybody("signature", "files"),
)

OWN_ROUTES: tuple[Route, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Route))
OWN_BY_NAME: Mapping[str, Route] = {route.name: route for route in OWN_ROUTES}


class SubmitAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer that asample would give to one of the bodies."""

    status: int
    body: bytes
    headers: dict[str, str] = {}


class SampleResult(msgspec.Struct, frozen=True, array_like=True):
    """A finished sample. Without a body it must be fetched by retrieve_future, because it is large or old."""

    request_id: str
    content_type: str = ""
    body: bytes | None = None


class SampleResults(msgspec.Struct, frozen=True, array_like=True):
    """The samples that finished since a cursor, and the cursor of the next poll."""

    cursor: int
    results: list[SampleResult]

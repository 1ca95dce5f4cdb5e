"""Everything that handlers work with, in one value. Made in `app`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tinsmith.engine.base import Backend
from tinsmith.server.access import Access
from tinsmith.server.admission import Admission
from tinsmith.server.auth import Authenticator
from tinsmith.server.files import Files
from tinsmith.server.jobs import Jobs
from tinsmith.server.metrics import Metrics
from tinsmith.server.promises import Broker
from tinsmith.server.runs import Runs
from tinsmith.server.samples import Samples
from tinsmith.server.signing import Signer
from tinsmith.server_config import ServerConfig
from tinsmith.store.base import Store


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of a running server."""

    config: ServerConfig
    store: Store
    backend: Backend
    authenticator: Authenticator
    access: Access
    admission: Admission
    broker: Broker
    jobs: Jobs
    runs: Runs
    samples: Samples
    files: Files
    signer: Signer
    metrics: Metrics
    clock: Callable[[], float] = time.time
    is_draining: bool = False

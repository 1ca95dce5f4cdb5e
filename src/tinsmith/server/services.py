"""Everything that handlers work with, in one value. Made in `app`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from tinsmith.config import ServerConfig
from tinsmith.engine.base import Backend
from tinsmith.server.access import Access
from tinsmith.server.admission import Admission
from tinsmith.server.auth import Authenticator
from tinsmith.server.files import Files
from tinsmith.server.jobs import Jobs
from tinsmith.server.metrics import Metrics
from tinsmith.server.naming import Namer
from tinsmith.server.promises import Broker
from tinsmith.server.runs import Runs
from tinsmith.server.samples import Samples
from tinsmith.server.signing import Signer
from tinsmith.store.base import Store
from tinsmith.store.rows import SizeRow, TelemetryRow


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
    namer: Namer = field(default_factory=Namer)
    clock: Callable[[], float] = time.time
    is_draining: bool = False
    client_flags: dict[str, Any] = field(default_factory=dict)
    """Answers to client/config that differ from the usual ones."""
    heartbeats: dict[str, float] = field(default_factory=dict)
    """When each active session was last heard of."""
    telemetry: list[TelemetryRow] = field(default_factory=list)
    """Batches that the sweeper will write."""
    used: dict[str, float] = field(default_factory=dict)
    """When each model was last asked for something, where the store does not know yet."""
    saving: dict[str, list[str]] = field(default_factory=dict)
    """Paths of checkpoints that are being written, each with the directories that will hold them."""
    importing: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """Paths of checkpoints that come from elsewhere, each held by the request that makes it."""

    def saved(self, path: str, directory: str) -> None:
        """A save is over, or was not accepted."""
        directories = self.saving.get(path, [])
        if directory in directories:
            directories.remove(directory)
        if not directories:
            self.saving.pop(path, None)

    async def checkpoint_bytes(self) -> int:
        """What all checkpoints take."""
        return (await self.store.read(SizeRow, "checkpoint_bytes"))[0].size_bytes

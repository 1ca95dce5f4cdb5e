"""The parts of a running server in one value, which handlers get. `app` makes it, and nothing changes it afterwards.

State that changes lives in the part that owns it. What needs one or two parts takes these, and not the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinsmith.config import ServerConfig
from tinsmith.engine.protocol import Backend
from tinsmith.server.auth.access import Access
from tinsmith.server.auth.admission import Admission
from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.auth.budgets import Budgets
from tinsmith.server.auth.signed_urls import Signer
from tinsmith.server.bodies.reader_pool import ReaderPool
from tinsmith.server.checkpoints.disk_budget import DiskBudget
from tinsmith.server.checkpoints.file_work import FileWork
from tinsmith.server.checkpoints.saves import Saves
from tinsmith.server.data_dir import Files
from tinsmith.server.dialects.caller_session import CallerSessions
from tinsmith.server.dialects.vocabulary import Vocabularies
from tinsmith.server.jobs.digests import Hasher
from tinsmith.server.jobs.lifecycle import Jobs
from tinsmith.server.jobs.pending_results import Broker
from tinsmith.server.jobs.samples import Samples
from tinsmith.server.ops.activity import Activity
from tinsmith.server.ops.installation import Installation
from tinsmith.server.ops.metrics import Metrics
from tinsmith.server.redaction import RefusalLog
from tinsmith.server.runs.order import Arrivals
from tinsmith.server.runs.registry import Runs
from tinsmith.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts of a running server."""

    config: ServerConfig
    store: Store
    backend: Backend
    authenticator: Authenticator
    access: Access
    admission: Admission
    budgets: Budgets
    broker: Broker
    jobs: Jobs
    runs: Runs
    samples: Samples
    files: Files
    signer: Signer
    metrics: Metrics
    refusals: RefusalLog = field(default_factory=RefusalLog)
    disk: DiskBudget
    file_work: FileWork
    hasher: Hasher = field(default_factory=Hasher)
    readers: ReaderPool
    arrivals: Arrivals = field(default_factory=Arrivals)
    activity: Activity
    saves: Saves
    caller_sessions: CallerSessions
    vocabularies: Vocabularies
    installation: Installation | None = None
    """What ties the database and the data directory together; None for a store that is lost with its process."""
    clock: Callable[[], float]
    client_flags: dict[str, Any]
    """Answers to client/config that differ from the usual ones."""

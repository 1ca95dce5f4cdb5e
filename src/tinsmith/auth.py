"""Checks of credentials that programs make before they start."""

from __future__ import annotations

import os

from tinsmith.config import ClientConfig, check_key, key_stored_for
from tinsmith.errors import TinkerError

ONE_ATTEMPT_S = 0.01
"""Shorter than any delay between two attempts, so that there is only one."""


def get_tinker_token() -> str | None:
    """Return the key that is set, or stored for the server that is set, or None. Runs no credential command."""
    try:
        config = ClientConfig.from_env()
        key = config.api_key or key_stored_for(os.environ, config.base_url)  # beside a command that gives another
        return check_key(key) if key else None
    except TinkerError:
        return None


def tinker_has_credentials() -> bool:
    """Whether a key or a credential command is set; the command is not run."""
    try:
        command = ClientConfig.from_env().credential_cmd
    except TinkerError:
        return False
    return get_tinker_token() is not None or bool(command)


def raise_if_tinker_not_accessible() -> None:
    """Make one request to the server with the current settings; raise its TinkerError if it fails.

    There are no retries: the caller wants to know what is wrong now.
    """
    from tinsmith.client.service import ServiceClient

    config = ClientConfig.from_env(telemetry=False, first_contact_s=ONE_ATTEMPT_S, retry_deadline_s=ONE_ATTEMPT_S)
    with ServiceClient(config=config) as client:
        client.get_server_capabilities()

"""Questions about credentials that programs ask before they begin."""

from __future__ import annotations

import os

from tinsmith.config import LOCAL, ClientConfig, check_key, stored_key
from tinsmith.errors import TinkerError

ONE_ATTEMPT_S = 0.01
"""Shorter than any pause between two attempts, so that there is but one."""


def get_tinker_token() -> str | None:
    """The key that is set or stored, or None. Runs no credential command."""
    try:
        key = ClientConfig.from_env(base_url=LOCAL).api_key or stored_key(os.environ)
        return check_key(key) if key else None
    except TinkerError:
        return None


def tinker_has_credentials() -> bool:
    """Whether a key or a credential command is set; the command is not run."""
    try:
        command = ClientConfig.from_env(base_url=LOCAL).credential_cmd
    except TinkerError:
        return False
    return get_tinker_token() is not None or bool(command)


def raise_if_tinker_not_accessible() -> None:
    """One request to the server with what is set; returns if it was answered, raises the TinkerError if not.

    Nothing is tried again: the caller wants to know what is wrong now.
    """
    from tinsmith.client.service import ServiceClient

    config = ClientConfig.from_env(telemetry=False, first_contact_s=ONE_ATTEMPT_S, retry_deadline_s=ONE_ATTEMPT_S)
    with ServiceClient(config=config) as client:
        client.get_server_capabilities()

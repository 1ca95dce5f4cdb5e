"""`tinsmith stop`: end the local engine, the server that clients start when none is configured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinsmith.cli.connection import confirmed, operations, reported
from tinsmith.cli.output import duration, echo, formatted, plural, print_json, wants_json
from tinsmith.cli.server.storage import data_dir_option

if TYPE_CHECKING:
    from tinsmith.client.connection.local_engine import Address

BEATING_S = 30.0
"""A client sends a heartbeat every 10 s; one that was silent for this long has gone."""


@click.command()
@data_dir_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask, even if programs are using the engine.")
@formatted
@reported
def stop(data_dir: Path | None, yes: bool) -> None:
    """End the local engine on this machine, and wait until it has ended.

    The local engine is the server that clients start if neither a server nor a key is set. It finishes running requests
    first (for at most 20 seconds); the others resume when it starts again. It also ends by itself: see tinsmith status.
    """
    from tinsmith.client.connection.local_engine import is_local_engine, running_address, server_process, stop_engine
    from tinsmith.config import EmbeddedConfig
    from tinsmith.errors import TinkerError

    config = EmbeddedConfig.from_env(
        os.environ if data_dir is None else {**os.environ, "TINSMITH_DATA_DIR": str(data_dir)}
    )
    pid = server_process(config.data_dir)
    if pid is None:
        _report(config.data_dir, None, f"the local engine is not running (data directory {config.data_dir})")
        return
    if not is_local_engine(config.data_dir, pid):
        raise TinkerError(
            f"process {pid} uses {config.data_dir}, but is not a local engine: it was started with tinsmith serve, or "
            f"is still starting. End it with Ctrl-C where it runs, or with: kill {pid}"
        )
    address = running_address(config)
    left = _announce(pid, address, yes)
    stop_engine(config.data_dir, pid)
    began = address.started_at if address is not None else None
    age = f", which ran for {duration(time.time() - began)}" if began is not None else ""
    text = f"stopped the local engine (process {pid}{age})"
    _report(config.data_dir, pid, f"{text}; requests without a result resume when it starts again" if left else text)


def _announce(pid: int, address: Address | None, yes: bool) -> int:
    """Say what the engine is doing, and ask if programs use it; return how many requests are not finished."""
    doing = _status(address) if address is not None else {}
    clients = sum(item["heartbeat_age_s"] < BEATING_S for item in doing.get("sessions", []))
    if clients:
        confirmed(f"{plural(clients, 'program')} on this machine may be using the local engine. Stop it?", yes)
    left: int = doing.get("queued", 0)
    if not wants_json():
        waiting = f"; {plural(left, 'request')} may finish first" if left else ""
        echo(f"stopping the local engine (process {pid}){waiting}", err=True)
    return left


def _status(address: Address) -> dict[str, Any]:
    """Return what the engine reports; nothing if it does not answer."""
    from tinsmith.client.connection.own_endpoints import Extensions
    from tinsmith.errors import TinkerError

    try:
        with operations(base_url=address.url, api_key=address.key) as holder:
            return Extensions(holder).status() or {}
    except TinkerError:
        return {}


def _report(data_dir: Path, pid: int | None, text: str) -> None:
    if wants_json():
        print_json({"stopped": pid is not None, "pid": pid, "data_dir": data_dir})
    else:
        echo(text)

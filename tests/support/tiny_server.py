"""A real server with a tiny random model, for commands and scripts that are run as users run them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
TINSMITH = (sys.executable, "-m", "tinsmith")


@contextlib.contextmanager
def tiny_server(place: Path, context: int = 256, *options: str) -> Iterator[dict[str, str]]:
    """The environment of its clients; `options` are further ones of `tinsmith serve`."""
    make_tiny(place / "model", max_position_embeddings=context)
    arguments = ["--data-dir", str(place / "data"), "--model", f"tiny={place / 'model'}", *options]
    address, process = start_server(arguments, {"TINSMITH_DTYPE": "float32"}, place / "log")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "TINSMITH"))}
    where = {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": address.key}
    try:
        yield kept | where | {"HOME": str(place), "PYTHONPATH": str(ROOT / "src")}
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()

"""`tinsmith serve`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError

NEEDS_SERVER = "the server is not installed; pip install 'tinsmith[server]'"


@click.command()
@click.option("--host", help="Address to listen on; any but loopback needs keys.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0 picks a free one.  [default: 8000]")
@click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Where everything is kept.")
@click.option("--model", "models", multiple=True, metavar="NAME[=SOURCE]", help="A base model; may be repeated.")
@click.option("--database", metavar="URL", help="postgresql://... or a path.  [default: SQLite in the data directory]")
@click.option("--api-key", metavar="tml-...", help="A key to accept, besides those of `tinsmith key create`.")
@click.option("--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="A TOML file with [server].")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="How logs look on stderr.  [default: text]")
@click.option("--backend", metavar="NAME", help="local, or module:factory of a backend.  [default: local]")
def serve(
    host: str | None,
    port: int | None,
    data_dir: Path | None,
    models: tuple[str, ...],
    database: str | None,
    api_key: str | None,
    file: Path | None,
    log_format: str | None,
    backend: str | None,
) -> None:
    """Run a Tinker server for official and own clients.

    The first line on stdout says where it listens; the two after it are for pasting into a shell.
    """
    try:
        config = ServerConfig.from_env(
            os.environ,
            file,
            host=host,
            port=port,
            data_dir=data_dir,
            models=models or None,
            database=database,
            api_key=api_key,
            log_format=log_format,
            backend=backend,
        )
        try:
            from tinsmith.server.serving import serve as run
        except ImportError as error:
            raise click.ClickException(f"{NEEDS_SERVER} ({error})") from None
        raise SystemExit(run(config, click.echo))
    except TinkerError as error:
        raise click.ClickException(str(error)) from None

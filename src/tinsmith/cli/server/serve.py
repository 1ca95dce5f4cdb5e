"""`tinsmith serve`: run a server in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import click

from tinsmith.cli.output import echo
from tinsmith.config import ServerConfig, named
from tinsmith.errors import TinkerError

NEEDS_SERVER = "the server is not installed; pip install 'tinsmith[server]'"


@click.command()
@click.option("--host", help="Address to listen on; any other than loopback needs API keys.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port; 0 picks a free one.  [default: 8000]")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for the database, checkpoints, keys and models.  [default: ~/.local/share/tinsmith]",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME[=SOURCE]",
    help="Base model; SOURCE is a directory, GGUF file or Hub ID. Repeatable.  [default: SmolLM2-135M-Instruct]",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME=MODEL",
    help="Name for a base model or tinker:// path, for OpenAI and Anthropic clients. Repeatable.",
)
@click.option(
    "--chat-template",
    "chat_templates",
    multiple=True,
    metavar="[NAME=]FILE",
    help="Chat template (Jinja) for a model, checkpoint or alias; without NAME, for all. Repeatable.",
)
@click.option("--database", metavar="URL", help="postgresql://... or a file.  [default: SQLite in the data directory]")
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with an API key to accept, in addition to those of `tinsmith key create`.",
)
@click.option("--api-key", metavar="tml-...", help="The key itself; visible to other users of this machine.")
@click.option(
    "--tls-cert", type=click.Path(path_type=Path, dir_okay=False), help="Serve HTTPS with this certificate (PEM)."
)
@click.option(
    "--tls-key", type=click.Path(path_type=Path, dir_okay=False), help="Private key of the certificate (PEM)."
)
@click.option(
    "--config", "file", type=click.Path(path_type=Path, dir_okay=False), help="TOML file with a [server] table."
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="Format of the log on stderr.  [default: text]")
@click.option("--backend", metavar="NAME", help="'local', or module:factory of your own.  [default: local]")
def serve(
    host: str | None,
    port: int | None,
    data_dir: Path | None,
    models: tuple[str, ...],
    aliases: tuple[str, ...],
    chat_templates: tuple[str, ...],
    database: str | None,
    api_key_file: Path | None,
    api_key: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    file: Path | None,
    log_format: str | None,
    backend: str | None,
) -> None:
    """Run a Tinker server, for tinsmith and official clients.

    Prints the URL, and two lines to paste into the client's shell. Every option is also a setting, in the environment
    (TINSMITH_PORT=9000) or the --config file. Pass secrets in files or the environment (TINSMITH_API_KEY,
    TINSMITH_DATABASE): every user of the machine can see arguments.
    """
    from tinsmith.client.connection.local_engine import check_platform

    warn_of_shown_secrets(api_key, database)
    try:
        check_platform()
        config = ServerConfig.from_env(
            os.environ,
            file,
            host=host,
            port=port,
            data_dir=data_dir,
            models=models or None,
            aliases=dict(named("aliases", text) for text in aliases) or None,
            chat_templates=dict(named("chat_templates", text) for text in chat_templates) or None,
            database=database,
            api_key=api_key,
            api_key_file=api_key_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            log_format=log_format,
            backend=backend,
        )
        try:
            from tinsmith.server.process import serve as run
        except ImportError as error:
            raise click.ClickException(f"{NEEDS_SERVER} ({error})") from None
        raise SystemExit(run(config, echo))
    except TinkerError as error:
        raise click.ClickException(str(error)) from None


def warn_of_shown_secrets(api_key: str | None, database: str | None) -> None:
    """Warn when an argument contains a secret: `ps` shows arguments to every user of the machine."""
    if api_key is not None:
        echo("warning: other users can see --api-key with ps; use --api-key-file or TINSMITH_API_KEY", err=True)
    if database is not None and _has_password(database):
        echo("warning: other users can see the password in --database with ps; use TINSMITH_DATABASE", err=True)


def _has_password(database: str) -> bool:
    try:
        parts = urlsplit(database)
        return parts.password is not None or "password=" in parts.query
    except ValueError:
        return True

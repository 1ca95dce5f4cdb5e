"""Settings of a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tinsmith.config import ServerConfig, default_data_dir
from tinsmith.errors import TinkerError


def test_arguments_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tinsmith.toml"
    file.write_text('[server]\nport = 1\nhost = "file"\npoll_s = 3\nmodels = ["a=b"]\n')
    environ = {"HOME": "/home/x", "TINSMITH_HOST": "environment", "TINSMITH_PORT": "2", "TINSMITH_MODELS": "c, d=e,"}
    config = ServerConfig.from_env(environ, file, port=4, host=None)
    assert (config.port, config.host, config.poll_s, config.models) == (4, "environment", 3, ("c", "d=e"))
    assert config.data_dir == Path("/home/x/.local/share/tinsmith")
    assert config.database_url == "/home/x/.local/share/tinsmith/tinsmith.sqlite"
    assert ServerConfig.from_env({}, file).models == ("a=b",)
    assert ServerConfig.from_env({"TINSMITH_DATABASE": "postgresql://x/y"}).database_url == "postgresql://x/y"


def test_where_data_lies() -> None:
    assert default_data_dir({"XDG_DATA_HOME": "/data"}) == Path("/data/tinsmith")
    assert ServerConfig.from_env({}, data_dir="relative").data_dir == Path.cwd() / "relative"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("port", -1, "port must be"),
        ("port", 65536, "port must be"),
        ("port", 80.5, "port must be"),
        ("port", "80", "port must be"),
        ("port", True, "port must be"),
        ("log_format", "xml", "log_format must be text or json"),
        ("poll_s", 0, "poll_s must be a number above 0"),
        ("poll_s", float("nan"), "poll_s must be a number above 0"),
        ("poll_s", 41, "poll_s must be at most 40"),
        ("session_timeout_s", -1, "session_timeout_s"),
        ("max_body_bytes", "many", "max_body_bytes"),
        ("max_datums", True, "max_datums"),
        ("max_queued", None, "max_queued"),
        ("requests_per_minute", 0, "requests_per_minute"),
        ("requests_per_minute", -5, "requests_per_minute"),
        ("disk_cap_bytes", 0, "disk_cap_bytes"),
        ("disk_cap_action", "ask", "disk_cap_action must be refuse or delete"),
        ("max_run_checkpoints", 0, "max_run_checkpoints"),
        ("checkpoint_retention_s", -1, "checkpoint_retention_s"),
        ("lora_alpha", 0, "lora_alpha"),
        ("lora_alpha", float("nan"), "lora_alpha"),
        ("micro_batch_tokens", 0, "micro_batch_tokens must be a whole number of at least 1, got 0"),
        ("micro_batch_tokens", 512.5, "micro_batch_tokens must be a whole number of at least 1, got 512.5"),
        ("prefill_tokens", -1, "prefill_tokens must be a whole number"),
        ("prefill_tokens", True, "prefill_tokens must be a whole number"),
        ("max_batch_sequences", 1.5, "max_batch_sequences must be a whole number"),
        ("max_batch_sequences", None, "max_batch_sequences"),
        ("scheduler_quantum_s", 0, "scheduler_quantum_s must be a number above 0"),
        ("host", 5, "host must be"),
        ("models", "a,b", "models must be a list"),
        ("models", [1], "models must be a list"),
    ],
)
def test_wrong_values_are_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(TinkerError, match=says):
        ServerConfig(**{name: value})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[server]\nprot = 1\n", "unknown setting server.prot"),
        ("server = 1\n", "must be a table"),
        ("[server\n", "cannot read"),
        ('[server]\nport = "80"\n', "port must be"),
        ('[server]\nmodels = "name"\n', "models must be a list"),
        ("[server]\ndata_dir = 5\n", "data_dir must be"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tinsmith.toml"
    file.write_text(text)
    with pytest.raises(TinkerError, match=says):
        ServerConfig.from_env({}, file)


def test_a_missing_file_an_unknown_argument_and_a_bad_number() -> None:
    with pytest.raises(TinkerError, match=r"cannot read none\.toml: No such file"):
        ServerConfig.from_env({}, Path("none.toml"))
    with pytest.raises(TinkerError, match="unknown settings: prot"):
        ServerConfig.from_env({}, prot=1)
    with pytest.raises(TinkerError, match="TINSMITH_PORT must be a number, got 'x'"):
        ServerConfig.from_env({"TINSMITH_PORT": "x"})


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_what_is_loopback(host: str, is_loopback: bool) -> None:
    assert ServerConfig(host=host).is_loopback is is_loopback


def test_the_key_is_not_shown_and_every_setting_is_explained() -> None:
    assert "tml-secret" not in repr(ServerConfig(api_key="tml-secret-key"))
    source = Path(__file__).parents[3].joinpath("src/tinsmith/config.py").read_text()
    for spec in dataclasses.fields(ServerConfig):
        _, _, behind = source.partition(f"    {spec.name}: ")
        assert behind.split("\n")[1].startswith('    """'), spec.name

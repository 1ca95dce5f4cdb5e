"""The setting that changes the flags in the answer to client/config."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError
from tinsmith.server.app import check_flags


def test_flags_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    environ = {"TINSMITH_CLIENT_FLAGS": "pjwt_auth_enabled=false, use_pyqwest_transport=true", "HOME": str(tmp_path)}
    flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": True}
    assert ServerConfig.from_env(environ).client_flags == flags
    file = tmp_path / "server.toml"
    file.write_text("[server.client_flags]\npjwt_auth_enabled = false\nuse_pyqwest_transport = true\n")
    assert ServerConfig.from_env({"HOME": str(tmp_path)}, file).client_flags == flags


@pytest.mark.parametrize("text", ["pjwt_auth_enabled", "pjwt_auth_enabled=maybe", "pjwt_auth_enabled=1"])
def test_a_flag_is_true_or_false(text: str) -> None:
    with pytest.raises(TinkerError, match="TINSMITH_CLIENT_FLAGS must be NAME=true or NAME=false"):
        ServerConfig.from_env({"TINSMITH_CLIENT_FLAGS": text})
    with pytest.raises(TinkerError, match=r"client_flags\.pjwt_auth_enabled must be true or false, got 1"):
        ServerConfig(client_flags={"pjwt_auth_enabled": 1})  # type: ignore[dict-item]


def test_unknown_flags_are_named() -> None:
    assert check_flags({"sample_use_retrieve_futures": False}) == {"sample_use_retrieve_futures": False}
    with pytest.raises(TinkerError, match="client_flags: unknown tinsmith, typo"):
        check_flags({"typo": True, "tinsmith": True})

"""A key is sent only to the server that it belongs to: not to a default server, not after a redirect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli_run import Cli
from support.tinker_server import TinkerServer

import tinsmith
from tinsmith import auth as questions
from tinsmith.client.connection.credentials import Credentials, StoredKey, credentials_path
from tinsmith.config import HOSTED_URL, LOCAL, ClientConfig, is_same_server
from tinsmith.errors import TinkerError
from tinsmith.transport.base import HttpRequest, Purpose, redirected

OWN = "http://lab.example:8000"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINSMITH_", "XDG_CONFIG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def store(home: Path, **extra: Any) -> None:
    record = {"type": "manual", "key": "tml-stored", "name": "mine", **extra}
    place = credentials_path({"HOME": str(home)})
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps({"version": 1, "default": "k", "keys": {"k": record}}))


def used(home: Path, **environ: str) -> tuple[str, str | None]:
    config = ClientConfig.from_env({"HOME": str(home), **environ})
    return config.base_url, config.api_key


def test_a_key_for_ones_own_server_stays_there(home: Path) -> None:
    store(home, base_url=OWN)
    assert used(home) == (OWN, "tml-stored"), "where it was stored for, not the hosted address"
    assert used(home, TINKER_BASE_URL=f"{OWN}/") == (OWN, "tml-stored")
    assert used(home, TINKER_BASE_URL="https://other.example") == ("https://other.example", None)
    assert used(home, TINKER_BASE_URL=HOSTED_URL) == (HOSTED_URL, None)
    assert used(home, TINKER_BASE_URL=LOCAL) == (LOCAL, None)


def test_a_key_that_an_official_client_stored_is_for_the_hosted_service(home: Path) -> None:
    store(home)
    assert used(home) == (HOSTED_URL, "tml-stored")
    assert used(home, TINKER_BASE_URL=OWN) == (OWN, None)


def test_a_key_from_the_environment_goes_where_official_clients_go(home: Path) -> None:
    store(home, base_url=OWN)
    assert used(home, TINKER_API_KEY="tml-set") == (HOSTED_URL, "tml-set")
    assert used(home, TINKER_API_KEY="tml-set", TINKER_BASE_URL=OWN) == (OWN, "tml-set")


def test_a_key_in_the_settings_file_goes_only_to_the_address_beside_it(home: Path) -> None:
    file = home / "config.toml"
    file.write_text(f'[client]\nbase_url = "{OWN}"\napi_key = "tml-filed"\n')
    named = {"TINSMITH_CONFIG": str(file)}
    assert used(home, **named) == (OWN, "tml-filed")
    assert used(home, **named, TINKER_BASE_URL="http://other.example") == ("http://other.example", None)
    file.write_text('[client]\ncredential_cmd = "vault"\nbase_url = "http://x:1"\n')
    config = ClientConfig.from_env({"HOME": str(home), **named}, base_url=OWN)
    assert config.credential_cmd is None
    file.write_text('[client]\napi_key = "tml-filed"\n')
    assert used(home, **named, TINKER_BASE_URL=OWN) == (OWN, "tml-filed"), "a key beside no address is for all"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("http://a:8000", "http://A:8000/", True),
        ("https://a", "https://a:443", True),
        ("https://a", "http://a", False),
        ("http://a:1", "http://a:2", False),
        ("http://a/x", "http://a/y", False),
        ("http://a", "http://a.evil", False),
        ("http://a", "http://a@evil", False),
        ("http://a", "http://a:port", False),
    ],
)
def test_which_addresses_are_one_server(one: str, other: str, expected: bool) -> None:
    assert is_same_server(one, other) is expected


def test_questions_about_credentials_are_about_the_server_that_is_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(home, base_url=OWN)
    assert questions.get_tinker_token() == "tml-stored"
    monkeypatch.setenv("TINKER_BASE_URL", HOSTED_URL)
    assert questions.get_tinker_token() is None
    assert not questions.tinker_has_credentials()


def test_login_keeps_the_address_and_later_commands_use_it(home: Path) -> None:
    with TinkerServer() as server, TinkerServer() as other:
        Cli(server.url, None, home)("auth", "login", given=f"{server.key}\n")
        [record] = json.loads(credentials_path({"HOME": str(home)}).read_text())["keys"].values()
        assert record["base_url"] == server.url
        anywhere = Cli(None, None, home)
        assert anywhere.json("auth", "status")["base_url"] == server.url
        assert anywhere.json("model", "list")["models"]
        assert "Run: tinsmith auth login" in Cli(other.url, None, home).fails("auth", "status")
        with (
            pytest.raises(TinkerError, match="only sent to the server it was stored for"),
            tinsmith.ServiceClient(base_url=other.url) as client,
        ):
            client.get_server_capabilities()
        assert other.requests == [], "another server is sent nothing at all"


def test_a_generated_key_is_deleted_where_it_is_from(home: Path) -> None:
    with TinkerServer() as server, TinkerServer() as other:
        place = Credentials(credentials_path({"HOME": str(home)}))
        place.store_default(StoredKey("1", server.key, "machine", "generated", base_url=server.url))
        Cli(other.url, None, home)("auth", "logout")
        assert {request.key for request in server.requests} == {server.key}
        assert other.requests == []


@pytest.mark.parametrize("address", ["https://evil.example/x", "http://lab.example:8001/x", "//evil.example/x"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_key_to_another_server(address: str, status: int) -> None:
    headers = {"X-API-Key": "tml-secret", "Authorization": "Bearer x", "cf-access-client-secret": "y", "accept": "*/*"}
    request = HttpRequest(method="POST", url=f"{OWN}/api/v1/x", headers=headers, body=b"{}", purpose=Purpose.REST)
    assert redirected(request, status, {"location": address}).headers == {"accept": "*/*"}
    stays = redirected(request, status, {"location": "/y"})
    assert stays.headers["X-API-Key"] == "tml-secret"

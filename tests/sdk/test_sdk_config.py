"""Settings: argument, environment, file and default in this order; unknown names are refused, and nothing is shared."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import TinkerServer

from tinsmith import ClientConfig, ModelInput, RestClient, SamplingParams, ServiceClient, TinkerError
from tinsmith.config import LOCAL

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture
def settings_file(tmp_path: Path) -> Any:
    def write(text: str) -> dict[str, str]:
        path = tmp_path / "settings.toml"
        path.write_text(text)
        return {"TINSMITH_CONFIG": str(path), "HOME": str(tmp_path)}

    return write


def test_argument_before_environment_before_file_before_default(settings_file: Any) -> None:
    environ = settings_file(
        '[client]\nbase_url = "http://file:1"\napi_key = "tml-of-file"\nproject_id = "file"\nheartbeat_s = 3.0\n'
        'tags = ["from-file"]\ntelemetry = false\n'
    )
    from_file = ClientConfig.from_env(environ)
    assert (from_file.base_url, from_file.api_key, from_file.project_id) == ("http://file:1", "tml-of-file", "file")
    assert (from_file.tags, from_file.telemetry) == (("from-file",), False)

    environ |= {
        "TINKER_BASE_URL": "http://environment:2",
        "TINKER_API_KEY": "tml-of-environment",
        "TINKER_PROJECT_ID": "environment",
        "TINKER_TAGS": "a, b,",
        "TINKER_TELEMETRY": "1",
    }
    from_environment = ClientConfig.from_env(environ)
    assert from_environment.base_url == "http://environment:2"
    assert from_environment.api_key == "tml-of-environment"
    assert from_environment.project_id == "environment"
    assert from_environment.tags == ("a", "b")
    assert from_environment.telemetry is True
    assert from_environment.heartbeat_s == 3.0, "what the environment does not say is still the file's"
    assert from_environment.poll_timeout_s == 45.0, "and what nobody says the default"

    from_argument = ClientConfig.from_env(
        environ, base_url="http://argument:3", project_id="argument", heartbeat_s=1.0, telemetry=False, tags=("c",)
    )
    assert (from_argument.base_url, from_argument.project_id) == ("http://argument:3", "argument")
    assert (from_argument.heartbeat_s, from_argument.telemetry, from_argument.tags) == (1.0, False, ("c",))
    assert from_argument.api_key == "tml-of-environment"
    assert ClientConfig.from_env(environ, base_url=None).base_url == "http://environment:2"


def test_an_empty_variable_counts_as_unset(settings_file: Any) -> None:
    environ = settings_file('[client]\nbase_url = "http://file:1"\n') | {"TINKER_BASE_URL": "", "TINKER_API_KEY": ""}
    assert ClientConfig.from_env(environ).base_url == "http://file:1"


def test_a_trailing_slash_is_dropped() -> None:
    assert (
        ClientConfig.from_env({}, base_url="http://host:1/prefix/", api_key="tml-x").base_url == "http://host:1/prefix"
    )


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "nonsense"])
def test_telemetry_is_off_by_anything_but_yes(value: str) -> None:
    environ = {"TINKER_TELEMETRY": value, "TINKER_BASE_URL": "http://host:1"}
    assert ClientConfig.from_env(environ).telemetry is False


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_telemetry_is_on_by_yes(value: str) -> None:
    assert ClientConfig.from_env({"TINKER_TELEMETRY": value, "TINKER_BASE_URL": "http://host:1"}).telemetry is True


def test_an_unknown_key_in_the_file_is_refused_by_name(settings_file: Any) -> None:
    environ = settings_file('[client]\nbase_url = "http://file:1"\nhartbeat_s = 3.0\n')
    with pytest.raises(TinkerError, match=r"client\.hartbeat_s.*heartbeat_s") as told:
        ClientConfig.from_env(environ)
    assert environ["TINSMITH_CONFIG"] in str(told.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("heartbeat_s = 'soon'", "heartbeat_s"),
        ("heartbeat_s = 0", "heartbeat_s"),
        ("heartbeat_s = true", "heartbeat_s"),
        ("base_url = 3", "base_url"),
        ("telemetry = 'off'", "telemetry"),
        ("tags = 'a,b'", "tags"),
        ("api_key = 7", "api_key"),
        ("default_headers = ['a']", "default_headers"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(settings_file: Any, line: str, named: str) -> None:
    base = "" if line.startswith("base_url") else 'base_url = "http://file:1"\n'
    with pytest.raises(TinkerError, match=named):
        ClientConfig.from_env(settings_file(f"[client]\n{base}{line}\n"))


@pytest.mark.parametrize("text", ["[client\n", "client = 3\n"])
def test_a_file_that_cannot_be_read_is_refused_by_name(settings_file: Any, text: str) -> None:
    environ = settings_file(text)
    with pytest.raises(TinkerError) as told:
        ClientConfig.from_env(environ, base_url="http://host:1")
    assert environ["TINSMITH_CONFIG"] in str(told.value)


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TinkerError, match="TINSMITH_CONFIG"):
        ClientConfig.from_env({"TINSMITH_CONFIG": str(tmp_path / "none.toml")}, base_url="http://host:1")


def test_the_file_in_the_home_folder_is_found(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "tinsmith"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[client]\nbase_url = "http://home:1"\n')
    assert ClientConfig.from_env({"HOME": str(tmp_path)}).base_url == "http://home:1"
    elsewhere = tmp_path / "elsewhere" / "tinsmith"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.toml").write_text('[client]\nbase_url = "http://xdg:1"\n')
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(elsewhere.parent)}
    assert ClientConfig.from_env(environ).base_url == "http://xdg:1"


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(TinkerError, match="hartbeat_s"):
        ClientConfig.from_env({}, base_url="http://host:1", hartbeat_s=1.0)


def test_a_key_alone_leads_to_the_hosted_service() -> None:
    config = ClientConfig.from_env({"TINKER_API_KEY": "tml-key"})
    assert config.base_url == "https://tinker.thinkingmachines.dev/services/tinker-prod"
    assert ServiceClient(api_key="tml-key").holder.connection.config.base_url == config.base_url


def test_nothing_set_means_the_local_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClientConfig.from_env({}).base_url == LOCAL
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for make in (ServiceClient, RestClient):
        with pytest.raises(TinkerError) as told:
            make()
        for word in ("tinsmith[server]", "TINKER_BASE_URL", "TINKER_API_KEY", "tml-"):
            assert word in str(told.value)


def test_the_stored_key_is_the_last_resort(tmp_path: Path) -> None:
    folder = tmp_path / ".tinker"
    folder.mkdir()
    record = {"type": "manual", "key": "tml-stored", "name": "mine", "base_url": "http://host:1"}
    stored = {"version": 1, "default": "k1", "keys": {"k1": record}}
    (folder / "credentials.json").write_text(json.dumps(stored))
    environ = {"HOME": str(tmp_path), "TINKER_BASE_URL": "http://host:1"}
    assert ClientConfig.from_env(environ).api_key == "tml-stored"
    assert ClientConfig.from_env(environ | {"TINKER_API_KEY": "tml-set"}).api_key == "tml-set"
    with_command = ClientConfig.from_env(environ | {"TINKER_CREDENTIAL_CMD": "echo tml-printed"})
    assert (with_command.api_key, with_command.credential_cmd) == (None, "echo tml-printed")


def test_a_credential_command_gives_the_key(server: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {server.key}")
    with ServiceClient(base_url=server.url) as client:
        assert client.get_server_capabilities().supported_models
    assert {request.key for request in server.requests} == {server.key}


def test_a_credential_command_that_fails_says_why(server: TinkerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo vault is sealed >&2; exit 3")

    def use() -> None:
        with ServiceClient(base_url=server.url) as client:
            client.get_server_capabilities()

    with pytest.raises(TinkerError, match="vault is sealed"):
        use()
    assert server.requests == []


def test_two_clients_of_different_servers_do_not_touch_each_other(make_server: Any, connect: Any) -> None:
    one, other = make_server(flags={"fwdbwd_max_chunk_len": 1}), make_server()
    first = connect(one, default_headers={"x-who": "first"}, heartbeat_s=0.05, retry_deadline_s=0.3)
    second = connect(other, default_headers={"x-who": "second"}, retry_deadline_s=9.0)
    samplers = [client.create_sampling_client(base_model="stub/model") for client in (first, second)]
    for sampler in samplers * 3:
        sampler.sample(PROMPT, 1, PARAMS).result(10)
    one.wait_for("session_heartbeat", 2, timeout_s=5)

    assert {request.headers["x-who"] for request in one.requests} == {"first"}
    assert {request.headers["x-who"] for request in other.requests} == {"second"}
    assert other.find("session_heartbeat") == []
    one.stop()
    assert samplers[0].sample(PROMPT, 1, PARAMS).exception(10) is not None
    first.close()
    assert samplers[1].sample(PROMPT, 1, PARAMS).result(10).sequences[0].tokens == [6, 7]


def test_two_keys_on_one_server_stay_apart(server: TinkerServer, connect: Any) -> None:
    mine, foreign = connect(server), connect(server, api_key=server.foreign_key)
    runs = [client.create_lora_training_client("stub/model", rank=1).model_id for client in (mine, foreign)]
    listed = [client.create_rest_client().list_training_runs().result(10).training_runs for client in (mine, foreign)]
    assert [[run.training_run_id for run in page] for page in listed] == [[runs[0]], [runs[1]]]
    assert {request.key for request in server.requests} == {server.key, server.foreign_key}


def test_headers_of_the_environment_stay_beside_those_of_the_argument(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_ID", "id")
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "secret")
    with ServiceClient(base_url=server.url, api_key=server.key, default_headers_overrides={"x-mine": "1"}) as client:
        client.get_server_capabilities()
    for request in server.requests:
        assert request.headers["x-mine"] == "1"
        assert request.headers["cf-access-client-id"] == "id"
        assert request.headers["cf-access-client-secret"] == "secret"


def test_an_argument_beside_a_whole_configuration_is_not_dropped(server: TinkerServer) -> None:
    config = ClientConfig(base_url="http://127.0.0.1:9", api_key="tml-other")
    try:
        client = ServiceClient(config=config, base_url=server.url, api_key=server.key)
    except TinkerError:
        return  # refusing both is as good
    assert client.holder.connection.config.base_url == server.url
    assert client.holder.connection.config.api_key == server.key

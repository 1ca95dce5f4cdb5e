"""The files that others' machines run: container, compose and workflow files name things that exist, and are careful.

No container engine and no runner is used here. What can be checked without them is checked: syntax, the files that are
copied, the settings, options and commands that are named, pinned versions, permissions.
"""

from __future__ import annotations

import fnmatch
import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import yaml

from tinsmith.cli.main import main
from tinsmith.config import ServerConfig
from tinsmith.wire.routes.openai import PREFIXES
from tinsmith.wire.routes.own import HEALTHZ

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
_PIN = re.compile(r"uses: ([\w./-]+)@([0-9a-f]{40}) # v\d+\.\d+\.\d+$")


class Instruction(NamedTuple):
    """One line of a Dockerfile, continued lines joined."""

    name: str
    text: str


def instructions(text: str) -> list[Instruction]:
    without_comments = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = without_comments.replace("\\\n", " ")
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())
LAST = max(index for index, line in enumerate(DOCKERFILE) if line.name == "FROM")
FINAL = DOCKERFILE[LAST:]
"""The stage that is shipped."""
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())


def only(name: str) -> str:
    """Return the text of the final stage's one instruction of a kind."""
    (found,) = [line.text for line in FINAL if line.name == name]
    return found


def image_environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in only("ENV").split())


def settings(environ: dict[str, str]) -> ServerConfig:
    """Return the settings that these variables make, and fail on one that is not a setting."""
    known = {f"TINSMITH_{name.upper()}" for name in ServerConfig.__dataclass_fields__}
    assert {name for name in environ if name.startswith("TINSMITH_")} <= known
    return ServerConfig.from_env(environ)


def ignored(name: str) -> bool:
    """Whether .dockerignore hides a file: the last pattern that matches decides."""
    is_hidden = False
    for pattern in (ROOT / ".dockerignore").read_text().split("\n"):
        if pattern and not pattern.startswith("#") and fnmatch.fnmatch(name, pattern.removeprefix("!")):
            is_hidden = not pattern.startswith("!")
    return is_hidden


def test_what_the_image_copies_is_there() -> None:
    copied = [line.text.split()[:-1] for line in DOCKERFILE if line.name == "COPY" and "--from=" not in line.text]
    sources = [source for line in copied for source in line]
    assert {"src", "pyproject.toml", "constraints.txt"} <= set(sources)
    assert [name for name in sources if not (ROOT / name).exists() or ignored(name)] == []
    assert ignored(".git")
    assert ignored("tests")


def test_the_image_has_what_the_build_needs() -> None:
    """hatchling reads these when it builds the package."""
    copied = " ".join(line.text for line in DOCKERFILE if line.name == "COPY")
    hooks = [hook["path"] for hook in PYPROJECT["tool"]["hatch"]["metadata"]["hooks"].values()]
    assert hooks != []
    assert [name for name in (PROJECT["readme"], *PROJECT["license-files"], *hooks) if name not in copied] == []


def test_the_image_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Dockerfile").read_text())
    assert set(extras.split(",")) == {"server", "postgres"}
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_images_python_is_one_that_is_tested() -> None:
    (default,) = [line.text.partition("=")[2] for line in DOCKERFILE if line.text.startswith("PYTHON=")]
    assert default in pythons_of_metadata()
    assert len([line for line in DOCKERFILE if line.name == "FROM"]) == 2


def pythons_of_metadata() -> list[str]:
    prefix = "Programming Language :: Python :: 3."
    return [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if name.startswith(prefix)]


def test_the_image_does_not_run_as_root_and_keeps_its_data_in_a_volume() -> None:
    config = settings(image_environment())
    assert only("USER") not in ("root", "0")
    assert only("VOLUME") == str(config.data_dir) == image_environment()["HOME"]
    assert only("EXPOSE") == str(config.port)
    assert not config.is_loopback  # so that the server insists on keys
    assert f"install -d -o {only('USER')} -g {only('USER')} -m 700 {config.data_dir}" in only("RUN")


def test_no_secret_is_part_of_the_image_or_the_compose_file() -> None:
    assert not [name for name in image_environment() if re.search("KEY|PASSWORD|TOKEN|SECRET", name)]
    for service in COMPOSE["services"].values():
        for name, value in service["environment"].items():
            assert "PASSWORD" not in name or re.fullmatch(r"\$\{POSTGRES_PASSWORD:\?.+\}", value)
            assert "tml-" not in value
            assert not re.search(r"//[^/@]*:[^/@]*@", value)


def test_the_image_starts_a_command_that_exists() -> None:
    command = [*json.loads(only("ENTRYPOINT")), *json.loads(only("CMD"))]
    assert command[0] in PROJECT["scripts"]
    context = main.make_context(command[0], command[1:])
    name, found, rest = main.resolve_command(context, [*context._protected_args, *context.args])
    assert found is not None
    found.make_context(name, rest)


class Health(http.server.BaseHTTPRequestHandler):
    """Answers one path with a status."""

    status: ClassVar[int] = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == HEALTHZ.path else 404)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def health() -> Iterator[tuple[int, type[Health]]]:
    answers = type("Answers", (Health,), {})
    with http.server.HTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port, answers
        server.shutdown()
        thread.join()


def test_the_images_health_check_asks_the_server(health: tuple[int, type[Health]]) -> None:
    port, answers = health
    command = json.loads(only("HEALTHCHECK").partition("CMD ")[2])
    assert command[:2] == ["python", "-c"]
    code = command[2].replace(f":{only('EXPOSE')}/", f":{port}/")
    assert code != command[2]

    def exit_code() -> int:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode

    assert exit_code() == 0
    answers.status = 503
    assert exit_code() != 0


def test_the_compose_file_names_what_exists() -> None:
    services = COMPOSE["services"]
    ours = services["tinsmith"]
    assert (ROOT / ours["build"] / "Dockerfile").is_file()
    config = settings(image_environment() | ours["environment"])
    assert config.database_url.startswith("postgresql://")
    assert f"@{next(iter(ours['depends_on']))}/" in config.database_url
    assert set(ours["depends_on"]) <= set(services)
    assert all("healthcheck" in services[name] for name in ours["depends_on"])
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert sorted(mounted) == sorted(COMPOSE["volumes"])
    assert ours["volumes"] == [f"data:{config.data_dir}"]
    assert ours["ports"] == [f"127.0.0.1:{config.port}:{config.port}"]
    assert int(ours["stop_grace_period"].removesuffix("s")) > config.drain_s


def test_the_compose_files_database_is_the_one_that_is_made() -> None:
    made = COMPOSE["services"]["postgres"]["environment"]
    url = COMPOSE["services"]["tinsmith"]["environment"]["TINSMITH_DATABASE"]
    assert url == f"postgresql://{made['POSTGRES_USER']}@postgres/{made['POSTGRES_DB']}"


def test_the_web_pages_compose_file_fits_the_servers() -> None:
    """It is given to the container engine after the server's own file, and adds to it."""
    added: dict[str, Any] = yaml.safe_load((ROOT / "examples/open-webui/compose.yaml").read_text())
    (page,) = added["services"].values()
    assert page["depends_on"] == ["tinsmith"]
    assert set(page["depends_on"]) <= set(COMPOSE["services"])
    assert not set(added["services"]) & set(COMPOSE["services"])
    config = settings(image_environment())
    assert page["environment"]["OPENAI_API_BASE_URL"] == f"http://tinsmith:{config.port}{PREFIXES['openai']}"
    assert page["environment"]["OPENAI_API_KEY"].startswith("${OPENAI_API_KEY:?"), "no key in the file"
    assert re.fullmatch(r"[\w./-]+:v\d+\.\d+\.\d+", page["image"]), "a version that does not change"
    assert all(port.startswith("127.0.0.1:") for port in page["ports"])
    assert [volume.split(":")[0] for volume in page["volumes"]] == list(added["volumes"])
    assert not set(added["volumes"]) & set(COMPOSE["volumes"])
    text = (ROOT / "docs/howto/openai.md").read_text()
    assert "docker compose -f compose.yaml -f examples/open-webui/compose.yaml up -d" in text


def loaded(path: Path) -> dict[str, Any]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text())
    return {"on" if name is True else name: value for name, value in workflow.items()}  # YAML 1.1 reads `on` as true


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_workflows_may_only_read(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in workflow["on"]
    used = [line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses: " in line]
    assert used
    assert [line for line in used if not line.startswith("uses: ./") and not _PIN.fullmatch(line)] == []
    for name, job in workflow["jobs"].items():
        allowed = {"id-token": "write"} if name == "publish" else None
        assert job.get("permissions") == allowed, name
        assert "timeout-minutes" in job or "uses" in job


def test_an_action_has_one_version() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for line in path.read_text().splitlines():
            if found := _PIN.search(line):
                pins.setdefault(found[1], set()).add(found[2])
    assert [name for name, versions in pins.items() if len(versions) > 1] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_targets_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = re.findall(r"\bmake ([a-z-]+)", path.read_text())
    assert called
    assert set(called) <= targets


def test_every_python_of_the_metadata_is_tested() -> None:
    job = loaded(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == pythons_of_metadata()
    assert job["steps"][-1] == {"run": "make test"}


def test_a_release_is_tested_before_it_is_published() -> None:
    workflow = loaded(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    assert set(workflow["jobs"]["publish"]["needs"]) == {"test", "build"}
    assert workflow["jobs"]["publish"]["environment"] == "pypi"
    build = " ".join(step.get("run", "") for step in workflow["jobs"]["build"]["steps"])
    for part in ("python -m build", "twine check --strict dist/*", "make wheel-test WHEEL="):
        assert part in build


def test_a_tag_that_is_not_the_version_stops_a_release() -> None:
    steps = loaded(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["build"]["steps"]
    (check,) = [step["run"] for step in steps if step.get("name", "").startswith("Check that the tag")]
    from tinsmith.version import __version__

    def exit_code(tag: str) -> int:
        return subprocess.run(["sh", "-c", check], cwd=ROOT, env={"GITHUB_REF_NAME": tag}, check=False).returncode

    assert exit_code(f"v{__version__}") == 0
    assert exit_code("v9.9.9") != 0


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms_are_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"textarea", "input", "checkboxes", "dropdown"}
    ids = [part["id"] for part in fields]
    assert len(set(ids)) == len(ids)
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)


def test_the_issue_forms_name_files_that_exist() -> None:
    text = "".join(path.read_text() for path in (ROOT / ".github").rglob("*.*"))
    named = re.findall(r"`((?:docs/)?[\w/-]+\.md)`", text)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []

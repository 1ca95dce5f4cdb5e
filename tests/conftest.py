"""What tests share: servers, clients that are closed at the end, child processes, and a hard limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support import server_arithmetic
from support.postgres import PostgresServer
from support.tinker_server import TinkerServer

from tinsmith import ClientConfig, Datum, ModelInput, SamplingClient, ServiceClient, TrainingClient

LIMIT_S = 20
"""What setting up, running or tearing down a test may take before it counts as hanging."""
MODEL = "stub/model"


def pytest_configure() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and their children inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hard_limit() -> None:
    """Asks for `limited` around each phase of a test."""


@contextlib.contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """Fail a test that hangs, wherever its main thread waits."""

    def expired(*_: object) -> None:
        pytest.fail(f"still waiting after {LIMIT_S} s")

    if "hard_limit" not in getattr(item, "fixturenames", ()):
        yield
        return
    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    with limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with limited(item):
        return (yield)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No setting of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith(("TINKER_", "TINSMITH_", "CLOUDFLARE_ACCESS_")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


@pytest.fixture
def make_server() -> Iterator[Callable[..., TinkerServer]]:
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(TinkerServer(**settings))


@pytest.fixture
def server(make_server: Callable[..., TinkerServer]) -> TinkerServer:
    return make_server()


@pytest.fixture
def connect(clean_environment: None, make_server: Any) -> Iterator[Callable[..., ServiceClient]]:
    """Makes clients of a server with short deadlines; they are closed before the servers."""
    with contextlib.ExitStack() as stack:

        def make(server: TinkerServer | str, *, api_key: str | None = None, **settings: Any) -> ServiceClient:
            url = server if isinstance(server, str) else server.url
            key = api_key or (server.key if isinstance(server, TinkerServer) else "tml-test-key")
            settings = {"first_contact_s": 5.0, "retry_deadline_s": 12.0, **settings}
            client = ServiceClient(config=ClientConfig(base_url=url, api_key=key, **settings))
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def client(connect: Callable[..., ServiceClient], server: TinkerServer) -> ServiceClient:
    return connect(server)


@pytest.fixture
def trainer(client: ServiceClient) -> TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4)


@pytest.fixture
def sampler(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model=MODEL)


@pytest.fixture
def datum() -> Callable[..., Datum]:
    """Makes a training example of these tokens; each token's target is the next one."""

    def make(*tokens: int, weight: float = 1.0) -> Datum:
        targets = [token + 1 for token in tokens]
        return Datum(ModelInput.from_ints(list(tokens)), {"target_tokens": targets, "weights": [weight] * len(targets)})

    return make


@pytest.fixture
def loss_of() -> Callable[..., float]:
    """The loss that the test server computes for datums."""

    def compute(*data: Datum) -> float:
        return server_arithmetic.run_loss(data, {}).metrics["loss:sum"]

    return compute


@pytest.fixture
def logprobs_of() -> Callable[[Datum], list[float]]:
    """The logprobs that the test server computes for a datum's targets."""

    def compute(datum: Datum) -> list[float]:
        logprobs = server_arithmetic.logprobs_of(datum.loss_fn_inputs["target_tokens"].to_numpy())
        return np.asarray(logprobs).tolist()

    return compute


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of the tests' own."""
    with contextlib.closing(PostgresServer()) as server:
        yield server


@dataclass
class Children:
    """Python programs in processes of their own; each gets the address and key of a server from its environment."""

    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, program: str, server: TinkerServer, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        known = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program), *arguments],
            env={**os.environ, **known, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, program: str, server: TinkerServer, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """(exit code, standard output, standard error)"""
        process = self.start(program, server, *arguments, **environ)
        output, errors = process.communicate(timeout=LIMIT_S)
        return process.returncode, output, errors


@pytest.fixture
def children(clean_environment: None) -> Iterator[Children]:
    made = Children()
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits for a condition that nothing announces."""

    def wait(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"not so after {timeout_s} s"
            time.sleep(0.01)

    return wait

"""https by the server itself: what is on the wire cannot be read, and a certificate that clients would refuse is
refused at the start."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.server_process import ServerProcess, environment

from tinsmith.cli.main import main
from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError
from tinsmith.server.http.tls import seconds_left, server_context

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

KEY = "tml-" + "k" * 30


def make_certificate(folder: Path, *options: str, days: str = "2") -> tuple[Path, Path]:
    """A self-signed certificate for this machine, and its key."""
    folder.mkdir()
    certificate, key = folder / "cert.pem", folder / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate)]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", days]
    how = options or ("-nodes",)
    subprocess.run([*made, *named, *how], check=True, capture_output=True, timeout=60)
    return certificate, key


def expired_certificate(folder: Path) -> tuple[Path, Path]:
    """One whose time is over: `openssl req` makes none, a certificate authority does."""
    certificate, key = make_certificate(folder)
    settings = folder / "ca.conf"
    settings.write_text(
        "[ca]\ndefault_ca = own\n[own]\ndatabase = index\nnew_certs_dir = .\nrand_serial = yes\ndefault_md = sha256\n"
        "policy = any\n[any]\ncommonName = supplied\n[req]\ndistinguished_name = any\n"
    )
    (folder / "index").touch()
    ask = ["req", "-new", "-key", key.name, "-out", "request.pem", "-subj", "/CN=localhost", "-config", settings.name]
    sign = [
        "ca",
        "-selfsign",
        "-batch",
        "-notext",
        "-config",
        settings.name,
        "-keyfile",
        key.name,
        "-in",
        "request.pem",
    ]
    when = ["-startdate", "190101000000Z", "-enddate", "200101000000Z", "-out", certificate.name]
    for command in (ask, sign + when):
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True, timeout=60)
    return certificate, key


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls") / "good")


def serving(place: Path, certificate: tuple[Path, Path]) -> ServerProcess:
    files = {"tls_cert": certificate[0], "tls_key": certificate[1]}
    return ServerProcess(place / "data", api_key=KEY, poll_s=1, **files)


PROGRAM = """
import tinsmith
with tinsmith.ServiceClient() as client:
    model = client.get_server_capabilities().supported_models[0].model_name
    trainer = client.create_lora_training_client(model, rank=4)
    datum = tinsmith.Datum(tinsmith.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    row = tinsmith.ModelInput.from_ints([1] * 500)
    large = [tinsmith.Datum(row, {"target_tokens": [2] * 500, "weights": [0.0] * 500})] * 900
    trainer.forward_backward([datum], "cross_entropy").result(60)
    print(len(trainer.forward(large, "cross_entropy").result(60).loss_fn_outputs))
    trainer.optim_step(tinsmith.AdamParams(learning_rate=1e-3)).result(60)
"""


def program(server: ServerProcess, **trusted: str) -> subprocess.CompletedProcess[str]:
    known = environment(TINKER_BASE_URL=server.url, TINKER_API_KEY=KEY, TINKER_TELEMETRY="0", **trusted)
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=120)


def test_clients_that_trust_the_certificate_work_and_others_send_nothing(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    with serving(tmp_path, certificate) as server:
        assert server.url.startswith("https://127.0.0.1:")
        done = program(server, SSL_CERT_FILE=str(certificate[0]))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "900"
        assert server.terminate() == 0, "and it stops as without TLS"


def test_a_certificate_that_is_not_trusted_ends_the_call_with_what_to_do(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    with serving(tmp_path, certificate) as server:
        refused = program(server, SSL_CERT_FILE=str(make_certificate(tmp_path / "other")[0]))
        assert refused.returncode != 0
        assert "SSL_CERT_FILE" in refused.stderr
        _check_wire(server, certificate[0])


def _check_wire(server: ServerProcess, certificate: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    # Plain http is not answered, and nothing of a key comes back.
    with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-api-key: " + KEY.encode() + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/1.1 200" not in plain.recv(4096)
    # TLS 1.1 is too old.
    context = ssl.create_default_context(cafile=str(certificate))
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as old,
        pytest.raises(ssl.SSLError),
        context.wrap_socket(old, server_hostname="localhost"),
    ):
        pass


def connected(server: ServerProcess, certificate: Path) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(certificate))
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)
    return context.wrap_socket(connection, server_hostname="localhost")


def everything(connection: ssl.SSLSocket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError, ssl.SSLEOFError):
        while piece := connection.recv(65536):
            received += piece
    return received


def test_refusals_reach_a_client_that_is_still_sending(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """Bad heads, heads that are too large and bodies that are too large: the answer is there, then the connection
    ends, with TLS as without."""
    with serving(tmp_path, certificate) as server:
        for sent, status in (
            (b"NONSENSE\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000 + b"\r\n\r\n", b"431"),
            (
                b"POST /api/v1/create_session HTTP/1.1\r\nhost: localhost\r\nx-api-key: "
                + KEY.encode()
                + b"\r\nconnection: close\r\ncontent-length: 999999999\r\n\r\n"
                + b"z" * 200_000,
                b"413",
            ),
        ):
            with connected(server, certificate[0]) as connection:
                connection.sendall(sent)
                assert everything(connection).startswith(b"HTTP/1.1 " + status), status


def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    other = make_certificate(tmp_path / "other")
    locked = make_certificate(tmp_path / "locked", "-passout", "pass:secret")
    late = expired_certificate(tmp_path / "late")
    cases: list[tuple[Any, Any, str]] = [
        (certificate[0], other[1], "does not belong to the certificate"),
        (tmp_path / "none.pem", certificate[1], "tls_cert .*none.pem cannot be read: No such file"),
        (certificate[0], tmp_path, "tls_key .* cannot be read: Is a directory"),
        (certificate[1], certificate[1], "cannot be used"),
        (locked[0], locked[1], "is encrypted"),
        (*late, "expired"),
    ]
    for cert, key, says in cases:
        with pytest.raises(TinkerError, match=says):
            seconds_left(server_context(cert, key), cert)


def test_how_long_a_certificate_is_good(certificate: tuple[Path, Path]) -> None:
    assert 86_400 < seconds_left(server_context(*certificate), certificate[0]) <= 2 * 86_400 + 60


def test_both_files_or_neither(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    for half in ({"tls_cert": certificate[0]}, {"tls_key": certificate[1]}):
        with pytest.raises(TinkerError, match="both tls_cert and tls_key"):
            ServerConfig(**half)
    result = CliRunner().invoke(main, ["serve", "--data-dir", str(tmp_path), "--tls-cert", str(certificate[0])])
    assert "tls_key is not set" in result.output

"""HTTPS without a proxy: a certificate and its key, checked before the server starts."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from pathlib import Path

from tinsmith.errors import TinkerError

SOON_S = 14 * 86_400
"""The server warns of a certificate that expires sooner than this."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context for TLS 1.2 or newer; raises if the certificate and key cannot be used."""
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise TinkerError(f"{name} {path} cannot be read: {os.strerror(error.errno or 0)}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        raise TinkerError(_explained(error, certificate, key)) from error
    return context


def seconds_left(context: ssl.SSLContext, certificate: Path, now: float | None = None) -> float:
    """Return how long the certificate is still valid; raise if it is not valid now.

    A handshake in memory, with a client that trusts exactly this certificate, shows what real clients will see.
    """
    client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_context.check_hostname = False
    client_context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_context.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client, server):
            _advance(side)
        found = client.getpeercert() or {}
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", None) or error.reason
        raise TinkerError(f"tls_cert {certificate}: clients would reject it: {reason}") from error
    return ssl.cert_time_to_seconds(str(found["notAfter"])) - (time.time() if now is None else now)


def _advance(side: ssl.SSLObject) -> None:
    with contextlib.suppress(ssl.SSLWantReadError):
        side.do_handshake()


def _refuse_password(key: Path) -> str:
    raise TinkerError(f"tls_key {key} is encrypted; store it without a passphrase, readable by the server only")


def _explained(error: ssl.SSLError, certificate: Path, key: Path) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"tls_key {key} does not belong to the certificate {certificate}"
    reason = error.reason or "it has no certificate, or no key, in PEM format"
    return f"tls_cert {certificate} and tls_key {key} cannot be used: {reason}"

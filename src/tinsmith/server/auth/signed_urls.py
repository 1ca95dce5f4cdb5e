"""Download URLs that work without a key until they expire: a path, an expiry time and a signature over both."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable
from urllib.parse import quote, urlencode

from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.wire.routes.own import DOWNLOAD_PREFIX

_NUMBER = re.compile(r"[0-9]{1,15}")


class Signer:
    """Signs and checks download URLs."""

    def __init__(self, secret: bytes, *, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(b"downloads" + secret).digest()
        self._clock = clock

    def url(self, base_url: str, name: str, ttl_s: float) -> tuple[str, float]:
        """Return a URL for `name`, and when it expires."""
        expires = int(self._clock() + ttl_s)
        query = urlencode({"expires": expires, "signature": self._sign(name, expires)})
        return f"{base_url}{DOWNLOAD_PREFIX}{quote(name, safe='/:')}?{query}", float(expires)

    def check(self, name: str, expires: str, signature: str) -> None:
        """Refuse a URL that this server did not sign, or that has expired."""
        is_ours = _NUMBER.fullmatch(expires) is not None and hmac.compare_digest(
            self._sign(name, int(expires)).encode(), signature.encode(errors="replace")
        )
        if not is_ours:
            raise NotAuthenticatedError("the download URL was not signed by this server")
        if int(expires) <= self._clock():
            raise NotAuthenticatedError("the download URL has expired; request a new one")

    def _sign(self, name: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires}:{name}".encode(errors="replace"), hashlib.sha256).hexdigest()

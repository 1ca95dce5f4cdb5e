"""The releases of the official SDK that tests use, oldest first; tools/official installs them under `.official`."""

from __future__ import annotations

from pathlib import Path

from tinsmith.wire.routes.table import Route

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / ".official"


def _listed(name: str) -> list[str]:
    lines = (ROOT / "tests" / "contract" / "official" / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


RELEASES = _listed("releases.txt")
"""Those whose types and bytes are compared with ours."""
SERVED_RELEASES = sorted([*RELEASES, *_listed("served.txt")], key=lambda release: [int(n) for n in release.split(".")])
"""Those that a server must serve."""
NEWEST = RELEASES[-1]


def uses(release: str, route: Route) -> bool:
    """Whether a release of the official client calls this endpoint."""
    line = line_of(release)
    return line_of(route.since) <= line and (route.until is None or line <= line_of(route.until))


def line_of(version: str) -> tuple[int, int]:
    """Return the major and minor number of a release."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)

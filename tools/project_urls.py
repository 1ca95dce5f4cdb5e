"""Project URLs in the package's metadata, from the repository whose workflow builds it.

GitHub sets these variables in every workflow, so a release of a fork points to the fork. A build anywhere else has no
URLs, rather than wrong ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGES = {
    "Source": "",
    "Documentation": "/tree/main/docs",
    "Changelog": "/blob/main/CHANGELOG.md",
    "Issues": "/issues",
    "Security": "/security/policy",
}


def project_urls(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the URLs of the repository that a workflow runs in; none outside of one."""
    server, repository = environ.get("GITHUB_SERVER_URL"), environ.get("GITHUB_REPOSITORY")
    if not server or not repository:
        return {}
    return {name: f"{server}/{repository}{page}" for name, page in PAGES.items()}


class ProjectUrls(MetadataHookInterface):
    """What hatchling calls when it builds the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["urls"] = project_urls(os.environ)

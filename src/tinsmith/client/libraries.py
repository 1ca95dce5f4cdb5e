"""Packages that only some of what a client can do needs; imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from tinsmith.errors import MissingPackageError


def library(name: str, purpose: str) -> Any:
    """A package, or an error that says what needs it and how to get it. One that is there but broken says so itself."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(name, purpose) from error

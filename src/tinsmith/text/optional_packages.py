"""Optional packages, imported when a feature that needs them is used."""

from __future__ import annotations

import importlib
from typing import Any

from tinsmith.errors import MissingPackageError


def library(name: str, purpose: str) -> Any:
    """Import a package, or raise an error that says what needs it and how to install it.

    A package that is installed but broken raises its own error.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(name, purpose) from error


def import_torch(purpose: str) -> Any:
    """Import torch, or raise an error that says how to install it."""
    return library("torch", purpose)

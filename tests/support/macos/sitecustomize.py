"""Loaded at the start of every Python process whose PYTHONPATH has this directory: our modules see macOS.

`sys.platform` says so to our modules only, since others then look for libraries of macOS. Functions and constants that
macOS lacks are gone for all, as are `/proc` and the functions of the GNU C library that our modules call.
"""

from __future__ import annotations

import builtins
import ctypes
import fcntl
import mmap
import os
import pathlib
import sys
import types
from typing import Any


class SysOnMacos(types.ModuleType):
    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


_import, _read_text, _function = builtins.__import__, pathlib.Path.read_text, ctypes.CDLL.__getattr__
_sys = SysOnMacos("sys")


def imported(name: str, globals: Any = None, *more: Any, **options: Any) -> types.ModuleType:
    if name == "sys" and globals is not None and str(globals.get("__package__")).startswith("tinsmith"):
        return _sys
    return _import(name, globals, *more, **options)


def read_text(path: pathlib.Path, *arguments: Any, **options: Any) -> str:
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return _read_text(path, *arguments, **options)


def function(library: ctypes.CDLL, name: str) -> Any:
    if name in ("mallopt", "malloc_trim", "prctl"):
        raise AttributeError(name)
    return _function(library, name)


MISSING: dict[Any, tuple[str, ...]] = {
    os: ("eventfd", "memfd_create", "pidfd_open", "posix_fallocate", "sched_getaffinity", "sched_setaffinity"),
    fcntl: ("F_GETPIPE_SZ", "F_SETPIPE_SZ"),
    mmap: ("MADV_HUGEPAGE",),
}
for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
if hasattr(os, "process_cpu_count"):  # which uses sched_getaffinity on Linux
    os.process_cpu_count = os.cpu_count
builtins.__import__ = imported
pathlib.Path.read_text = read_text  # type: ignore[method-assign]
ctypes.CDLL.__getattr__ = function  # type: ignore[method-assign]

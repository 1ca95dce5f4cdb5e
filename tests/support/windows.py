"""A process in which Python looks as it does on Windows, as far as one can tell without Windows.

`PRETEND` runs before the program. What the standard library and other packages decide when they are imported is decided
as on this system. Then modules, functions and constants that Windows lacks disappear, and what behaves differently
there fails.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

TIMEOUT_S = 120.0

PRETEND = """
import aiohappyeyeballs, aiohttp, asyncio, click.testing, concurrent.futures, ctypes, fcntl, getpass, httptools, jinja2
import msgspec, multiprocessing, numpy, os, pathlib, platform, rich.console, rich.progress, rich.table, select, shutil
import signal, socket, ssl, subprocess, sys, tarfile, tempfile, tokenizers, types, urllib.request, uuid, zstandard

def locking(descriptor, mode, count):
    assert (mode, count) == (2, 1), "not blocking, one byte"
    _flock(descriptor, _no_wait)

_flock, _no_wait = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB
_open = os.open

def opened(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return _open(path, *arguments, **options)

def lacking(*_arguments):
    raise NotImplementedError

def ending(pid, number):
    raise AssertionError(f"os.kill({pid}, {number}) ends the process on Windows")

sys.platform = "win32"
for name in ("fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
for name in (
    "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fork", "getuid", "killpg", "posix_fallocate", "pwrite",
    "readv", "register_at_fork", "setsid", "sysconf",
):
    delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGQUIT"):
    delattr(signal, name)
os.open, os.kill, shutil._use_fd_functions = opened, ending, False
for name in ("add_signal_handler", "add_reader", "add_writer"):
    setattr(asyncio.SelectorEventLoop, name, lacking)
del name
"""


COMMAND = """
from tinsmith.cli.main import main
main(prog_name="tinsmith")
"""


def run_on_windows(
    program: str, env: Mapping[str, str], *arguments: str, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRETEND + program, *arguments],
        env=dict(env),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

"""Who writes a directory aside, as a part of its name: the host, its boot, and a number of its own.

A lock says whether a writer lives, but not on every filesystem to every host. So it is asked by those alone who share a
kernel with the writer, as containers of one host do, whatever they are called; where the same host has another boot by
now, the writer is dead.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

from io_daemon.disk.swap_file import boot_id

_LETTERS = 8


def new_writer() -> str:
    """24 letters, which no other writer has."""
    return _host() + _boot() + secrets.token_hex(_LETTERS // 2)


def shares_kernel(writer: str) -> bool:
    """Whether locks tell if the writer lives. What is named otherwise is of a version that asked locks alone."""
    return not _is_named(writer) or writer[_LETTERS : 2 * _LETTERS] == _boot()


def is_of_former_boot(writer: str) -> bool:
    """Whether the writer has ended with its host."""
    return _is_named(writer) and writer.startswith(_host()) and not shares_kernel(writer)


def _is_named(writer: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{24}", writer) is not None


@cache
def _host() -> str:
    machine = ""
    with suppress(OSError):  # images of one system have the same: their names differ
        machine = Path("/etc/machine-id").read_text().strip()
    return _short(f"{machine} {platform.node()}")


@cache
def _boot() -> str:
    with suppress(OSError):
        return _short(boot_id())
    return _short(str(os.stat("/proc/1").st_ctime_ns))


def _short(text: str) -> str:
    return blake2b(text.encode(), digest_size=_LETTERS // 2).hexdigest()

"""A directory that is written beside its place: locked while its writer lives, and gone with what was not published."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[Path]:
    """``path``, a directory of this process's own, is locked inside, and removed at the end. Raises OSError."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a filesystem without locks: nobody can know whether its writer lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether a process that lives writes into the directory. Raises OSError."""
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(lock)
    return False


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's names, on the drive. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

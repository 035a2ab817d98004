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
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        remove(path)
        raise
    try:
        with suppress(OSError):  # a filesystem without locks: nobody can know whether its writer lives
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        remove(path)
        with suppress(OSError):
            os.close(lock)  # nothing was written through it


def remove(path: Path) -> None:
    """Remove a directory with all in it, or a file, or a link but not what it leads to; what cannot be, stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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

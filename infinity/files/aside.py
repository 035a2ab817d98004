"""A directory that is written beside its place: locked while its writer lives, and gone with what was not published."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path

from infinity.files.writers import is_of_former_boot, shares_kernel

_log = logging.getLogger(__name__)


@contextmanager
def held(make: Callable[[], Path]) -> Iterator[Path]:
    """A directory of this process's own, which is locked inside, and removed at the end. ``make`` makes one, of another
    name each time. Raises OSError."""
    while (lock := _lock(path := make())) is None:
        pass  # who removes what the dead have left has met it before it was locked
    try:
        yield path
    finally:
        remove(path)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # children that were forked meanwhile have the descriptor, too
        with suppress(OSError):
            os.close(lock)  # nothing was written through it


def _lock(path: Path) -> int | None:
    """A descriptor of the directory, which is locked; None if it is being removed."""
    try:
        lock = _open(path)
    except FileNotFoundError:
        return None
    except OSError:
        remove(path)
        raise
    if _is_free(lock) is not False:
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(lock).st_ino:
                return lock
    os.close(lock)
    return None


def remove(path: Path) -> None:
    """Remove a directory with all in it, or a file, or a link but not what it leads to; what cannot be, stays."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # a directory that may not be written keeps its own, and no more
        else:
            path.unlink(missing_ok=True)


class Left(Enum):
    """What became of a directory that some writer has made."""

    REMOVED = "its writer is dead"
    LIVES = "its writer has locked it"
    UNKNOWN = "another host's writer may live, or there are no locks"


def remove_left(path: Path, writer: str) -> Left:
    """``remove`` what a writer that is dead has left, and nothing where that is not sure. ``writer``: what the name
    says of it, see ``writers``. Raises OSError."""
    try:
        lock = _open(path)
    except FileNotFoundError:
        return Left.REMOVED
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # a file, a link
            raise
        remove(path)
        return Left.REMOVED
    try:
        is_free = _is_free(lock)
        if is_free is False:
            return Left.LIVES
        if (is_free and shares_kernel(writer)) or is_of_former_boot(writer):
            remove(path)  # still locked: who has just made it sees that it is gone
            return Left.REMOVED
        _log.warning("%s is left: %s; remove it if nothing writes there", path, Left.UNKNOWN.value)
        return Left.UNKNOWN
    finally:
        os.close(lock)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_free(descriptor: int) -> bool | None:
    """Lock it, if nobody else has. None on a filesystem without locks, where nobody can know."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        return False if error.errno == errno.EACCES else None
    return True


def sync(path: Path) -> None:
    """Have a file's bytes, or a directory's names, on the drive. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

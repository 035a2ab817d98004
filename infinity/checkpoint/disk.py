"""Files that must be on the disk when a call returns, and the words for a disk that refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infinity.errors import CheckpointError
from infinity.files.aside import sync

_REMEDIES: Final = {
    errno.ENOSPC: "free space there, or save to another directory",
    errno.EDQUOT: "free space within your quota, or save to another directory",
    errno.EROFS: "save to a directory on a filesystem that can be written",
    errno.EACCES: "change its permissions, or name another directory",
    errno.EPERM: "change its permissions, or name another directory",
    errno.ENOENT: "it has vanished, or never was (nodes must share it): name another directory, or restore it",
    errno.EEXIST: "a file, or a link that leads nowhere, is in the way: remove it, or name another directory",
    errno.EISDIR: "a directory is in the way: remove it, or name another one",
    errno.ENOTDIR: "a part of the path is a file: name another directory",
    errno.ENAMETOOLONG: "name a directory with a shorter path",
    errno.ELOOP: "links lead around in a circle: name another directory",
    errno.EFBIG: "the filesystem or `ulimit -f` allows no such size: save to another directory, or raise the limit",
    errno.ETIMEDOUT: "the drive, or the server that has it, takes nothing: see to it, or save to another one",
    errno.EIO: "the drive has failed: use another one",
}


@contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """An OSError inside becomes a CheckpointError that names the file and what to do. Where a name cannot be given, it
    is the name that is told: something may be in its way, and what should have had it may be gone by then."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        names = (name for name in (error.filename2, error.filename) if isinstance(name, str))
        named = Path(next(names, path))
        raise CheckpointError(
            named,
            f"cannot be {doing}: {os.strerror(number)} (errno {number})" if number else f"cannot be {doing}: {error}",
            _REMEDIES.get(number, "see to the filesystem, then try again"),
            errno=number,
        ) from error


def write_whole(path: Path, data: bytes) -> None:
    """A new file with ``data``, on the disk."""
    with disk_errors(path, "written"), path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Have the directory's names on the disk."""
    with disk_errors(path, "synced"):
        sync(path)

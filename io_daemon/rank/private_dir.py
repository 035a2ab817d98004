"""The directory of a private daemon's socket: made by the process that starts the daemon, locked while it is in use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from io_daemon.config import SOCKET_PATH_BYTES_MAX
from io_daemon.errors import ConfigError
from io_daemon.rank.socket_lock import SocketLock, lock_path

PREFIX: Final = "infinity."
"""Not that of a user's own directory, ``infinity-UID``; short, because a socket's path must be."""
SOCKET_NAME: Final = "io.sock"
OWN_NAMES: Final = (SOCKET_NAME, lock_path(Path(SOCKET_NAME)).name)
PATH_BYTES: Final = len(f"/{PREFIX}xxxxxxxx/{SOCKET_NAME}")
"""A socket's path is so much longer than the parent's; ``mkdtemp`` draws eight letters."""
TRIES_MAX: Final = 100
NO_MORE_FILES: Final = (errno.EMFILE, errno.ENFILE)


class PrivateDir:
    """Fresh, mode 0700, and locked (``flock``) as long as its maker lives: one that nobody has locked is a leftover."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.socket = path / SOCKET_NAME
        self._fd = fd

    @classmethod
    def make(cls, parents: Sequence[Path]) -> Self:
        """Make one below the first of ``parents`` that is writable and short enough for a socket; else ConfigError.
        OSError where this process may open no more files."""
        for parent in parents:
            if len(os.fsencode(parent)) + PATH_BYTES > SOCKET_PATH_BYTES_MAX:
                continue
            try:
                for _ in range(TRIES_MAX):
                    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
                    try:
                        path.chmod(0o700)  # whatever the umask takes away
                        fd = _lock(path)
                    except OSError:
                        path.rmdir()
                        raise
                    if fd is not None:
                        return cls(path, fd)
                    with contextlib.suppress(FileNotFoundError):  # somebody has cleaned it up before it was locked
                        path.rmdir()  # it cannot be locked here
            except OSError as error:
                if error.errno in NO_MORE_FILES:
                    raise
        tried = ", ".join(dict.fromkeys(str(parent) for parent in parents))
        raise ConfigError("io_daemon.socket", "auto", f"no writable directory for a socket ({tried}): write a path")

    def remove(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            _remove(self.path)
            os.close(self._fd)
            self._fd = -1


def remove_if_private(directory: Path) -> None:
    """The daemon that has unlinked its socket in it does this."""
    if directory.name.startswith(PREFIX):
        with contextlib.suppress(OSError):  # gone already, or there is something else in it
            directory.rmdir()


def remove_abandoned(parents: Sequence[Path]) -> list[Path]:
    """Remove the private directories of this user below ``parents`` whose maker and whose daemon are gone."""
    removed = []
    for path in sorted({path for parent in parents for path in parent.glob(f"{PREFIX}*")}):
        if (fd := _lock(path)) is None:
            continue
        try:
            with SocketLock.take(path / SOCKET_NAME) or contextlib.nullcontext() as lock:
                gone = lock is not None and _remove(path)
        except ConfigError:
            gone = False  # what lies there is not ours
        finally:
            os.close(fd)
        if gone:
            removed.append(path)
    return removed


def _lock(path: Path) -> int | None:
    """None unless it is a directory of this user that nobody has locked. OSError where no more files may be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in NO_MORE_FILES:
            raise
        return None
    try:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path, follow_symlinks=False), status):
                return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _remove(directory: Path) -> bool:
    """Remove it with what we put into it; False if there is more."""
    try:
        for name in OWN_NAMES:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()
    except OSError:
        return False
    return True

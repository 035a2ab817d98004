"""The lock beside a daemon's socket: whoever holds it may bind there, and nobody else is about to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Final, Self

from io_daemon.errors import ConfigError

SUFFIX: Final = ".lock"
TRIES_MAX: Final = 100


class SocketLock:
    """A lock is held from before the socket is bound until it is unlinked. (A probe alone cannot tell a daemon that has
    bound and does not listen yet from one that was killed: both refuse.) A context manager that lets go."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def take(cls, socket_path: Path) -> Self | None:
        """None if another process holds it. Raises ConfigError if a file stands there that is no lock of this user."""
        path = lock_path(socket_path)
        for _ in range(TRIES_MAX):
            fd = _open(path, socket_path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _stands_for(path, fd):
                    return cls(path, fd)  # else its holder has unlinked it in between
            except OSError as error:
                os.close(fd)
                if isinstance(error, BlockingIOError):
                    return None
                reason = f"{path} cannot be locked ({error.strerror}): name one on a local filesystem"
                raise ConfigError("socket", str(socket_path), reason) from error
            os.close(fd)
        raise ConfigError("socket", str(socket_path), f"{path} is replaced all the time: name another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if _stands_for(self._path, self._fd):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def lock_path(socket_path: Path) -> Path:
    """Raises ConfigError for a path that ends in no name."""
    if not socket_path.name:
        raise ConfigError("socket", str(socket_path), "is a directory: name a file in one, such as ./io.sock")
    return socket_path.with_name(socket_path.name + SUFFIX)


def _open(path: Path, socket_path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise ConfigError("socket", str(socket_path), f"{path} cannot be made ({error.strerror})") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size:
        os.close(fd)
        raise ConfigError("socket", str(socket_path), f"{path} beside it is no lock of ours: name another socket")
    return fd


def _stands_for(path: Path, fd: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    return False

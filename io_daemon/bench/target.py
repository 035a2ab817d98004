"""The file that is measured: a swap file of the daemon's, so it is reserved, headed, locked and collected as such."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from io_daemon.bench.settings import FREE_SHARE_KEPT
from io_daemon.disk.swap_dir import SwapDir
from io_daemon.disk.swap_file import Owner, SwapFile
from io_daemon.errors import DeviceIOError, SwapSpaceError
from io_daemon.shared.protocol import PAGE_BYTES

DATA_OFFSET: Final = 1 << 20
"""Where the blocks begin: behind the header page, and aligned as a whole device's blocks would be."""


class Target:
    """A context manager: whatever happens inside, the file is gone afterwards; after a kill, ``gc`` takes it."""

    def __init__(self, directory: SwapDir, job: int, num_bytes: int, *, direct: bool) -> None:
        """Reserves ``num_bytes`` behind the header. Raises SwapSpaceError, DeviceIOError."""
        self.directory = directory
        self.num_bytes = num_bytes
        self.direct = direct
        _refuse_to_fill(directory.path, DATA_OFFSET + num_bytes)
        self._file = SwapFile.create(
            directory.path,
            job=f"bench-{os.getpid()}",
            rank=job,
            frame_bytes=PAGE_BYTES,
            file_index=0,
            owner=Owner.this_process(),
            direct=direct,
        )
        try:
            self._file.grow(DATA_OFFSET + num_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def fd(self) -> int:
        return self._file.fd

    def refuse_removed(self) -> None:
        """Raises DeviceIOError if somebody else has unlinked it; the open file goes on existing."""
        if os.fstat(self.fd).st_nlink == 0:
            raise self._error(errno.ENOENT, "measurement (the file was removed meanwhile)")

    def drop_cache(self) -> None:
        """Write back and forget what the page cache holds of it, for runs without direct I/O."""
        try:
            os.fsync(self.fd)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(error.errno or errno.EIO, "write-back") from error

    def _error(self, error_number: int, operation: str) -> DeviceIOError:
        return DeviceIOError(
            errno=error_number, path=str(self.path), offset=0, expected_bytes=0, actual_bytes=0, operation=operation
        )

    def close(self) -> None:
        self._file.unlink()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _refuse_to_fill(directory: Path, num_bytes: int) -> None:
    """A disk filled to the brim takes other programs down, and is slower than it will be in use."""
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    kept_bytes = int(space.f_blocks * space.f_frsize * FREE_SHARE_KEPT)
    if num_bytes > free_bytes - kept_bytes:
        raise SwapSpaceError(
            path=str(directory),
            needed_bytes=num_bytes + kept_bytes,
            free_bytes=free_bytes,
            remedy=f"{FREE_SHARE_KEPT:.0%} of a disk stay free: lower --size, or free some space",
        )

"""One preallocated file per tenant and swap directory: a header page, then extents.

The file is created, locked (``flock``) and read and written through one open file description. The kernel drops that
lock only when the last reference to the description is gone, and I/O in flight holds one: so whoever gets the lock of
a dead daemon's file knows that its last byte has landed. (Measured: after a kill -9, io_uring reads go on landing for
up to 0.3 s.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from io_daemon._native import allocate, checksum
from io_daemon.disk.kernel_text import read_text
from io_daemon.errors import DeviceIOError, SwapSpaceError, remedy_against
from io_daemon.shared.protocol import PAGE_BYTES, PROTOCOL_VERSION
from io_daemon.shared.wire import SWAP_HEADER, SWAP_MAGIC

PREFIX: Final = "infinity-"
SUFFIX: Final = ".swap"
SAME_NAME_MAX: Final = 10_000
ZEROS_BYTES: Final = 1 << 20


MACHINE_CHARS_MAX: Final = 64
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""The running kernel's own mark: two machines may have one name. Some sandboxes hide it."""


def boot_id() -> str:
    """Empty where it is hidden."""
    return read_text(BOOT_ID) or ""


def machine_id() -> str:
    """What tells this machine from others that may see the same directory: machine-id(5), or its name where there is
    none."""
    found = read_text(Path("/etc/machine-id"))
    if found is None or found == "uninitialized":
        found = os.uname().nodename
    return found.encode("ascii", "replace")[:MACHINE_CHARS_MAX].decode()


def process_starttime(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started (/proc/PID/stat field 22); None if it is gone."""
    stat = read_text(Path(f"/proc/{pid}/stat"))
    if stat is None:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name may hold spaces, parentheses, any bytes
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Owner:
    """A process, named so that neither a reused pid nor a reboot can be taken for it."""

    pid: int
    starttime: int
    boot_id: str
    machine: str
    """Empty: a daemon that did not say so yet, and is taken for one of this machine."""

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, process_starttime(pid) or 0, boot_id(), machine_id())

    def lives(self) -> bool:
        """Whether it runs, on this machine."""
        return self.boot_id == boot_id() and process_starttime(self.pid) == self.starttime

    def is_elsewhere(self) -> bool:
        """It belongs to another machine, which alone knows whether it lives. A container whose name is new each time is
        still on the machine that has not been booted since, where the kernel's mark is seen."""
        here = boot_id()
        return not (here and self.boot_id == here) and self.machine not in ("", machine_id())


@dataclass(frozen=True, kw_only=True)
class SwapHeader:
    """``wire::SwapHeader`` without magic, version and checksum, which ``pack`` and ``unpack`` deal with."""

    job: str
    rank: int
    file_index: int
    file_bytes: int
    frame_bytes: int
    created_ns: int
    owner: Owner

    def pack(self) -> bytes:
        """The header page."""
        page = bytearray(
            SWAP_HEADER.pack(
                {
                    "magic": SWAP_MAGIC,
                    "version": PROTOCOL_VERSION,
                    "rank": self.rank,
                    "file_bytes": self.file_bytes,
                    "frame_bytes": self.frame_bytes,
                    "created_ns": self.created_ns,
                    "owner_starttime": self.owner.starttime,
                    "owner_pid": self.owner.pid,
                    "file_index": self.file_index,
                    "boot_id": self.owner.boot_id.encode(),
                    "job": self.job.encode(),
                    "header_checksum": 0,
                    "machine": self.owner.machine.encode(),
                }
            )
        )
        _store_checksum(page, _page_checksum(page))
        return bytes(page)

    @classmethod
    def unpack(cls, page: bytes) -> SwapHeader | None:
        """None unless the page is a header that this program wrote, whole."""
        if len(page) < PAGE_BYTES:
            return None
        record = np.frombuffer(page, SWAP_HEADER.dtype, count=1)[0]
        if record["magic"] != SWAP_MAGIC:
            return None
        blank = bytearray(page[:PAGE_BYTES])
        _store_checksum(blank, 0)
        if _page_checksum(blank) != record["header_checksum"]:
            return None
        boot, machine = bytes(record["boot_id"]), bytes(record["machine"])
        if not (boot.isascii() and machine.isascii()):
            return None  # a checksum is no proof of who wrote it
        return cls(
            job=bytes(record["job"]).decode(errors="replace"),
            rank=int(record["rank"]),
            file_index=int(record["file_index"]),
            file_bytes=int(record["file_bytes"]),
            frame_bytes=int(record["frame_bytes"]),
            created_ns=int(record["created_ns"]),
            owner=Owner(
                int(record["owner_pid"]), int(record["owner_starttime"]), boot.decode("ascii"), machine.decode("ascii")
            ),
        )


def _page_checksum(page: bytearray) -> int:
    return checksum(np.frombuffer(page, np.uint8))


def _store_checksum(page: bytearray, value: int) -> None:
    offset = SWAP_HEADER.offset_of("header_checksum")
    page[offset : offset + 4] = value.to_bytes(4, "little")


class SwapFile:
    """Open, locked, preallocated. ``fd`` is the one description that does the I/O; ``close`` drops file and space."""

    def __init__(self, path: Path, fd: int, header: SwapHeader) -> None:
        self.path = path
        self.fd = fd
        self.header = header
        self._unreserved_from: int | None = None
        """Where the first bytes begin that no space is reserved for; None: all has its space."""

    @classmethod
    def create(
        cls, directory: Path, *, job: str, rank: int, frame_bytes: int, file_index: int, owner: Owner, direct: bool
    ) -> SwapFile:
        """A new file of one header page. Raises DeviceIOError or SwapSpaceError."""
        path, fd = _create_exclusive(directory, job, rank, direct)
        header = SwapHeader(
            job=job,
            rank=rank,
            file_index=file_index,
            file_bytes=PAGE_BYTES,
            frame_bytes=frame_bytes,
            created_ns=time.time_ns(),
            owner=owner,
        )
        swap_file = cls(path, fd, header)
        try:
            swap_file._lock()
            swap_file._allocate(PAGE_BYTES)
            swap_file._write_header()
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to tell
                swap_file.unlink()
            swap_file.close()
            raise
        return swap_file

    @property
    def file_bytes(self) -> int:
        return self.header.file_bytes

    @property
    def device(self) -> int:
        """The number of the filesystem that it lies on."""
        return os.fstat(self.fd).st_dev

    @property
    def free_bytes(self) -> int:
        """What its filesystem has left."""
        space = os.fstatvfs(self.fd)
        return space.f_bavail * space.f_frsize

    def grow(self, file_bytes: int, *, reserve: bool = True) -> None:
        """Reserve space up to ``file_bytes`` in all, header page included; or later, where the filesystem can do that
        beside what is written by then. On failure the file is as before.

        Raises SwapSpaceError or DeviceIOError."""
        if file_bytes <= self.file_bytes:
            return
        before = self.header
        if reserve or not self._lengthen(file_bytes):
            self._allocate(file_bytes)
        self.header = replace(before, file_bytes=file_bytes)
        try:
            self._write_header()
        except DeviceIOError:
            with contextlib.suppress(DeviceIOError):  # the first error is the one to tell
                self.shrink(before.file_bytes)
            raise

    def reserve(self) -> None:
        """Reserve what ``grow`` put off. What was written meanwhile stays, and I/O may be in flight. Raises
        SwapSpaceError."""
        if self._unreserved_from is None:
            return
        num_bytes = self.file_bytes - self._unreserved_from
        try:
            allocate(self.fd, self._unreserved_from, num_bytes)
        except OSError as error:
            raise self._no_space(error, num_bytes) from error
        self._unreserved_from = None

    def shrink(self, file_bytes: int) -> None:
        """Give back what lies beyond ``file_bytes``: the undoing of a ``grow``. Raises DeviceIOError."""
        self.header = replace(self.header, file_bytes=file_bytes)
        if self._unreserved_from is not None and self._unreserved_from >= file_bytes:
            self._unreserved_from = None
        try:
            os.ftruncate(self.fd, file_bytes)
        except OSError as error:
            raise self._failed("truncation", error, offset=file_bytes) from error
        self._write_header()

    def unlink(self) -> None:
        """Remove the name, if it is still this file's; the space follows when the last I/O has let go of the file."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self.fd)):
                os.unlink(self.path)

    def give_up_space(self) -> None:
        """Keep the header alone, for a later reclaim, where the file still has a name: somebody has moved it, or its
        directory. No I/O may be in flight. Raises DeviceIOError."""
        if os.fstat(self.fd).st_nlink:
            self.shrink(PAGE_BYTES)

    def close(self) -> None:
        os.close(self.fd)

    def _lock(self) -> None:
        """Nobody else can hold it: until the header is written, no reclaim takes the file for ours."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self._failed("lock", error) from error

    def _allocate(self, file_bytes: int) -> None:
        """Only what lies beyond the end is touched: I/O may be in flight before it."""
        before_bytes = os.fstat(self.fd).st_size
        try:
            _reserve(self.fd, before_bytes, file_bytes - before_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, before_bytes)  # also gives back blocks that were reserved beyond the end
            raise self._no_space(error, file_bytes - before_bytes) from error

    def _lengthen(self, file_bytes: int) -> bool:
        """Make it longer without any space. False where none could be reserved afterwards but by writing zeros, which
        must not meet what is there by then."""
        before_bytes = os.fstat(self.fd).st_size
        try:
            allocate(self.fd, before_bytes, PAGE_BYTES)
            os.ftruncate(self.fd, file_bytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, before_bytes)
            if error.errno == errno.EOPNOTSUPP:
                return False
            raise self._no_space(error, file_bytes - before_bytes) from error
        if self._unreserved_from is None:
            self._unreserved_from = before_bytes
        return True

    def _no_space(self, error: OSError, needed_bytes: int) -> SwapSpaceError:
        return SwapSpaceError(
            path=str(self.path.parent),
            needed_bytes=needed_bytes,
            free_bytes=self.free_bytes,
            errno=error.errno or errno.EIO,
            remedy=remedy_against(error.errno, "name another directory, or add one"),
        )

    def _write_header(self) -> None:
        with mmap.mmap(-1, PAGE_BYTES) as page:  # page-aligned, as direct I/O wants it
            page[:] = self.header.pack()
            try:
                written = os.pwrite(self.fd, page, 0)
            except OSError as error:
                raise self._failed("write of the header", error, expected_bytes=PAGE_BYTES) from error
        if written != PAGE_BYTES:
            raise self._failed("write of the header", None, expected_bytes=PAGE_BYTES, actual_bytes=written)
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise self._failed("fsync", error, expected_bytes=PAGE_BYTES, actual_bytes=PAGE_BYTES) from error

    def _failed(
        self, operation: str, error: OSError | None, *, offset: int = 0, expected_bytes: int = 0, actual_bytes: int = 0
    ) -> DeviceIOError:
        """``error``: None of a short transfer."""
        return DeviceIOError(
            errno=0 if error is None else error.errno or errno.EIO,
            path=str(self.path),
            offset=offset,
            expected_bytes=expected_bytes,
            actual_bytes=actual_bytes,
            operation=operation,
        )


def _reserve(fd: int, offset: int, num_bytes: int) -> None:
    """Where the filesystem has no fallocate, zeros are written. Raises OSError."""
    try:
        allocate(fd, offset, num_bytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        end = offset + num_bytes
        with mmap.mmap(-1, ZEROS_BYTES) as zeros, memoryview(zeros) as view:  # page-aligned, for direct I/O
            while offset < end:
                with view[: min(ZEROS_BYTES, end - offset)] as part:
                    offset += os.pwrite(fd, part, offset)


def _create_exclusive(directory: Path, job: str, rank: int, direct: bool) -> tuple[Path, int]:
    """A name nobody has; a job may attach the same rank twice (two engines in one process)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    for number in range(SAME_NAME_MAX):
        path = directory / f"{PREFIX}{job}-r{rank}-{number}{SUFFIX}"
        try:
            return path, os.open(path, flags, 0o600)
        except FileExistsError:
            continue
        except OSError as error:
            raise DeviceIOError(
                errno=error.errno or errno.EIO,
                path=str(path),
                offset=0,
                expected_bytes=0,
                actual_bytes=0,
                operation="creation",
            ) from error
    raise DeviceIOError(
        errno=errno.EEXIST, path=str(directory), offset=0, expected_bytes=0, actual_bytes=0, operation="creation"
    )

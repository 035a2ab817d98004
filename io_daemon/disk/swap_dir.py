"""A directory that the daemon serves: is it fit for swap files, and what did dead daemons leave in it?"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import shlex
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from io_daemon.config import is_text, resolved
from io_daemon.disk.mounts import find_mount, mount_written
from io_daemon.disk.swap_file import PREFIX, SUFFIX, SwapHeader
from io_daemon.errors import ConfigError, SwapBusyError, remedy_against
from io_daemon.shared.protocol import PAGE_BYTES

log = logging.getLogger(__name__)

LOCK_POLL_S: Final = 0.005
LOCAL_FILESYSTEMS: Final = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "overlay", "tmpfs"}
)
"""One machine alone has them: whoever wrote there before its boot is dead, whatever its name was (a container's)."""
THIN_FILESYSTEMS: Final = frozenset({"btrfs", "zfs", "overlay", "bcachefs", "nfs", "nfs4", "fuse"})
"""Here a successful fallocate does not promise that a later write finds space."""
UNKNOWN: Final = "unknown"
MEMORY_FILESYSTEMS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})


@dataclass(frozen=True)
class SwapDir:
    """A checked directory. ``notes``: what the user should know about it, one line each."""

    path: Path
    direct: bool
    filesystem: str
    notes: tuple[str, ...]
    in_memory: bool = False
    """What is written there goes to memory, be it by way of an overlay."""

    def free_bytes(self) -> int:
        """0 if the directory is there no more, or its filesystem does not answer: nothing more can be had of it."""
        try:
            space = os.statvfs(self.path)
        except OSError:
            return 0
        return space.f_bavail * space.f_frsize


def unusable(path: str) -> str:
    """Why no swap file can be made there, and the remedy; "" where one can."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return _missing(path)
    except OSError as error:
        return f"cannot be looked at ({error.strerror}): name another directory"
    if not stat.S_ISDIR(mode):
        return "is no directory: name the one that swap files go to"
    try:
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        remedy = remedy_against(error.errno, "chown or chmod it, or name another")
        return f"is not writable by uid {os.getuid()} ({error.strerror}): {remedy}"


def _missing(path: str) -> str:
    if path.startswith("~") or "$" in path:
        return "does not exist: ~ and $ stand for nothing here, write the path out"
    if os.path.islink(path):
        return f"is a link to {os.readlink(path)}, which does not exist: make that, or name another"
    where = "" if os.path.isabs(path) else "in the working directory, or write an absolute path, "
    return f"does not exist: mkdir -p {shlex.quote(path)}, {where}on the NVMe filesystem"


def check_swap_dir(path: Path) -> SwapDir:
    """Exists, writable, direct I/O or not. Raises ConfigError."""
    if not is_text(str(path)):
        raise ConfigError("swap_dirs", ascii(str(path)), "is no UTF-8, which all messages are: name another")
    if remedy := unusable(str(path)):
        raise ConfigError("swap_dirs", str(path), remedy)
    notes = []
    direct_error = probe_direct(path)
    if direct_error is not None:
        notes.append(
            f"{path}: no direct I/O ({direct_error}); falling back to buffered I/O, which goes through the page cache"
        )
    mount = find_mount(path)
    filesystem = UNKNOWN if mount is None else mount.filesystem
    in_memory = mount is not None and mount_written(mount).filesystem in MEMORY_FILESYSTEMS
    if filesystem in THIN_FILESYSTEMS:
        notes.append(f"{path}: on {filesystem} a reservation is no guarantee: writes may still find the disk full")
    if in_memory:
        notes.append(f"{path}: {filesystem} lies in memory: swapping to it saves none")
    return SwapDir(path, direct_error is None, filesystem, tuple(notes), in_memory)


def check_swap_dirs(paths: Sequence[Path]) -> list[SwapDir]:
    """``check_swap_dir`` holds for each, and each is named once, by whatever name. Raises ConfigError."""
    seen: dict[tuple[int, int], Path] = {}
    checked = []
    for path in paths:
        checked.append(check_swap_dir(resolved(path, "swap_dirs")))
        status = os.stat(path)
        first = seen.setdefault((status.st_dev, status.st_ino), path)
        if first is not path:
            raise ConfigError("swap_dirs", str(path), f"the same directory is named twice: it is {first}")
    return checked


def probe_direct(path: Path) -> str | None:
    """None if one page can be written and read back with O_DIRECT, else the reason."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                with mmap.mmap(-1, PAGE_BYTES) as page:
                    moved = min(os.pwrite(fd, page, 0), os.preadv(fd, [page], 0))
            finally:
                os.close(fd)
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return None if moved == PAGE_BYTES else f"{moved} of {PAGE_BYTES} bytes moved"


def filesystem_of(path: Path) -> str:
    """Kind of the filesystem that holds ``path``."""
    mount = find_mount(path)
    return UNKNOWN if mount is None else mount.filesystem


@dataclass(frozen=True)
class StaleFile:
    """A swap file whose owner is gone, opened but not yet locked. ``fd`` is the holder's to close."""

    path: Path
    fd: int
    header: SwapHeader


def find_stale(directory: Path) -> list[StaleFile]:
    """Files of this user's dead daemons. Whatever lacks our name or our header, has a living owner, or one that this
    machine knows nothing of, or belongs to another user is not looked at twice: where all may write, a stranger's file
    must not hold anything up."""
    stale = []
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        try:  # for writing, too: NFS locks no other descriptor
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, a link, or not ours to read and write
        header = _header_of_ours(path, fd)
        if header is None or header.owner.lives() or _is_left_to(path, header) or not _can_be_locked(path, fd):
            os.close(fd)
        else:
            stale.append(StaleFile(path, fd, header))
    return stale


def is_elsewhere(path: Path, header: SwapHeader) -> bool:
    """Whether another machine alone knows if the file's owner lives."""
    return header.owner.is_elsewhere() and filesystem_of(path) not in LOCAL_FILESYSTEMS


def _is_left_to(path: Path, header: SwapHeader) -> bool:
    """Whether it is for another machine to remove, which is said."""
    if not is_elsewhere(path, header):
        return False
    log.warning(
        "%s: of daemon %d on another machine (%s), which shares this directory: left alone; if that daemon is dead, "
        "start one there, or remove the file by hand",
        path,
        header.owner.pid,
        header.owner.machine,
    )
    return True


def _can_be_locked(path: Path, fd: int) -> bool:
    """Whether the filesystem has a lock for it, held by somebody or not."""
    try:
        if _try_lock(fd):
            fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        log.warning("%s: cannot be locked (%s): left alone", path, error.strerror)
        return False
    return True


def _header_of_ours(path: Path, fd: int) -> SwapHeader | None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return None
    try:
        return SwapHeader.unpack(os.pread(fd, PAGE_BYTES, 0))
    except OSError as error:
        log.warning("%s: cannot be read (%s): left alone", path, error.strerror)
        return None


async def lock_stale(files: Sequence[StaleFile], timeout_s: float) -> list[StaleFile]:
    """Take every lock, and so wait until the last byte of the dead owners' I/O has landed.

    Returns the files whose lock was not to be had within ``timeout_s``; an empty list means all are held."""
    deadline = time.monotonic() + timeout_s
    waiting = list(files)
    announced = False
    while True:
        waiting = [file for file in waiting if not _try_lock(file.fd)]
        if not waiting or time.monotonic() >= deadline:
            return waiting
        if not announced:
            announced = True
            for file in waiting:
                log.warning("%s: waiting for the last I/O of dead daemon %d", file.path, file.header.owner.pid)
        await asyncio.sleep(LOCK_POLL_S)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def reclaim(directories: Sequence[Path], timeout_s: float) -> list[Path]:
    """Remove what dead daemons left, once all their I/O has landed. Raises SwapBusyError after ``timeout_s``.

    Nothing is removed before every lock is held, so a caller that this function returned to may hand out any memory
    and any extent."""
    stale = [file for directory in directories for file in find_stale(directory)]
    try:
        busy = await lock_stale(stale, timeout_s)
        if busy:
            raise SwapBusyError(path=str(busy[0].path), owner_pid=busy[0].header.owner.pid, timeout_s=timeout_s)
        return [file.path for file in stale if _unlink_same(file)]
    finally:
        for file in stale:
            os.close(file.fd)


def _unlink_same(file: StaleFile) -> bool:
    """Unlink under the lock, unless the name stands for another file by now (somebody else reclaimed this one)."""
    try:
        if not os.path.samestat(os.stat(file.path, follow_symlinks=False), os.fstat(file.fd)):
            return False
        os.unlink(file.path)
    except FileNotFoundError:
        return False
    log.info("%s: reclaimed, %d bytes of dead daemon %d", file.path, file.header.file_bytes, file.header.owner.pid)
    return True

"""The arena: one sealed memfd of equal frames, made and paid for by the rank, mapped by rank and daemon.

Layout: one header page (``wire::ArenaHeader``), then ``num_frames`` frames of ``frame_bytes``. The rank creates,
prefaults, locks and seals it; the daemon verifies seals, size and header before it maps anything, because a memfd
that can shrink is a SIGBUS waiting in the daemon.
"""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from dataclasses import dataclass
from typing import Final, Literal

from io_daemon._native import Region
from io_daemon.errors import ConfigError, ProtocolError
from io_daemon.shared.protocol import HUGE_PAGE_BYTES, PAGE_BYTES, PROTOCOL_VERSION
from io_daemon.shared.wire import ARENA_HEADER, ARENA_MAGIC

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
PREFAULT_THREADS_MAX: Final = 8
STAT_BLOCK_BYTES: Final = 512
"""The unit of ``st_blocks``, whatever the filesystem."""

LockMemory = Literal["auto", "require", "off"]


def arena_bytes(num_frames: int, frame_bytes: int) -> int:
    return PAGE_BYTES + num_frames * frame_bytes


def frame_offset(frame: int, frame_bytes: int) -> int:
    """Byte offset of a frame in the arena."""
    return PAGE_BYTES + frame * frame_bytes


def prefault_threads() -> int:
    """So many threads allocate the pages of a region together."""
    return min(len(os.sched_getaffinity(0)), PREFAULT_THREADS_MAX)


@dataclass(frozen=True, kw_only=True)
class Arena:
    """The rank's side. ``fd`` is the sealed memfd, to be sent to the daemon; the caller closes it."""

    region: Region
    fd: int
    page_locked: bool


def create_arena(num_frames: int, frame_bytes: int, lock_memory: LockMemory) -> Arena:
    """Make, prefault, lock, seal. Raises ConfigError where the machine cannot give or lock the memory."""
    num_bytes = arena_bytes(num_frames, frame_bytes)
    fd = os.memfd_create("infinity-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            os.ftruncate(fd, num_bytes)
            region = Region(fd, num_bytes, writable=True)
            region.dont_fork()
            huge_bytes = region.prefault(prefault_threads())
        except OSError as error:
            raise ConfigError(
                "io_daemon.host_budget_bytes",
                num_bytes,
                f"the machine does not give this much shared memory ({error.strerror}): "
                + ("raise `ulimit -f`" if error.errno == errno.EFBIG else "lower it"),
            ) from error
        page_locked = lock_memory != "off" and _lock(region, required=lock_memory == "require")
        header = ARENA_HEADER.pack(
            {
                "magic": ARENA_MAGIC,
                "version": PROTOCOL_VERSION,
                "num_frames": num_frames,
                "frame_bytes": frame_bytes,
                "page_bytes": HUGE_PAGE_BYTES if huge_bytes else PAGE_BYTES,
                "page_locked": int(page_locked),
            }
        )
        region.array().data[: len(header)] = header
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return Arena(region=region, fd=fd, page_locked=page_locked)


def _lock(region: Region, *, required: bool) -> bool:
    try:
        region.lock()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOMEM, errno.EAGAIN):
            raise
        limit_remedy = (
            f"raise the memlock limit to at least {-(-region.region_bytes // 1024)} KiB "
            "(`ulimit -l`, or LimitMEMLOCK= in the unit, or --ulimit memlock=-1 for a container)"
        )
        if required:
            raise ConfigError("pin_memory", True, f"mlock says {error.strerror}: {limit_remedy}") from error
        warnings.warn(
            f"the arena of {region.region_bytes} bytes is not page-locked ({error.strerror}), "
            f"so the kernel may swap it out; {limit_remedy}",
            RuntimeWarning,
            stacklevel=4,
        )
        return False
    return True


def adopt_arena(fd: int, num_frames: int, frame_bytes: int) -> Region:
    """The daemon's side: map an arena that a rank sent. Raises ProtocolError for anything that could hurt later."""
    if frame_bytes % PAGE_BYTES:
        raise ProtocolError(f"frame_bytes = {frame_bytes} is no multiple of {PAGE_BYTES}")
    expected_bytes = arena_bytes(num_frames, frame_bytes)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"the arena is not a memfd: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise ProtocolError(f"the arena's seals are {seals:#x}: it could still shrink; {SEALS:#x} is needed")
    if seals & fcntl.F_SEAL_WRITE:
        raise ProtocolError("the arena is sealed against writing")
    num_bytes = os.fstat(fd).st_size
    if num_bytes != expected_bytes:
        raise ProtocolError(f"the arena holds {num_bytes} bytes, its geometry needs {expected_bytes}")
    populated_bytes = os.fstat(fd).st_blocks * STAT_BLOCK_BYTES
    if populated_bytes < expected_bytes:  # what is missing, the daemon would have to allocate, and to answer for
        raise ProtocolError(f"the arena is not populated: {populated_bytes} of its {expected_bytes} bytes are there")
    try:
        region = Region(fd, num_bytes, writable=True)
    except OSError as error:
        raise ProtocolError(f"the arena cannot be mapped: {error.strerror}") from error
    header = ARENA_HEADER.unpack(bytes(region.array().data[:PAGE_BYTES]))
    found = (header["magic"], header["version"], header["num_frames"], header["frame_bytes"])
    if found != (ARENA_MAGIC, PROTOCOL_VERSION, num_frames, frame_bytes):
        raise ProtocolError("the arena's header does not match what was announced")
    return region

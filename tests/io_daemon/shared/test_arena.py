"""Arenas: made by ranks, verified by the daemon before anything is mapped."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from io_daemon.errors import ProtocolError
from io_daemon.shared.arena import SEALS, adopt_arena, arena_bytes, create_arena, frame_offset
from io_daemon.shared.wire import ARENA_HEADER


def test_an_arena_is_sealed_prefaulted_and_has_a_header() -> None:
    arena = create_arena(4, 8192, "off")
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) == SEALS
    status = os.fstat(arena.fd)
    assert status.st_size == arena_bytes(4, 8192) == frame_offset(4, 8192)
    assert status.st_blocks * 512 >= status.st_size
    assert not os.get_inheritable(arena.fd)
    region = adopt_arena(arena.fd, 4, 8192)
    region.array()[frame_offset(2, 8192)] = 7
    assert arena.region.array()[frame_offset(2, 8192)] == 7
    os.close(arena.fd)


def _memfd(num_bytes: int, seals: int, header: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, num_bytes)  # populated, as an arena must be
    os.pwrite(fd, header, 0)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("num_bytes", "seals", "message"),
    [
        (arena_bytes(2, 4096), 0, "could still shrink"),
        (arena_bytes(2, 4096), fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "could still shrink"),
        (arena_bytes(2, 4096), SEALS | fcntl.F_SEAL_WRITE, "sealed against writing"),
        (arena_bytes(2, 4096) - 4096, SEALS, "its geometry needs"),
        (arena_bytes(2, 4096), SEALS, "header does not match"),
    ],
)
def test_what_could_hurt_later_is_refused(num_bytes: int, seals: int, message: str) -> None:
    fd = _memfd(num_bytes, seals)
    with pytest.raises(ProtocolError, match=message):
        adopt_arena(fd, 2, 4096)
    os.close(fd)


def test_a_plain_file_and_odd_frames_are_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(ProtocolError, match="not a memfd"):
        adopt_arena(fd, 2, 4096)
    with pytest.raises(ProtocolError, match="no multiple of 4096"):
        adopt_arena(fd, 2, 4097)
    os.close(fd)


def test_a_header_that_lies_is_refused() -> None:
    arena = create_arena(4, 4096, "off")
    honest = ARENA_HEADER.unpack(arena.region.array()[:4096].tobytes())
    arena.region.array()[:4096].data[:] = ARENA_HEADER.pack({**honest, "num_frames": 5})
    with pytest.raises(ProtocolError, match="header does not match"):
        adopt_arena(arena.fd, 4, 4096)
    os.close(arena.fd)


LIMITED = """
import ctypes, resource, sys, warnings
libc = ctypes.CDLL(None, use_errno=True)
PR_CAPBSET_DROP, CAP_IPC_LOCK = 24, 14
class Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]
class Data(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]
header, data = Header(0x20080522, 0), (Data * 2)()
libc.capget(ctypes.byref(header), data)
for word in ("effective", "permitted"):
    setattr(data[0], word, getattr(data[0], word) & ~(1 << CAP_IPC_LOCK))
if libc.capset(ctypes.byref(header), data):
    sys.exit("capset failed")
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
from io_daemon.shared.arena import create_arena
from io_daemon.errors import ConfigError
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    arena = create_arena(64, 4096, "auto")
print(arena.page_locked, [str(each.message) for each in caught])
try:
    create_arena(64, 4096, "require")
except ConfigError as error:
    print(error)
"""


def test_the_memlock_limit_warns_or_refuses_with_a_remedy() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True)
    auto, require = done.stdout.splitlines()
    assert auto.startswith("False")
    assert "not page-locked" in auto
    assert "ulimit -l" in auto
    assert require.startswith("pin_memory = True")
    assert "ulimit -l" in require
    assert f"at least {-(-arena_bytes(64, 4096) // 1024)} KiB" in require

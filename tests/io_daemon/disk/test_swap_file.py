"""Swap files: header, lock, reservation, and what happens when the disk is full."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from io_daemon.disk.swap_dir import filesystem_of
from io_daemon.disk.swap_file import Owner, SwapFile, SwapHeader
from io_daemon.errors import SwapSpaceError
from io_daemon.shared.protocol import PAGE_BYTES
from io_daemon.shared.wire import SWAP_HEADER


def create(directory: Path, *, direct: bool = True) -> SwapFile:
    return SwapFile.create(
        directory, job="job", rank=3, frame_bytes=8192, file_index=1, owner=Owner.this_process(), direct=direct
    )


def test_the_header_survives_and_names_its_owner(tmp_path: Path) -> None:
    swap_file = create(tmp_path)
    header = SwapHeader.unpack(swap_file.path.read_bytes())
    assert header == swap_file.header
    assert header.owner.lives()
    assert (header.job, header.rank, header.file_index, header.frame_bytes) == ("job", 3, 1, 8192)
    swap_file.grow(PAGE_BYTES + 65536)
    grown = SwapHeader.unpack(swap_file.path.read_bytes())
    assert grown is not None
    assert grown.file_bytes == PAGE_BYTES + 65536 == swap_file.path.stat().st_size
    swap_file.unlink()
    swap_file.close()


@pytest.mark.parametrize("field", [*SWAP_HEADER.names, "padding"])
def test_a_header_with_any_flipped_field_is_not_ours(tmp_path: Path, field: str) -> None:
    swap_file = create(tmp_path)
    page = bytearray(swap_file.path.read_bytes())
    page[-1 if field == "padding" else SWAP_HEADER.offset_of(field)] ^= 1
    assert SwapHeader.unpack(bytes(page)) is None
    swap_file.close()


def test_neither_a_reused_pid_nor_a_reboot_passes_for_the_owner() -> None:
    this = Owner.this_process()
    assert this.lives()
    assert not Owner(this.pid, this.starttime + 1, this.boot_id).lives()
    assert not Owner(this.pid, this.starttime, "00000000-0000-0000-0000-000000000000").lives()
    child = subprocess.Popen(["true"])
    dead = Owner(child.pid, this.starttime, this.boot_id)
    child.wait()
    assert not dead.lives()


def test_files_of_one_rank_get_names_of_their_own_and_stay_locked(tmp_path: Path) -> None:
    first, second = create(tmp_path), create(tmp_path)
    assert [first.path.name, second.path.name] == ["infinity-job-r3-0.swap", "infinity-job-r3-1.swap"]
    assert first.path.stat().st_mode & 0o777 == 0o600
    other = os.open(first.path, os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    inherited = os.dup(first.fd)
    first.close()
    with pytest.raises(BlockingIOError):  # the description lives on in the copy, and with it the lock
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(inherited)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    second.close()


@pytest.mark.root
def test_a_full_disk_is_found_before_step_0_and_the_file_cut_back(small_disk: Path) -> None:
    swap_file = create(small_disk)
    swap_file.grow(1 << 20)
    with pytest.raises(SwapSpaceError) as caught:
        swap_file.grow(64 << 20)
    error = caught.value
    assert error.errno == errno.ENOSPC
    assert error.needed_bytes == 63 << 20
    assert 0 < error.free_bytes < 16 << 20
    assert str(small_disk) in str(error)
    assert "No space left on device" in str(error)
    assert swap_file.file_bytes == swap_file.path.stat().st_size == 1 << 20
    assert swap_file.path.stat().st_blocks * 512 < 2 << 20  # the rest is metadata
    swap_file.grow(2 << 20)
    swap_file.close()


def test_a_refused_reservation_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_file = create(tmp_path)

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        os.ftruncate(fd, offset + num_bytes // 2)  # as far as it got
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("io_daemon.disk.swap_file.allocate", refuse)
    with pytest.raises(SwapSpaceError, match="quota"):
        swap_file.grow(1 << 20)
    assert swap_file.file_bytes == swap_file.path.stat().st_size == PAGE_BYTES
    swap_file.close()


def test_growing_touches_only_what_lies_beyond_the_end(tmp_path: Path) -> None:
    """I/O may be in flight before it: a hole there stays one."""
    swap_file = create(tmp_path)
    os.truncate(swap_file.path, 1 << 20)
    blocks_before = swap_file.path.stat().st_blocks
    swap_file.grow(2 << 20)
    grown_bytes = (swap_file.path.stat().st_blocks - blocks_before) * 512
    assert 1 << 20 <= grown_bytes < (1 << 20) + (1 << 19)  # the rest is metadata
    swap_file.close()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names x86-64 system calls")
@pytest.mark.parametrize("direct", [False, True])
def test_without_fallocate_space_is_written(tmp_path: Path, direct: bool) -> None:
    """And nothing that is there is read and written again, as glibc's stand-in for fallocate does."""
    script = """
import errno, os, sys
from pathlib import Path
from tests.io_daemon.disk.test_swap_file import create
from tests.support.seccomp import NR_FALLOCATE, forbid
forbid(NR_FALLOCATE, errno.EOPNOTSUPP)
swap_file = create(Path(sys.argv[1]), direct=sys.argv[2] == "True")
os.truncate(swap_file.path, 1 << 20)
swap_file.grow((4 << 20) + 4096)
blocks = swap_file.path.stat().st_blocks * 512
assert swap_file.path.stat().st_size == swap_file.file_bytes == (4 << 20) + 4096
assert 3 << 20 <= blocks < 4 << 20, blocks
"""
    command = [sys.executable, "-c", script, str(tmp_path), str(direct)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_filesystems_are_told_apart() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    assert filesystem_of(Path("/")) not in ("", "unknown")

"""Swap files: header, lock, reservation, and what happens when the disk is full."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon._native import checksum
from io_daemon.disk.swap_dir import filesystem_of
from io_daemon.disk.swap_file import Owner, SwapFile, SwapHeader, process_starttime
from io_daemon.errors import DeviceIOError, SwapSpaceError
from io_daemon.rank.connection import process_state
from io_daemon.shared.protocol import PAGE_BYTES
from io_daemon.shared.wire import SWAP_HEADER
from tests.support.descriptors import open_fds

HEADER = SwapHeader(
    job="job",
    rank=3,
    file_index=1,
    file_bytes=PAGE_BYTES,
    frame_bytes=8192,
    created_ns=1,
    owner=Owner.this_process(),
)


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
    assert not Owner(this.pid, this.starttime + 1, this.boot_id, this.machine).lives()
    assert not Owner(this.pid, this.starttime, "00000000-0000-0000-0000-000000000000", this.machine).lives()
    child = subprocess.Popen(["true"])
    dead = Owner(child.pid, this.starttime, this.boot_id, this.machine)
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


@pytest.mark.root
def test_space_is_reserved_later_beside_what_was_written_meanwhile(small_disk: Path) -> None:
    swap_file = create(small_disk)
    swap_file.grow(64 << 20, reserve=False)  # more than the disk has
    assert swap_file.file_bytes == swap_file.path.stat().st_size == 64 << 20
    assert swap_file.path.stat().st_blocks * 512 < 1 << 20
    with mmap.mmap(-1, 1 << 20) as page:
        page[:] = b"x" * (1 << 20)
        assert os.pwrite(swap_file.fd, page, 3 << 20) == 1 << 20
    with pytest.raises(SwapSpaceError) as caught:
        swap_file.reserve()
    assert (caught.value.errno, caught.value.needed_bytes) == (errno.ENOSPC, (64 << 20) - PAGE_BYTES)
    swap_file.shrink(8 << 20)
    swap_file.reserve()
    assert swap_file.path.stat().st_blocks * 512 >= 8 << 20
    with mmap.mmap(-1, 1 << 20) as page:
        assert os.preadv(swap_file.fd, [page], 3 << 20) == 1 << 20
        assert page[:] == b"x" * (1 << 20)
    blocks = swap_file.path.stat().st_blocks
    swap_file.reserve()  # there is nothing left to reserve
    assert swap_file.path.stat().st_blocks == blocks
    swap_file.grow(9 << 20)
    swap_file.close()


def test_where_zeros_are_what_reserves_it_is_done_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards they would take the place of what was written."""

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    swap_file = create(tmp_path)
    monkeypatch.setattr("io_daemon.disk.swap_file.allocate", refuse)
    swap_file.grow(PAGE_BYTES + (1 << 20), reserve=False)
    assert swap_file.path.stat().st_size == PAGE_BYTES + (1 << 20)
    assert swap_file.path.stat().st_blocks * 512 >= 1 << 20
    swap_file.reserve()
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


def test_a_limit_of_files_is_told_with_its_remedy(tmp_path: Path) -> None:
    """The disk has space: it is no use to free more. (The limit is a child's: once lowered, it stays.)"""
    code = f"""
        import resource
        from pathlib import Path
        from io_daemon.disk.swap_file import Owner, SwapFile
        from io_daemon.errors import SwapSpaceError
        file = SwapFile.create(Path({str(tmp_path)!r}), job="j", rank=0, frame_bytes=4096, file_index=0,
                               owner=Owner.this_process(), direct=False)
        file.grow(8192)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
        try:
            file.grow(1 << 20)
        except SwapSpaceError as error:
            print(error)
        print(file.file_bytes, file.path.stat().st_size)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert "ulimit -f" in told[0]
    assert told[1] == "8192 8192", "it is as before"


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


def refuse(monkeypatch: pytest.MonkeyPatch, module: object, name: str, error_number: int, nth: int = 0) -> None:
    """The nth call of a function fails; the others go through."""
    original, calls = getattr(module, name), itertools.count()

    def call(*arguments: object, **options: object) -> object:
        if next(calls) == nth:
            raise OSError(error_number, os.strerror(error_number))
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize(
    ("module", "name", "error_number", "words"),
    [
        (os, "pwrite", errno.EIO, "write of the header of .*Input/output error"),
        (os, "pwrite", errno.ENOSPC, "write of the header of .*No space left"),
        (os, "fsync", errno.EIO, "fsync of .*Input/output error"),
        (fcntl, "flock", errno.ENOLCK, "lock of .*No locks available"),
    ],
)
def test_a_file_whose_header_cannot_be_written_is_not_left_behind(
    module: object, name: str, error_number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, module, name, error_number)
    before = open_fds()
    with pytest.raises(DeviceIOError, match=words) as caught:
        create(tmp_path)
    assert caught.value.errno == error_number
    assert caught.value.path == str(tmp_path / "infinity-job-r3-0.swap")
    assert list(tmp_path.iterdir()) == []
    assert open_fds() <= before


def test_a_short_write_of_the_header_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda fd, page, offset: 512)
    with pytest.raises(DeviceIOError, match="short transfer; 512 of 4096 bytes"):
        create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_cleaning_up_hides_neither_the_first_one_nor_the_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os, "fsync", errno.EIO)
    refuse(monkeypatch, Path, "unlink", errno.EROFS)
    before = open_fds()
    with pytest.raises(DeviceIOError, match="fsync"):
        create(tmp_path)
    assert open_fds() <= before


@pytest.mark.parametrize("name", ["pwrite", "fsync"])
def test_a_file_that_cannot_grow_is_as_before(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_file = create(tmp_path)
    swap_file.grow(1 << 20)
    header = swap_file.header
    refuse(monkeypatch, os, name, errno.EIO)
    with pytest.raises(DeviceIOError):
        swap_file.grow(4 << 20)
    assert swap_file.header == header == SwapHeader.unpack(swap_file.path.read_bytes())
    assert swap_file.path.stat().st_size == 1 << 20
    swap_file.grow(2 << 20)
    assert swap_file.path.stat().st_size == 2 << 20
    swap_file.close()


@given(st.integers(0, 1 << 64))
def test_whatever_a_valid_checksum_covers_is_read_or_refused(seed: int) -> None:
    """Anybody can compute a checksum."""
    page = bytearray(np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8))
    magic = SWAP_HEADER.offset_of("magic")
    sealed = SwapHeader.pack(HEADER)
    page[magic : magic + 8] = sealed[magic : magic + 8]
    at = SWAP_HEADER.offset_of("header_checksum")
    page[at : at + 4] = bytes(4)
    page[at : at + 4] = checksum(np.frombuffer(page, np.uint8)).to_bytes(4, "little")
    header = SwapHeader.unpack(bytes(page))
    if header is not None:
        assert not header.owner.lives()


def test_the_name_of_a_process_may_be_any_bytes() -> None:
    code = "import sys; open('/proc/self/comm', 'wb').write(b'\\xff (\\xfe)'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert process_starttime(child.pid) is not None
        assert process_state(child.pid) not in ("gone", "unknown")
        child.communicate()


def test_a_daemon_that_nobody_has_reaped_is_dead() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    owner = Owner.this_process()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[0] == "Z"
    assert process_starttime(child.pid) is None
    assert not Owner(child.pid, int(fields[19]), owner.boot_id, owner.machine).lives()
    child.wait()


def test_what_was_put_off_and_undone_is_reserved_no_more(tmp_path: Path) -> None:
    swap_file = create(tmp_path)
    swap_file.grow(1 << 20)
    swap_file.grow(2 << 20, reserve=False)
    swap_file.shrink(1 << 20)
    swap_file.reserve()
    swap_file.grow(3 << 20, reserve=False)
    swap_file.reserve()
    assert swap_file.path.stat().st_blocks * 512 >= 3 << 20
    swap_file.close()


def test_what_was_put_off_twice_is_reserved_whole(tmp_path: Path) -> None:
    swap_file = create(tmp_path)
    swap_file.grow(4 << 20, reserve=False)
    swap_file.grow(8 << 20, reserve=False)
    swap_file.reserve()
    assert swap_file.path.stat().st_blocks * 512 >= 8 << 20
    swap_file.close()


def test_where_the_kernels_mark_is_hidden_a_process_and_a_machine_are_known_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("io_daemon.disk.swap_file.BOOT_ID", tmp_path / "hidden")
    this = Owner.this_process()
    assert this.lives()
    assert not this.is_elsewhere()
    assert not replace(this, starttime=this.starttime + 1).lives()
    assert replace(this, machine="another").is_elsewhere()

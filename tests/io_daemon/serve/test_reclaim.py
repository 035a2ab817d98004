"""What dead daemons left: removed when their last byte has landed, and nothing else ever."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from io_daemon.__main__ import main
from io_daemon._native import checksum
from io_daemon.disk.swap_dir import find_stale, lock_stale, reclaim
from io_daemon.disk.swap_file import Owner, SwapFile, SwapHeader, boot_id, machine_id
from io_daemon.errors import SwapBusyError
from io_daemon.shared.wire import SWAP_HEADER
from tests.io_daemon.conftest import Serve
from tests.support.daemon import DEADLINE_S

NOBODY = 65534


def dead_owner() -> Owner:
    child = subprocess.Popen(["true"])
    this = Owner.this_process()
    child.wait()
    return replace(this, pid=child.pid)


def leave(directory: Path, owner: Owner, *, job: str = "job") -> Path:
    """A swap file of ``owner``, as its daemon leaves it when killed."""
    swap_file = SwapFile.create(directory, job=job, rank=0, frame_bytes=4096, file_index=0, owner=owner, direct=False)
    swap_file.close()
    return swap_file.path


def run_reclaim(directory: Path, timeout_s: float = DEADLINE_S) -> list[Path]:
    return asyncio.run(reclaim([directory], timeout_s))


def test_files_of_dead_owners_go_and_those_of_living_ones_stay(swap_dir: Path) -> None:
    dead, living = leave(swap_dir, dead_owner()), leave(swap_dir, Owner.this_process(), job="other")
    assert run_reclaim(swap_dir) == [dead]
    assert list(swap_dir.iterdir()) == [living]


OTHER_BOOT = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("filesystem", "boot", "machine", "goes"),
    [
        ("nfs4", OTHER_BOOT, "another", False),
        ("ext4", OTHER_BOOT, "a container of another name", True),  # nobody else writes there
        ("nfs4", OTHER_BOOT, machine_id(), True),  # it was booted since
        ("nfs4", OTHER_BOOT, "", True),  # a file of old
        ("nfs4", boot_id(), "a container of another name", True),
    ],
)
def test_files_of_other_machines_are_left_to_them(
    swap_dir: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    filesystem: str,
    boot: str,
    machine: str,
    goes: bool,
) -> None:
    """What their daemons write into is not to be had here: not their pids, nor, on some filesystems, their locks."""
    monkeypatch.setattr("io_daemon.disk.swap_dir.filesystem_of", lambda _: filesystem)
    path = leave(swap_dir, replace(dead_owner(), boot_id=boot, machine=machine))
    assert run_reclaim(swap_dir) == ([path] if goes else [])
    assert path.exists() is not goes
    assert (f"{path}: of daemon" in caplog.text) is not goes


def test_without_a_machine_id_it_is_the_name_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, "uninitialized"):
        monkeypatch.setattr("io_daemon.disk.swap_file.read_text", lambda _, found=found: found)
        assert machine_id() == os.uname().nodename


def test_a_file_whose_filesystem_refuses_locks_is_left_alone(
    swap_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does for a descriptor that is only for reading: of others nothing is to be said."""
    refused, path = (leave(swap_dir, dead_owner(), job=job) for job in ("one", "two"))
    flock, modes = fcntl.flock, []

    def refuse(fd: int, operation: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(refused):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        modes.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run_reclaim(swap_dir) == [path]
    assert refused.exists()
    assert f"{refused}: cannot be locked (No locks available): left alone" in caplog.text
    assert set(modes) == {os.O_RDWR}


def test_foreign_files_are_never_touched(swap_dir: Path) -> None:
    header = SwapHeader.unpack(leave(swap_dir, dead_owner()).read_bytes())
    assert header is not None
    assert run_reclaim(swap_dir)
    ours = header.pack()
    broken = bytearray(ours)
    broken[100] ^= 1
    foreign = {
        "infinity-job-r0-0.swap": b"a file with our name and without our header" * 200,
        "infinity-job-r0-1.swap": bytes(broken),
        "infinity-job-r0-2.swap": b"",
        "infinity-job-r0-3.swap": ours[:100],
        "model.swap": ours,
        "infinity-notes.txt": ours,
    }
    for name, data in foreign.items():
        (swap_dir / name).write_bytes(data)
    outside = swap_dir.parent / "outside"
    outside.write_bytes(ours)
    (swap_dir / "infinity-link-r0-0.swap").symlink_to(outside)
    os.mkfifo(swap_dir / "infinity-fifo-r0-0.swap")
    (swap_dir / "infinity-dir-r0-0.swap").mkdir()
    before = sorted(swap_dir.iterdir())
    assert run_reclaim(swap_dir) == []
    assert sorted(swap_dir.iterdir()) == before
    assert {name: (swap_dir / name).read_bytes() for name in foreign} == foreign
    assert outside.read_bytes() == ours


def test_nothing_goes_before_every_lock_is_held(swap_dir: Path) -> None:
    owner = dead_owner()
    paths = {leave(swap_dir, owner, job="one"), leave(swap_dir, owner, job="two")}
    holder = os.open(max(paths), os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(SwapBusyError) as caught:
        run_reclaim(swap_dir, timeout_s=0.05)
    assert caught.value.path == str(max(paths))
    assert caught.value.owner_pid == owner.pid
    assert set(swap_dir.iterdir()) == paths
    os.close(holder)
    assert set(run_reclaim(swap_dir)) == paths
    assert list(swap_dir.iterdir()) == []


def test_a_file_that_took_the_name_meanwhile_stays(swap_dir: Path) -> None:
    path = leave(swap_dir, dead_owner())

    async def race() -> list[Path]:
        holder = os.open(path, os.O_RDONLY)
        fcntl.flock(holder, fcntl.LOCK_EX)
        reclaiming = asyncio.ensure_future(reclaim([swap_dir], DEADLINE_S))
        await asyncio.sleep(0)  # it has found the file and found it locked
        path.unlink()  # another successor was faster, and gave the name away again
        path.write_bytes(b"new")
        os.close(holder)
        return await reclaiming

    assert asyncio.run(race()) == []
    assert path.read_bytes() == b"new"


def test_lock_stale_says_which_are_still_locked(swap_dir: Path) -> None:
    paths = [leave(swap_dir, dead_owner(), job=job) for job in ("one", "two")]
    stale = find_stale(swap_dir)
    assert [file.path for file in stale] == paths
    holder = os.open(paths[1], os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    busy = asyncio.run(lock_stale(stale, 0.0))
    assert [file.path for file in busy] == paths[1:]
    os.close(holder)
    assert asyncio.run(lock_stale(stale, DEADLINE_S)) == []
    for file in stale:
        os.close(file.fd)


def test_a_successor_serves_nobody_while_a_lock_is_held(serve: Serve, swap_dir: Path) -> None:
    path = leave(swap_dir, dead_owner())
    holder = os.open(path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    daemon = serve(wait_ready=False)
    while "waiting for the last I/O" not in daemon.stderr():
        assert not daemon.is_ready(0.01)
    assert not daemon.is_ready(0.3)
    assert not os.path.exists(daemon.socket)
    assert path.exists()
    os.close(holder)
    daemon.wait_ready()
    assert daemon.files() == []


def test_a_successor_gives_up_with_a_reason(serve: Serve, swap_dir: Path) -> None:
    path = leave(swap_dir, dead_owner())
    holder = os.open(path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    daemon = serve("--lock-timeout", "0.1", wait_ready=False)
    assert daemon.process.wait(DEADLINE_S) == 1
    assert f"{path} of dead daemon" in daemon.stderr()
    assert path.exists()
    os.close(holder)


def test_a_successor_that_waits_for_a_lock_can_be_stopped(serve: Serve, swap_dir: Path) -> None:
    path = leave(swap_dir, dead_owner())
    holder = os.open(path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    daemon = serve(wait_ready=False)
    while "waiting for the last I/O" not in daemon.stderr():
        assert not daemon.is_ready(0.01)
    assert daemon.terminate() == 0
    assert path.exists()
    os.close(holder)


def non_ascii(header: SwapHeader) -> bytes:
    """A header page with a valid checksum and a boot id that no kernel wrote."""
    page = bytearray(header.pack())
    page[SWAP_HEADER.offset_of("boot_id")] = 0xFF
    at = SWAP_HEADER.offset_of("header_checksum")
    page[at : at + 4] = bytes(4)
    page[at : at + 4] = checksum(np.frombuffer(page, np.uint8)).to_bytes(4, "little")
    return bytes(page)


def test_a_header_that_is_not_ascii_stops_neither_gc_nor_serve(
    serve: Serve, swap_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = leave(swap_dir, dead_owner())
    header = SwapHeader.unpack(left.read_bytes())
    assert header is not None
    odd = swap_dir / "infinity-a-r0-0.swap"
    odd.write_bytes(non_ascii(header))
    assert serve().files() == [odd.name]
    leave(swap_dir, dead_owner())
    assert main(["gc", "--swap-dir", str(swap_dir)]) == 0
    assert str(left) in capsys.readouterr().out.splitlines()
    assert list(swap_dir.iterdir()) == [odd]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")
def test_a_strangers_locked_file_holds_nothing_up(swap_dir: Path) -> None:
    mine, strangers = leave(swap_dir, dead_owner()), leave(swap_dir, dead_owner(), job="stranger")
    os.chown(strangers, NOBODY, NOBODY)
    with strangers.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run_reclaim(swap_dir, timeout_s=0.05) == [mine]
    assert list(swap_dir.iterdir()) == [strangers]


def test_a_file_that_cannot_be_read_holds_nothing_up(
    swap_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = leave(swap_dir, dead_owner(), job="bad"), leave(swap_dir, dead_owner(), job="good")
    pread = os.pread

    def failing(fd: int, num_bytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}") == str(bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, num_bytes, offset)

    monkeypatch.setattr(os, "pread", failing)
    assert run_reclaim(swap_dir) == [good]
    assert f"{bad}: cannot be read (Input/output error)" in caplog.text

"""Filesystems that turn read-only, die, fill up or are cut under a daemon: typed errors that say what helps."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest

from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.errors import ConfigError, DeviceIOError, IntegrityError, SwapSpaceError
from io_daemon.rank.client import Client
from io_daemon.rank.private_dir import PrivateDir
from tests.io_daemon.conftest import Serve
from tests.support.daemon import DEADLINE_S, WEIGHT, chunk_is_intact, eventually, specs, write_chunk

NUM_CHUNKS = 10
"""Of one frame each, through an arena of two."""
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def filled(client: Client) -> range:
    chunks = client.register(specs(NUM_CHUNKS))
    for chunk in chunks:
        write_chunk(client, chunk, WEIGHT)
    return chunks


def read(client: Client, chunk: int) -> None:
    seq = client.acquire(chunk, read=WEIGHT)
    try:
        client.wait(seq, DEADLINE_S)
    finally:
        client.release(seq)


def read_all(client: Client, chunks: range) -> None:
    for chunk in chunks:
        read(client, chunk)


def use_up_inodes(directory: Path) -> None:
    for number in range(os.statvfs(directory).f_ffree + 1):
        (directory / f"file{number}").touch()


def test_a_filesystem_that_turns_read_only_is_told_so(serve: Serve, small_disk: Path) -> None:
    daemon = serve(swap_dirs=[small_disk])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DeviceIOError, match="remount it for writing") as caught, daemon.attached():
        pass
    assert (caught.value.errno, caught.value.offset) == (errno.EROFS, 0)
    with pytest.raises(ConfigError, match=r"Read-only file system.*remount it for writing"):
        check_swap_dir(small_disk)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with daemon.attached(num_frames=2) as client:
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in filled(client))


def test_a_filesystem_that_dies_is_told_with_path_and_offset(serve: Serve, small_disk: Path) -> None:
    daemon = serve(swap_dirs=[small_disk])
    with daemon.attached(num_frames=2) as client:
        chunks = filled(client)
        root = os.open(small_disk, os.O_RDONLY)
        fcntl.ioctl(root, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(root)
        with pytest.raises(DeviceIOError, match="dmesg") as caught:
            read_all(client, chunks)
        error = caught.value
        assert error.errno == errno.EIO
        assert error.path.startswith(str(small_disk))
        assert error.offset % 4096 == 0
        with pytest.raises(SwapSpaceError, match="dmesg"):
            client.register(specs(NUM_CHUNKS))
        assert client.echo() < DEADLINE_S, "the daemon serves on"
    assert daemon.terminate() == 0


def test_a_filesystem_without_inodes_is_told_what_to_free(serve: Serve, small_disk: Path) -> None:
    daemon = serve(swap_dirs=[small_disk])
    with pytest.raises(OSError, match="No space left"):
        use_up_inodes(small_disk)
    with pytest.raises(DeviceIOError, match="inodes") as caught, daemon.attached():
        pass
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(ConfigError, match="inodes"):
        check_swap_dir(small_disk)


@pytest.mark.parametrize("engine", ["io_uring", "libaio", "posix"])
def test_a_swap_file_that_is_cut_short_gives_no_wrong_bytes(engine: str, serve: Serve, swap_dir: Path) -> None:
    daemon = serve("--engine", f"require:{engine}")
    with daemon.attached(num_frames=2) as client:
        chunks = filled(client)
        (name,) = daemon.files()
        os.truncate(swap_dir / name, 8192)
        with pytest.raises((DeviceIOError, IntegrityError), match="somebody") as caught:
            read(client, chunks[0])
        error = caught.value
        assert isinstance(error, DeviceIOError | IntegrityError)
        assert (error.path, error.offset) == (str(swap_dir / name), 4096)
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks), "what is written again is there"
    eventually(lambda: not daemon.files(), "the swap file goes")


def test_a_swap_file_that_somebody_removes_serves_on(serve: Serve, swap_dir: Path) -> None:
    daemon = serve()
    with daemon.attached(num_frames=2) as client:
        chunks = filled(client)
        (name,) = daemon.files()
        (swap_dir / name).unlink()
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        assert len(client.register(specs(NUM_CHUNKS))) == NUM_CHUNKS
    assert not daemon.files()


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_no_umask_keeps_a_daemon_from_its_socket(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        private = PrivateDir.make([tmp_path])
    finally:
        os.umask(before)
    assert private.path.stat().st_mode & 0o777 == 0o700
    private.remove()
    assert not list(tmp_path.iterdir())

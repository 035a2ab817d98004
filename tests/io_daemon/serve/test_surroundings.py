"""What changes around a daemon while it serves: directories move, files are removed, descriptors run out."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from io_daemon.__main__ import main
from io_daemon.errors import ConfigError, DeviceIOError, ProtocolError
from io_daemon.rank.client import Client
from io_daemon.rank.socket_lock import SocketLock
from io_daemon.serve import startup
from io_daemon.shared.protocol import PAGE_BYTES
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk
from tests.support.descriptors import open_fds


def test_a_directory_that_is_moved_away_keeps_its_tenants_and_gets_its_space_back(
    daemon: ServedDaemon, swap_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    with daemon.attached() as client:
        for chunk in client.register(specs(16)):
            write_chunk(client, chunk, WEIGHT)
        swap_dir.rename(moved)
        (file,) = moved.iterdir()
        assert file.stat().st_size > 16 * PAGE_BYTES
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in range(16))
        assert main(["status", "--socket", daemon.socket, "--json"]) == 0
        (device,) = json.loads(capsys.readouterr().out)["devices"]
        assert device["free_bytes"] == 0
        with daemon.connect(job="late") as late, pytest.raises(DeviceIOError, match="No such file"):
            late.attach(num_frames=2, frame_bytes=PAGE_BYTES, swap_dirs=late.swap_dirs, lock_memory="off")
    eventually(lambda: file.stat().st_blocks * 512 <= PAGE_BYTES, "the space is given back")
    assert daemon.terminate() == 0
    assert main(["gc", "--swap-dir", str(moved)]) == 0
    assert list(moved.iterdir()) == [], "what was left has a header that says whose it was"


def test_a_name_that_somebody_else_has_taken_meanwhile_stays_theirs(daemon: ServedDaemon, swap_dir: Path) -> None:
    with daemon.attached() as client:
        for chunk in client.register(specs(16)):
            write_chunk(client, chunk, WEIGHT)
        (file,) = swap_dir.iterdir()
        file.unlink()
        file.write_bytes(b"another's")
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in range(16))
    eventually(lambda: not daemon.swap_fds(), "the tenant is gone")
    assert file.read_bytes() == b"another's"


def test_a_daemon_without_descriptors_says_so_and_serves_those_it_has(daemon: ServedDaemon) -> None:
    with daemon.attached(job="first") as first:
        for chunk in first.register(specs(16)):
            write_chunk(first, chunk, WEIGHT)
        num_open = len(daemon.fds())
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        told: list[str] = []
        for spare in range(1, 16):
            resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (num_open + spare, limits[1]))
            with contextlib.suppress(ConfigError, ProtocolError, OSError), daemon.connect(job="late") as late:
                try:
                    _attach(late)
                except (ConfigError, ProtocolError) as error:
                    told.append(str(error))
                    raise
                break
            assert chunk_is_intact(first, spare, WEIGHT)
            eventually(lambda: len(daemon.fds()) == num_open, "an attach that failed leaves nothing")
        else:
            pytest.fail("a tenant takes more than 15 descriptors")
        assert len(told) > 5
        assert all("ulimit -n" in words for words in told), told
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        with daemon.attached(job="again"):
            assert chunk_is_intact(first, 0, WEIGHT)


def _attach(client: Client) -> None:
    client.attach(num_frames=2, frame_bytes=PAGE_BYTES, swap_dirs=client.swap_dirs, lock_memory="off")


def test_a_filesystem_without_locks_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = open_fds()
    with pytest.raises(ConfigError, match=r"socket .*No locks available.*local filesystem"):
        SocketLock.take(tmp_path / "s")
    assert open_fds() <= before


def test_limits_that_may_not_be_asked_for_stop_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(what: int) -> NoReturn:
        asked.append(what)
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(resource, "getrlimit", refuse)
    startup.raise_open_files_limit()
    assert asked == [resource.RLIMIT_NOFILE]


HEAPS = """
import ctypes, sys, tempfile, threading
from io_daemon.serve.startup import use_one_heap

if sys.argv[1] == "one":
    use_one_heap()
libc, here = ctypes.CDLL(None), threading.Barrier(8)

def allocate():
    here.wait()
    kept = [bytes(4096) for _ in range(64)]
    here.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
with tempfile.NamedTemporaryFile() as file:
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(file.read().count(b"<heap nr="))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc, which says what heaps it has")
def test_threads_of_the_daemon_share_one_heap() -> None:
    def heaps(how: str) -> int:
        run = subprocess.run(
            [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True, timeout=DEADLINE_S
        )
        return int(run.stdout)

    assert heaps("many") > 1
    assert heaps("one") == 1

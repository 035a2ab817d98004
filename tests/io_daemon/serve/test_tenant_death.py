"""A rank dies or leaves: everything of it goes, and forked children keep nothing alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from io_daemon.errors import DaemonLostError
from io_daemon.rank.client import Client
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk
from tests.support.descriptors import held

RANK = """
import ctypes, os, sys
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import ChunkSpec
client = Client.connect(sys.argv[1], job="victim", rank=0)
client.attach(num_frames=16, frame_bytes=65536, swap_dirs=client.swap_dirs, lock_memory="off")
for chunk in client.register([ChunkSpec((65536,))] * 64):
    seq = client.acquire(chunk, write=1)
    client.wait(seq)
    client.release(seq, dirty=1)
for chunk in range(64):
    client.acquire(chunk, read=1)
"""
LAST_WORDS = """
os.write(1, b"attached\\n")
sys.stdin.read()
"""
FORK = """
if {fork} == 0:
    os.write(1, b"child %d\\n" % os.getpid())
    sys.stdin.read()
    os._exit(0)
"""


@contextmanager
def rank(daemon: ServedDaemon, *parts: str) -> Iterator[subprocess.Popen[str]]:
    """A rank process of its own, with reads in flight; killed at the end."""
    script = RANK + "".join(parts) + LAST_WORDS
    command = [sys.executable, "-c", script, daemon.socket]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        yield process
        process.kill()
        process.wait(DEADLINE_S)


def is_gone(daemon: ServedDaemon, fds_before: list[str]) -> bool:
    return daemon.fds() == fds_before and not daemon.files() and not daemon.mapped("infinity-")


def test_a_killed_rank_leaves_neither_files_nor_fds_nor_mappings(daemon: ServedDaemon) -> None:
    fds_before = daemon.fds()
    assert daemon.mapped("infinity-") == 0
    for _ in range(3):
        with rank(daemon) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "attached\n"
            assert len(daemon.files()) == 1
            assert daemon.mapped("infinity-arena") > 0
            process.kill()
            process.wait(DEADLINE_S)
            eventually(lambda: is_gone(daemon, fds_before), "the rank's fds, files and mappings are gone")
    with daemon.attached() as client:  # and the daemon is none the worse for it
        (chunk,) = client.register(specs(1))
        write_chunk(client, chunk, WEIGHT)
        assert chunk_is_intact(client, chunk, WEIGHT)


# os.fork runs the client's hook, which closes its fds; the C library's fork does not, so there the child does hold
# the rank's end of the socket and only the pidfd tells.
@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None).fork()"])
def test_forked_children_keep_no_tenant_alive(daemon: ServedDaemon, fork: str) -> None:
    fds_before = daemon.fds()
    with rank(daemon, FORK.format(fork=fork)) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines[0] == "attached\n"
        child = int(lines[1].split()[1])
        fds = [os.readlink(f"/proc/{child}/fd/{name}") for name in os.listdir(f"/proc/{child}/fd")]
        num_sockets = sum(fd.startswith("socket:") for fd in fds)
        assert num_sockets == 2 + (fork != "os.fork()")  # the rings' two are of no consequence
        assert "infinity-" not in Path(f"/proc/{child}/maps").read_text()
        process.kill()
        process.wait(DEADLINE_S)
        eventually(lambda: is_gone(daemon, fds_before), "the tenant is gone although its child lives")
        assert os.path.exists(f"/proc/{child}")


def test_a_child_that_exits_takes_nothing_with_it(daemon: ServedDaemon) -> None:
    with daemon.attached() as client:
        (chunk,) = client.register(specs(1))
        write_chunk(client, chunk, WEIGHT)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                client.acquire(chunk, read=WEIGHT)
            except DaemonLostError as error:
                code = 0 if "forked child" in str(error) else 2
            client.close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert chunk_is_intact(client, chunk, WEIGHT)


def test_an_unclean_end_is_reclaimed_too(daemon: ServedDaemon) -> None:
    fds_before = daemon.fds()
    client = daemon.connect()
    client.attach(num_frames=4, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
    client.register(specs(4, object_bytes=4096))
    client.close(clean=False)
    eventually(lambda: is_gone(daemon, fds_before), "the tenant is gone")


def test_a_clean_end_is_over_when_close_returns(daemon: ServedDaemon) -> None:
    fds_before = daemon.fds()
    with daemon.attached(num_frames=4) as client:
        for chunk in client.register(specs(16)):
            write_chunk(client, chunk, WEIGHT)
        for chunk in range(16):
            client.acquire(chunk, read=WEIGHT)
    assert daemon.files() == []
    assert daemon.mapped("infinity-") == 0
    eventually(lambda: daemon.fds() == fds_before, "the connection is closed")


def test_a_client_leaves_no_fds_and_no_mappings_in_its_own_process(daemon: ServedDaemon) -> None:
    gc.collect()  # what earlier tests left, which must not go in between
    before = held()
    with daemon.attached() as client:
        client.echo()
    del client
    assert not held() - before


def test_the_same_rank_may_attach_twice(daemon: ServedDaemon) -> None:
    def fill(client: Client, seed: int) -> None:
        for chunk in client.register(specs(8)):
            write_chunk(client, chunk, WEIGHT, seed)

    with daemon.attached(num_frames=2) as one, daemon.attached(num_frames=2) as other:
        fill(one, 1)
        fill(other, 2)
        assert all(chunk_is_intact(one, chunk, WEIGHT, 1) for chunk in range(8))
        assert all(chunk_is_intact(other, chunk, WEIGHT, 2) for chunk in range(8))
    assert daemon.files() == []

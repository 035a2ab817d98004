"""What the daemon grants has limits, and what is not granted costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from io_daemon.errors import BudgetError
from io_daemon.rank import client as door
from io_daemon.rank.client import Client
from io_daemon.serve import conversation, server
from io_daemon.shared import control
from io_daemon.shared.arena import SEALS, Arena, arena_bytes, create_arena
from io_daemon.shared.control import Announce, Attached, Channel, Done, Ended, Hello, encode
from io_daemon.shared.protocol import PAGE_BYTES, PROTOCOL_VERSION, ChunkSpec
from tests.io_daemon.conftest import Serve
from tests.support.daemon import DEADLINE_S, FRAME_BYTES, ServedDaemon, eventually, specs
from tests.support.descriptors import held
from tests.support.in_process import while_serving
from tests.support.raw_rank import RawRank


@pytest.mark.parametrize(
    "refused",
    [
        [ChunkSpec((4 * FRAME_BYTES, 0, 0))] * 3000 + [ChunkSpec((5 * FRAME_BYTES,))],  # the last is too large
        [*specs(3000), ChunkSpec((4 * FRAME_BYTES, 4 * FRAME_BYTES, 4 * FRAME_BYTES))],  # over the arena
    ],
)
def test_a_refused_register_reserves_nothing(daemon: ServedDaemon, refused: list[ChunkSpec]) -> None:
    with daemon.attached(num_frames=8) as client:
        before = client.stats().swap_bytes
        with pytest.raises((ValueError, BudgetError)):
            client.register(refused)
        assert client.stats().swap_bytes == before
        (file,) = client.stats().swap_files
        assert os.stat(file).st_size == before


def test_the_host_budget_is_that_of_all_tenants_together(serve: Serve) -> None:
    daemon = serve("--host-budget-bytes", str(arena_bytes(16, FRAME_BYTES) + 2 * PAGE_BYTES))
    with daemon.attached(num_frames=8, job="first"), daemon.attached(num_frames=7, job="second"):
        with pytest.raises(BudgetError, match="are taken by the ranks that are there"), daemon.attached(num_frames=2):
            pass
        with daemon.attached(num_frames=1):
            pass
    with daemon.attached(num_frames=16):  # all of it is there again
        pass


def test_no_arena_is_made_that_the_daemon_would_refuse(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = serve("--host-budget-bytes", str(arena_bytes(8, FRAME_BYTES)))
    made = []

    def make(*arguments: Any) -> Arena:
        made.append(arguments[0])
        return create_arena(*arguments)

    monkeypatch.setattr(door, "create_arena", make)
    with pytest.raises(BudgetError, match="rank 0 of job brings an arena"), daemon.attached(num_frames=9):
        pass
    with daemon.attached(num_frames=4), pytest.raises(BudgetError), daemon.attached(num_frames=5, job="other"):
        pass
    assert made == [4]


def test_an_arena_counts_while_it_is_made_and_only_once(serve: Serve) -> None:
    daemon = serve("--host-budget-bytes", str(arena_bytes(8, FRAME_BYTES)))
    rank = RawRank(daemon.socket).hello()
    for num_frames in (8, 1, 4):  # the last one counts
        announcement = Announce(job="slow", rank=1, arena_bytes=arena_bytes(num_frames, FRAME_BYTES))
        assert rank.ask(announcement) == (Done(), [])
    with pytest.raises(BudgetError, match="are taken"), daemon.attached(num_frames=5):
        pass
    arena = create_arena(4, FRAME_BYTES, "off")
    answer, fds = rank.ask(rank.attach_request(num_frames=4, frame_bytes=FRAME_BYTES), [arena.fd])
    assert isinstance(answer, Attached)
    for fd in (*fds, arena.fd):
        os.close(fd)
    with daemon.attached(num_frames=3):
        pass
    answer, _ = rank.ask(announcement)
    assert isinstance(answer, Ended), "it has one"
    rank.close()


def test_an_arena_that_does_not_come_counts_until_the_rank_has_gone(serve: Serve) -> None:
    daemon = serve("--host-budget-bytes", str(arena_bytes(8, FRAME_BYTES)))
    rank = RawRank(daemon.socket).hello()
    assert rank.ask(Announce(job="dead", rank=1, arena_bytes=arena_bytes(8, FRAME_BYTES))) == (Done(), [])
    rank.close()

    def attaches() -> bool:
        with contextlib.suppress(BudgetError), daemon.attached(num_frames=8):
            return True
        return False

    eventually(attaches, "nothing is booked any more")


def test_an_arena_that_nobody_has_populated_is_refused(daemon: ServedDaemon) -> None:
    rank = RawRank(daemon.socket).hello()
    fd = os.memfd_create("untouched", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, arena_bytes(1 << 18, 4096))  # a GiB, if the daemon were to allocate it
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    answer, _ = rank.ask(rank.attach_request(num_frames=1 << 18), [fd])
    assert isinstance(answer, Ended)
    assert "not populated" in answer.reason
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)
    rank.close()


def test_idle_connections_do_not_shut_ranks_out(daemon: ServedDaemon) -> None:
    greeting = encode(Hello(protocol_version=PROTOCOL_VERSION))
    idle = []
    for index in range(600):
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(daemon.socket)
        if index % 2:
            idle[-1].sendall(greeting)
        with daemon.connect() as client:
            assert client.swap_dirs
    with daemon.attached():
        eventually(lambda: len(daemon.fds()) < 150, "of one process's idle connections only the newest are kept")
    told = Channel(idle[0]).receive(timeout_s=DEADLINE_S)
    assert told is not None
    assert isinstance(told[0], Ended)
    assert "too many connections" in told[0].reason
    for sock in idle:
        sock.close()


def test_the_limit_of_open_files_is_raised(daemon: ServedDaemon) -> None:
    (limits,) = [line for line in Path(f"/proc/{daemon.pid}/limits").read_text().splitlines() if "open files" in line]
    soft, hard = limits.split()[3:5]
    assert soft == hard


@pytest.mark.parametrize(
    "sent", [b"", b"\x10\x00", b"\x10\x00\x00\x00{", encode(Hello(protocol_version=PROTOCOL_VERSION))]
)
def test_silence_and_half_a_message_have_a_deadline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, swap_dir: Path, sent: bytes
) -> None:
    monkeypatch.setattr(conversation, "HELLO_TIMEOUT_S", 0.2)
    monkeypatch.setattr(conversation, "IDLE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(control, "MESSAGE_TIMEOUT_S", 0.2)

    def use(socket_path: str) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(socket_path)
            sock.sendall(sent)
            while sock.recv(4096):
                pass
            eventually(lambda: not listening(), "nobody listens to a socket that is closed")

    def listening() -> list[str]:
        return [str(task) for task in asyncio.all_tasks(loops[0]) if "AsyncChannel" in str(task.get_coro())]

    loops: list[asyncio.AbstractEventLoop] = []
    assert while_serving(monkeypatch, [swap_dir], use, loops=loops) == 0
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize(("greeted", "num_bytes"), [(False, 5000), (True, 3 << 20)])
def test_a_message_longer_than_its_kind_is_refused_before_it_is_sent(
    daemon: ServedDaemon, greeted: bool, num_bytes: int
) -> None:
    rank = RawRank(daemon.socket)
    if greeted:
        rank.hello()
    rank.channel.socket.sendall(num_bytes.to_bytes(4, "little"))
    assert "longer than" in rank.last_words().reason
    rank.close()


def test_what_a_tenant_held_is_gone_without_the_cyclic_collector(
    monkeypatch: pytest.MonkeyPatch, swap_dir: Path
) -> None:
    def one(socket_path: str, *, clean: bool) -> None:
        client = Client.connect(socket_path, job="one", rank=0)
        client.attach(num_frames=4, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="off")
        chunks = client.register(specs(8))
        for chunk in chunks:
            client.wait(client.acquire(chunk, write=1)) if chunk < 3 else client.acquire(chunk, read=1)
        client.close(clean=clean)

    def use(socket_path: str) -> None:
        gc.collect()  # what tests before this one have left in this process
        gc.disable()
        try:
            before = held()
            for clean in (True, False) * 4:
                one(socket_path, clean=clean)
            eventually(lambda: not held() - before, "descriptors and mappings are given back")
        finally:
            gc.enable()

    monkeypatch.setattr(server, "keep_threads_apart", lambda: None)
    assert while_serving(monkeypatch, [swap_dir], use) == 0


def test_ranks_of_another_pid_namespace_are_not_one_process(tmp_path: Path, swap_dir: Path) -> None:
    """The kernel calls each of them process 0."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root")
    path = str(tmp_path / "s")
    words = [sys.executable, "-m", "io_daemon", "serve", "--socket", path, "--swap-dir", str(swap_dir)]
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", *words], stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            assert daemon.stdout.readline()
            clients = [Client.connect(path, job="job", rank=rank) for rank in range(40)]
            for client in clients:
                client.attach(num_frames=1, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
            for client in clients:
                client.close()
        finally:
            daemon.kill()

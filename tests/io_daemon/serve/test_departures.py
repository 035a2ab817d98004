"""However a connection ends, nothing of what it had stays: no descriptor, no mapping, no object of the daemon's, and
none of it waits for the cyclic collector, which does not go over all objects while anybody is served."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from io_daemon.errors import WorldError
from io_daemon.policy.residency import PlanRequest
from io_daemon.policy.scheduler import TenantScheduler
from io_daemon.rank.client import Client
from io_daemon.serve import conversation, planner, server
from io_daemon.shared import control
from io_daemon.shared.control import LENGTH, Ended, Hello, StatusRequest, Unregister, encode
from io_daemon.shared.protocol import PROTOCOL_VERSION, Access
from tests.support.daemon import DEADLINE_S, FRAME_BYTES, eventually, specs
from tests.support.descriptors import held
from tests.support.in_process import while_serving
from tests.support.raw_rank import RawRank

TURNS = 3
OURS = ("io_daemon.serve", "io_daemon.policy", "io_daemon.shared.control.AsyncChannel", "_asyncio.Task")
VICTIM = """
import os, sys
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import ChunkSpec
client = Client.connect(sys.argv[1], job="victim", rank=0)
client.attach(num_frames=4, frame_bytes=4096, swap_dirs=client.swap_dirs, lock_memory="off")
for chunk in client.register([ChunkSpec((4096,))] * 16):
    client.acquire(chunk, read=1)
print("attached", flush=True)
os.kill(os.getpid(), 9)
"""


def attached(socket_path: str) -> Client:
    client = Client.connect(socket_path, job="one", rank=0)
    client.attach(num_frames=4, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="off", chunks_max=64)
    client.register(specs(8))
    return client


def detach(socket_path: str) -> None:
    attached(socket_path).close()


def hang_up_under_io(socket_path: str) -> None:
    client = attached(socket_path)
    for chunk in range(8):
        client.acquire(chunk, read=1)
    client.close(clean=False)


def be_killed(socket_path: str) -> None:
    subprocess.run([sys.executable, "-c", VICTIM, socket_path], stdout=subprocess.DEVNULL, timeout=DEADLINE_S)


def reset(socket_path: str) -> None:
    """With answers unread, so that the daemon's next word to it fails."""
    rank = RawRank(socket_path).hello().attach()
    for _ in range(20):  # their answers still fit the socket: more would wait for whoever gives up first
        rank.channel.send(StatusRequest(), timeout_s=DEADLINE_S)
    rank.close()


def half_a_message(socket_path: str) -> None:
    client = attached(socket_path)
    sock = client._connection._channel.socket
    sock.sendall(LENGTH.pack(200) + b'{"type":')
    wait_for_the_end(sock)
    client.close(clean=False)


def half_a_hello(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(socket_path)
        sock.sendall(encode(Hello(protocol_version=PROTOCOL_VERSION))[:9])
        wait_for_the_end(sock)


def silence(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(socket_path)
        wait_for_the_end(sock)


def another_version(socket_path: str) -> None:
    rank = RawRank(socket_path)
    rank.ask(Hello(protocol_version=PROTOCOL_VERSION + 1))
    rank.close()


def nonsense_after_attach(socket_path: str) -> None:
    client = attached(socket_path)
    sock = client._connection._channel.socket
    sock.sendall(LENGTH.pack(20) + b"x" * 20)
    wait_for_the_end(sock)
    client.close(clean=False)


def garbage_in_the_ring(socket_path: str) -> None:
    rank = RawRank(socket_path).hello().attach()
    rank.poke(64, 1 << 63)
    rank.last_words()
    rank.close()


def be_refused(socket_path: str) -> None:
    """Every request that can be refused, one after the other."""
    client = attached(socket_path)
    for ask in (
        lambda: client.register(specs(1000)),
        lambda: client.unregister(range(100, 200)),
        lambda: client.upload_trace(1, [Access(60, 1, 0, 0)]),
    ):
        assert is_refused(ask)
    client.close()


def leave_while_a_plan_is_made(socket_path: str) -> None:
    client = attached(socket_path)
    client.upload_trace(1, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    client.close(clean=False)


def follow_a_plan(socket_path: str) -> None:
    client = attached(socket_path)
    client.upload_trace(1, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    eventually(lambda: client.stats().num_plans == 1, "the plan is made")
    client.mark(1)
    client.echo()
    client.close()


def be_failed(socket_path: str) -> None:
    """The daemon meets an error of its own while it answers."""
    rank = RawRank(socket_path).hello().attach()
    answer, _ = rank.ask(Unregister(start=7, stop=8))
    assert isinstance(answer, Ended)
    rank.close()


def be_given_no_plan(socket_path: str) -> None:
    client = attached(socket_path)
    client.upload_trace(13, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    time.sleep(0.2)
    client.close()


def is_refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except (ValueError, WorldError):
        return True
    return False


def wait_for_the_end(sock: socket.socket) -> None:
    sock.settimeout(DEADLINE_S)
    with contextlib.suppress(ConnectionError):
        while sock.recv(4096):
            pass


WAYS: list[Callable[[str], None]] = [
    detach,
    hang_up_under_io,
    be_killed,
    reset,
    half_a_message,
    half_a_hello,
    silence,
    another_version,
    nonsense_after_attach,
    garbage_in_the_ring,
    be_refused,
    leave_while_a_plan_is_made,
    follow_a_plan,
    be_failed,
    be_given_no_plan,
]


def all_held() -> Counter[str]:
    """What the process holds, and objects of the daemon's by their types."""
    found = held()
    for each in gc.get_objects():
        name = f"{type(each).__module__}.{type(each).__name__}"
        if name.startswith(OURS):
            found[name] += 1
    return found


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_however_a_connection_ends_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, swap_dir: Path, way: Callable[[str], None]
) -> None:
    for name in ("HELLO_TIMEOUT_S", "IDLE_TIMEOUT_S"):
        monkeypatch.setattr(conversation, name, 0.2)
    monkeypatch.setattr(control, "MESSAGE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server, "keep_threads_apart", lambda: None)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # whoever keeps records keeps tracebacks
    unregister, make = TenantScheduler.unregister, planner.dump

    def failing_unregister(self: TenantScheduler, chunks: range) -> object:
        if chunks == range(7, 8):
            raise MemoryError("made up")
        return unregister(self, chunks)

    def failing_dump(value: object, fd: int) -> None:
        if way is be_given_no_plan and isinstance(value, PlanRequest):
            raise OSError(28, "made up")
        make(value, fd)

    monkeypatch.setattr(TenantScheduler, "unregister", failing_unregister)
    monkeypatch.setattr(planner, "dump", failing_dump)

    def turn(socket_path: str) -> None:
        worker = threading.Thread(target=way, args=(socket_path,))  # frames of this one hold nothing of it
        worker.start()
        worker.join(DEADLINE_S)
        assert not worker.is_alive()

    def use(socket_path: str) -> None:
        gc.collect()
        gc.freeze()  # what other tests have imported is not looked through each time
        with contextlib.closing(attached(socket_path)) as bystander:
            turn(socket_path)  # what is made once, for all, is made here
            eventually(lambda: len(list(swap_dir.iterdir())) == 1, "it is gone")
            bystander.echo()
            gc.collect()
            gc.disable()
            try:
                before = all_held()
                for _ in range(TURNS):
                    turn(socket_path)
                extra: Counter[str] = Counter()

                def nothing_more() -> bool:
                    nonlocal extra
                    extra = all_held() - before
                    return not extra

                with contextlib.suppress(AssertionError):
                    eventually(nothing_more, "nothing of them is left")
                assert not extra
            finally:
                gc.enable()
                gc.unfreeze()

    assert while_serving(monkeypatch, [swap_dir], use) == 0

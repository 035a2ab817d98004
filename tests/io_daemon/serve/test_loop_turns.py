"""Nothing keeps the daemon's loop to itself: no descriptor that stays readable, no drive, no hanging mount, no rank."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from io_daemon._native import Reactor
from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import SwapDir
from io_daemon.errors import ProtocolError
from io_daemon.policy.actions import StartIo
from io_daemon.serve import swap_device
from io_daemon.serve.conversation import Peer, watching_process
from io_daemon.serve.holdings import Holdings, Rings
from io_daemon.serve.node import Node
from io_daemon.serve.planner import Planner
from io_daemon.serve.startup import watching_parent
from io_daemon.serve.swap_device import REAP_MAX, SwapDevice, SwapRequest
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.control import Attach, Ended
from io_daemon.shared.protocol import PAGE_BYTES, Cqe, IoEnd, Status
from io_daemon.shared.table import TableGeometry
from tests.support.daemon import DEADLINE_S
from tests.support.fake_reactor import DeviceModel, FakeArena, FakeReactor

TURNS = 10
CONFIG = ServeConfig(socket_path=Path("/socket"), swap_dirs=(Path("/swap"),))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, DEADLINE_S))


async def until(is_over: Callable[[], bool]) -> None:
    """And some turns of the loop more."""
    while not is_over():
        await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


class CountingPeer(Peer):
    num_departures = 0

    def depart(self, ended: Ended | None) -> None:
        self.num_departures += 1
        super().depart(ended)


class CountingEvent(asyncio.Event):
    num_sets = 0

    def set(self) -> None:
        self.num_sets += 1
        super().set()


def test_a_rank_that_has_ended_is_noticed_once(process: subprocess.Popen[bytes]) -> None:
    """What its tenant has in flight may take minutes to end."""

    async def watch() -> None:
        peer = CountingPeer(process.pid, asyncio.get_running_loop().create_future())
        with socket.socket() as sock, watching_process(sock, peer):  # of a kind that tells no peer: the pid will do
            process.kill()
            await until(peer.departure.done)
        assert peer.num_departures == 1

    run(watch())


def test_a_parent_that_has_ended_is_noticed_once(process: subprocess.Popen[bytes]) -> None:
    async def watch() -> None:
        stop = CountingEvent()
        config = CONFIG.model_copy(update={"parent_pidfd": os.pidfd_open(process.pid)})
        with watching_parent(stop, config):
            process.kill()
            await until(stop.is_set)
        assert stop.num_sets == 1

    run(watch())


class SilentSwapDir(SwapDir):
    """Its filesystem answers once, and then when ``answers`` is set."""

    def free_bytes(self) -> int:
        if next(self.__dict__["asked"]):
            assert self.__dict__["answers"].wait(DEADLINE_S), "somebody waits for what may never come"
            return 2
        return 1


def make_device(swap_dir: SwapDir | None = None, arena: FakeArena | None = None) -> tuple[SwapDevice, FakeReactor]:
    reactor = FakeReactor(random.Random(0), DeviceModel(), {}, {} if arena is None else {arena.fd: arena})
    swap_dir = swap_dir or SwapDir(Path("/swap"), True, "fake", ())
    return SwapDevice(swap_dir, cast(Reactor, reactor), CONFIG, lambda: None), reactor


def test_a_drive_however_fast_has_one_batch_a_turn() -> None:
    ended: list[int] = []

    async def complete() -> None:
        device, reactor = make_device()
        requester = SimpleNamespace(on_io_done=lambda io, *_: ended.append(io.io_id))
        for tag in range(3 * REAP_MAX):
            io = StartIo(tag, True, 0, 0, 0, 0, 0, PAGE_BYTES, 0, False, False)
            device._in_flight[tag] = SwapRequest(io, requester, 0, 0, 0, cast(Any, None), 0)
            device._queue.in_flight_bytes += io.num_bytes
            device._queue._written_bytes += io.num_bytes
            reactor._done.append((tag, Status.OK, 0, 0, 0, 0))
        device._on_completions()
        assert len(ended) == REAP_MAX
        await until(lambda: len(ended) == 3 * REAP_MAX)
        assert ended == list(range(3 * REAP_MAX))
        device.close(0)

    run(complete())


def test_a_reactor_has_no_more_requests_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, of which a deep queue of large blocks holds any number."""
    monkeypatch.setattr(swap_device, "REQUESTS_MAX", 3)
    started: list[int] = []

    async def serve() -> None:
        device, _ = make_device()
        monkeypatch.setattr(device, "_submit", lambda tag, _: started.append(tag))
        requester = SimpleNamespace(on_io_done=lambda *_: None)
        for number in range(5):
            io = StartIo(number, False, 0, 0, 0, 0, 0, PAGE_BYTES, 0, False, True)
            device.enqueue(1, SwapRequest(io, requester, 0, 0, 0, cast(Any, None), 0))
        device.pump()
        assert started == [1, 2, 3]
        monkeypatch.setattr(device, "_reap", lambda: [(2, Status.OK, 0, 0, 0, 0)])
        device._on_completions()
        assert started == [1, 2, 3, 4]
        device.close(0)

    run(serve())


def test_a_status_waits_for_no_mount_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_device, "FREE_BYTES_TIMEOUT_S", 0.01)
    monkeypatch.setattr("io_daemon.serve.node.Planner", lambda: None)
    swap_dir, answers, asked = SilentSwapDir(Path("/swap"), True, "nfs4", ()), threading.Event(), itertools.count()
    swap_dir.__dict__.update(answers=answers, asked=asked)

    async def ask() -> None:
        device, _ = make_device(swap_dir)
        node = Node(CONFIG, [device])
        assert [(await node.status()).devices[0].free_bytes for _ in range(3)] == [1, 1, 1]
        assert next(asked) == 2, "no second thread waits beside the first"
        answers.set()
        await until(lambda: device._asking is None)
        assert device.status().free_bytes == 2
        device.close(0)

    run(ask())


def test_what_a_rank_did_to_its_wake_ups_is_no_error_of_the_loop(tmp_path: Path) -> None:
    rings = Rings()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.bind(str(tmp_path / "stranger"))
        rings._wake.send(b"x")  # that it leaves unread
        rings.rank_wake.connect(str(tmp_path / "stranger"))
        rings.take_wake_up()
        rings.take_wake_up()
    rings.close()


def test_a_tenant_whose_answers_find_no_ring_still_sees_its_io_end() -> None:
    """Else its end would wait for that for ever."""
    request = Attach(
        job="job", rank=0, num_frames=2, frame_bytes=PAGE_BYTES, page_locked=False, swap_dirs=("/swap",), chunks_max=2
    )
    table = FakeArena(TableGeometry(2, PAGE_BYTES, PAGE_BYTES, 2), "job", 0)
    endings: list[Ended] = []

    def refuse(_: Cqe) -> NoReturn:
        raise ProtocolError("completion ring: head 7 is out of range")

    async def answer() -> None:
        rings = SimpleNamespace(answer=refuse, wake_fd=table.fd)
        holdings = cast(Holdings, SimpleNamespace(table=table, rings=rings, seats=[]))
        tenant = Tenant(request, holdings, 1, CONFIG, cast(Planner, None), endings.append)
        tenant._in_flight.count(+1)
        has_ended = threading.Event()

        def work() -> tuple[None, list[Cqe]]:
            assert has_ended.wait(DEADLINE_S)
            return None, [Cqe(1, Status.OK)]

        apart = asyncio.ensure_future(tenant._apart(work))
        await until(lambda: tenant._is_apart)
        io = StartIo(0, True, 0, 0, 0, 0, 0, PAGE_BYTES, 0, False, False)
        tenant.on_io_done(io, IoEnd(Status.OK, 0, 0, 0, 0))
        has_ended.set()
        await asyncio.gather(apart, return_exceptions=True)
        assert tenant.num_in_flight == 0
        assert [each.by_fault for each in endings] == [True]

    run(answer())
    table.close()

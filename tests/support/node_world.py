"""A daemon's node among faults: production Node, Tenants, SwapDevices, fair queues and rings, on a virtual clock, over
fake reactors; ranks that train, fail, leave, die, vandalise; and a node that drains under them.

Whatever happens, every granted lease shows what it must, nothing is given back under an I/O, and in the end everything
is given back. A world is a function of its seed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

from io_daemon._native import Reactor
from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import SwapDir
from io_daemon.disk.swap_file import SwapFile
from io_daemon.errors import WorldError
from io_daemon.policy.residency import plan
from io_daemon.serve import holdings, node
from io_daemon.serve.node import Node
from io_daemon.serve.planner import Planner, dump, load
from io_daemon.serve.swap_device import SwapDevice, SwapRequest
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.protocol import PAGE_BYTES
from io_daemon.shared.states import TenantState
from io_daemon.shared.table import TableGeometry
from tests.support.fake_reactor import DeviceModel, FakeArena, FakeReactor, FakeSwapFile, check
from tests.support.simulated_rank import SimulatedRank
from tests.support.virtual_loop import run


class FakeSwapDir(SwapDir):
    def free_bytes(self) -> int:
        return 0


class WatchedDevice(SwapDevice):
    """Notes I/O that a draining tenant starts although no lease of it waits."""

    def enqueue(self, tenant_id: int, request: SwapRequest) -> None:
        tenant = cast(Tenant, request.requester)
        check(request.io.demand or tenant.state is TenantState.SERVING, f"{tenant.state.name}, and works ahead")
        super().enqueue(tenant_id, request)


class InlinePlanner(Planner):
    """Plans are made here, some time later, or not."""

    rng: random.Random

    async def _run(self, asked: int, answered: int, num_accesses: int) -> None:
        await asyncio.sleep(self.rng.random() * 0.05)
        if self.rng.random() < 0.1:
            raise WorldError("no plan")
        dump(plan(load(asked)), answered)


def open_files() -> set[tuple[str, str]]:
    """(number, what it is) of this process's descriptors, so that what others close meanwhile does not count."""
    found: set[tuple[str, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


class World:
    MEETS: Final = (
        *("drains", "leaves", "dies", "vandalises", "is refused", "lease refused", "lease failed", "register refused"),
        *("unregisters under I/O", "closes under I/O", "plans", "daemon failed"),
    )

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.faulty = rng.random() < 0.5
        self.drains_at_s = rng.random() * 0.2 if rng.random() < 0.4 else None
        self.draining = False
        self.log: list[tuple[float, str]] = []
        """What happened when, to compare two runs."""
        self.met: Counter[str] = Counter()
        """How often what of MEETS has happened."""
        self.arenas: dict[int, FakeArena] = {}
        self.files: dict[int, FakeSwapFile] = {}
        self.full_chance = 0.1 if self.faulty else 0.0
        self._fds = itertools.count(1000)

    def run(self) -> None:
        gc.collect()  # what earlier tests left, which must not go in between
        gc.disable()  # as the daemon runs: what departed tenants held is given back without it
        logging.disable()  # whoever keeps records keeps tenants
        before = open_files()
        try:
            with self._in_place():
                run(self._live(), self.rng)
        finally:
            logging.disable(logging.NOTSET)
            gc.enable()
        check(not (left := open_files() - before), f"descriptors are left: {left}")

    def note(self, what: str) -> None:
        self.log.append((asyncio.get_running_loop().time(), what))

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """What a tenant holds of the machine is fake."""

        def make_table(geometry: TableGeometry, job: str, rank: int) -> FakeArena:
            self.arenas[rank] = FakeArena(geometry, job, rank)
            return self.arenas[rank]

        def create_file(directory: Path, *, job: str, rank: int, file_index: int, **_: Any) -> FakeSwapFile:
            fd = next(self._fds)
            path = directory / f"{job}-{rank}-{file_index}"
            self.files[fd] = FakeSwapFile(path, self.rng, self.full_chance, fd=fd)
            return self.files[fd]

        with (
            mock.patch.object(holdings, "Table", make_table),
            mock.patch.object(holdings, "adopt_arena", lambda arena_fd, *_: arena_fd),
            mock.patch.object(SwapFile, "create", create_file),
            mock.patch.object(node, "Planner", self.make_planner),
        ):
            yield

    def make_planner(self) -> Planner:
        planner = InlinePlanner()
        planner.rng = self.rng
        return planner

    async def _live(self) -> None:
        devices = self._start()
        await self.play()
        self._check_given_back(devices)

    def _start(self) -> list[SwapDevice]:
        rng = self.rng
        swap_dirs = tuple(Path("/", f"swap{index}") for index in range(rng.choice([1, 1, 2])))
        config = ServeConfig(
            socket_path=Path("/socket"),
            swap_dirs=swap_dirs,
            block_bytes=PAGE_BYTES,
            queue_depth=rng.choice([1, 4, 32]),
            verify_checksums=rng.random() < 0.8,
        )
        model = self.device_model()
        self.reactors = [FakeReactor(rng, model, self.files, self.arenas) for _ in swap_dirs]
        devices: list[SwapDevice] = [
            WatchedDevice(FakeSwapDir(path, True, "fake", ()), cast(Reactor, reactor), config, lambda: None)
            for path, reactor in zip(swap_dirs, self.reactors, strict=True)
        ]
        self.node = Node(config, devices)
        return devices

    def device_model(self) -> DeviceModel:
        rng, chance = self.rng, 0.01 if self.faulty else 0.0
        return DeviceModel(
            slow_chance=rng.choice([0.0, 0.02, 0.2]),
            read_faults=rng.choice([0.0, chance, 10 * chance]),
            write_faults=rng.choice([0.0, chance / 4, chance]),
            refusals=chance / 2,
            buffer_refusals=10 * chance,
        )

    async def play(self) -> None:
        """What happens on the node; in the end all ranks have gone."""
        ranks = [SimulatedRank(self, number) for number in range(self.rng.randint(1, 4))]
        tasks = [asyncio.ensure_future(rank.live()) for rank in ranks]
        if self.drains_at_s is not None:
            await asyncio.sleep(self.drains_at_s)
            await self.drain(ranks)
        await asyncio.gather(*tasks)

    def _check_given_back(self, devices: Sequence[SwapDevice]) -> None:
        check(not self.node.tenants and not self.node._arenas_bytes, "tenants are left, or what they took")
        for device, reactor in zip(devices, self.reactors, strict=True):
            check(not reactor.files and not reactor.buffers, "the reactor keeps files or arenas")
            check(not device._queue.in_flight_bytes and not len(device._queue), "the queue is not empty")
            check(device.close(0), "the reactor ends")
        check(all(arena.closed for arena in self.arenas.values()), "a table stays open")
        check(all(file.closed and not file.linked for file in self.files.values()), "a swap file stays")

    async def drain(self, ranks: Sequence[SimulatedRank]) -> None:
        self.note("drain")
        self.met["drains"] += 1
        self.draining = True
        await asyncio.gather(*self.node.drain())
        check(all(each.num_in_flight == 0 for each in self.node.tenants), "drained, and I/O is in flight")
        await asyncio.sleep(self.rng.choice([0.0, 0.005]))  # ranks may say a little more before they are told to go
        for rank in ranks:
            rank.depart("the node has drained")

"""The end of a node and of a tenant, step by step, on a virtual clock: production code over a fake reactor whose I/O
takes its time."""

from __future__ import annotations

import asyncio

import pytest

from io_daemon.errors import ConfigError
from io_daemon.shared.protocol import Status
from io_daemon.shared.states import TenantState
from tests.support.fake_reactor import DeviceModel
from tests.support.node_world import World
from tests.support.simulated_rank import LeaseError, SimulatedRank

LATENCY_S = 1.0


class SlowWorld(World):
    """No faults; every I/O takes seconds of virtual time."""

    def __init__(self) -> None:
        super().__init__(0)
        self.faulty, self.full_chance = False, 0.0

    def device_model(self) -> DeviceModel:
        return DeviceModel(latency_s=LATENCY_S, slow_chance=0.0)

    def num_submitted(self) -> int:
        return sum(reactor.num_submitted for reactor in self.reactors)

    async def busy_rank(self, number: int = 0) -> SimulatedRank:
        """With one lease granted, and I/O in flight for one that waits for frames."""
        rank = SimulatedRank(self, number)
        assert await rank.attach()
        await rank.register(16)
        seqs = {chunk: rank.acquire(chunk, 0, rank.kinds(chunk)) for chunk in rank.chunks if rank.kinds(chunk)}
        for chunk, seq in list(seqs.items())[:-1]:
            await rank.granted(seq)
            if rank.tenant.num_in_flight:
                self.held = seq, rank.kinds(chunk)
                return rank
            rank.release(seq, dirty=rank.kinds(chunk))
        raise AssertionError("all that was registered fits the arena")


class DrainedWorld(SlowWorld):
    async def play(self) -> None:
        rank = await self.busy_rank()
        seq, kinds = self.held
        self.draining = True
        draining = asyncio.gather(*self.node.drain())
        await asyncio.sleep(0)
        queued = [other for other in rank.truth.leases if other != seq]
        refused = rank.acquire(rank.chunks[0], 0, 1)
        with pytest.raises(LeaseError):
            await rank.granted(refused)
        assert rank.last_status == Status.SHUTTING_DOWN
        assert queued
        for other in queued:
            with pytest.raises(LeaseError):
                await rank.granted(other)
        rank.release(seq, dirty=kinds)  # granted before: it ends as it would have
        assert not draining.done()
        await draining
        assert rank.tenant.num_in_flight == 0
        num_submitted = self.num_submitted()
        with pytest.raises(LeaseError):
            await rank.granted(rank.acquire(rank.chunks[1], 1, 0))
        await asyncio.sleep(10 * LATENCY_S)
        assert self.num_submitted() == num_submitted, "a drained tenant starts I/O"
        await rank.end()


def test_a_drain_refuses_new_leases_and_starts_no_io() -> None:
    DrainedWorld().run()


class ClosingWorld(SlowWorld):
    async def play(self) -> None:
        rank = await self.busy_rank()
        tenant, arena = rank.tenant, rank.arena
        in_flight_at_once = sum(len(reactor.in_flight) for reactor in self.reactors)
        assert in_flight_at_once > 0
        ending = asyncio.ensure_future(rank.end())
        while any(reactor.in_flight for reactor in self.reactors):
            assert tenant.state is not TenantState.RECLAIMED
            assert not arena.closed
            assert not any(file.closed for file in self.files.values())
            assert all(len(reactor.files) == 1 and len(reactor.buffers) == 1 for reactor in self.reactors)
            await asyncio.sleep(LATENCY_S / 16)
        num_submitted = self.num_submitted()
        await ending
        assert self.num_submitted() == num_submitted
        assert tenant.state is TenantState.RECLAIMED


def test_close_waits_for_delayed_io_and_gives_nothing_back_before() -> None:
    ClosingWorld().run()


class LateWorld(SlowWorld):
    async def play(self) -> None:
        asked = asyncio.ensure_future(SimulatedRank(self, 0).attach())  # its arena is being registered in a thread
        await asyncio.sleep(0)
        self.draining = True
        assert self.node.drain() == []
        assert not await asked
        late = SimulatedRank(self, 1)
        with pytest.raises(ConfigError, match="shutting down"):
            await late.ask_to_attach()
        assert not self.node.tenants


def test_a_rank_that_attaches_while_the_node_drains_is_refused_and_leaves_nothing() -> None:
    LateWorld().run()


class DrainedWhileApartWorld(SlowWorld):
    async def play(self) -> None:
        rank = SimulatedRank(self, 0)
        assert await rank.attach()
        await rank.register(4)
        registering = asyncio.ensure_future(rank.register(4))
        while not rank.tenant._is_apart:
            await asyncio.sleep(0)
        self.draining = True
        draining = asyncio.gather(*self.node.drain())
        await asyncio.sleep(0)
        assert not (rank.tenant._is_apart and rank.tenant.state is TenantState.DRAINING)
        await registering
        await draining
        await rank.end()


def test_a_drain_waits_for_the_thread_that_has_the_scheduler() -> None:
    DrainedWhileApartWorld().run()

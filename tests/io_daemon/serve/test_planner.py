"""Plans come from a process of their own, which can fail, be cancelled, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from io_daemon.errors import WorldError
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.scheduler import TRACES_MAX
from io_daemon.policy.trace import Trace
from io_daemon.serve import planner
from io_daemon.serve.planner import Planner, dump, load
from io_daemon.shared.protocol import Access
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk
from tests.support.node_world import World
from tests.support.simulated_rank import SimulatedRank
from tests.support.virtual_loop import run

REQUEST = PlanRequest(
    Trace.from_accesses([Access(chunk, WEIGHT, 0, 0) for chunk in (0, 1, 2, 1)]),
    np.array(([1] + [0] * 7) * 3, dtype=np.uint8),
    2,
)


def test_the_plan_is_the_one_that_is_made_here() -> None:
    here, there = plan(REQUEST), asyncio.run(Planner().plan(REQUEST))
    assert (there.moved_frames, there.bound_frames, there.selective) == (
        here.moved_frames,
        here.bound_frames,
        here.selective,
    )
    assert there.kept.tolist() == here.kept.tolist()
    assert there.position.tolist() == here.position.tolist()


def test_a_planner_that_fails_or_hangs_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "__name__", "io_daemon.no_such_module")
    with pytest.raises(WorldError, match="ended with status 1"):
        asyncio.run(Planner().plan(REQUEST))
    monkeypatch.undo()
    monkeypatch.setattr(planner, "PLAN_TIMEOUT_S", 0.0)
    with pytest.raises(WorldError, match="no plan for 4 accesses"):
        asyncio.run(Planner().plan(REQUEST))


def test_a_tenant_that_leaves_takes_its_planner_with_it(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=64, frame_bytes=4096) as client:
        client.register(specs(2000, object_bytes=4096))
        client.upload_trace(1, [Access(chunk, WEIGHT, 0, 0) for chunk in range(2000)] * 4)
        client.upload_trace(2, [Access(0, WEIGHT, 0, 0)])
        eventually(lambda: bool(daemon.children()), "it plans")
        assert client.echo() < DEADLINE_S
    eventually(lambda: not daemon.children(), "the planner is gone")
    assert daemon.files() == []


def test_a_newer_trace_replaces_the_one_being_planned(daemon: ServedDaemon) -> None:
    with daemon.attached(num_frames=4) as client:
        chunks = client.register(specs(8))
        for chunk in chunks:
            write_chunk(client, chunk, WEIGHT)
        for _ in range(3):
            client.upload_trace(1, [Access(chunk, WEIGHT, 0, 0) for chunk in chunks])
        eventually(lambda: client.stats().num_plans == 1, "one plan is made")
        client.mark(1)
        assert all(chunk_is_intact(client, chunk, WEIGHT) for chunk in chunks)
        client.unregister(range(chunks[4], chunks[-1] + 1))
        client.mark(1)
        assert chunk_is_intact(client, chunks[0], WEIGHT)


class GatedPlanner(Planner):
    """Makes a plan when the test lets it; requests are told apart by the lengths of their traces."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []
        self.running: dict[int, asyncio.Future[None]] = {}

    async def _run(self, asked: int, answered: int, num_accesses: int) -> None:
        self.started.append(num_accesses)
        self.running[num_accesses] = asyncio.get_running_loop().create_future()
        try:
            await self.running[num_accesses]
        finally:
            del self.running[num_accesses]
        dump(plan(load(asked)), answered)

    async def finish(self, num_accesses: int) -> None:
        """And have begun what follows from it."""
        self.running[num_accesses].set_result(None)
        await asyncio.sleep(1.0)


def trace_of(num_accesses: int, chunk: int = 0) -> Trace:
    return Trace.from_accesses([Access(chunk, WEIGHT, 0, 0)] * num_accesses)


def test_two_plans_are_made_at_a_time_in_the_order_in_which_they_were_asked_for() -> None:
    async def play() -> None:
        gated = GatedPlanner()
        requests = [REQUEST._replace(trace=trace_of(length)) for length in range(1, 6)]
        plans = [asyncio.ensure_future(gated.plan(request)) for request in requests]
        await asyncio.sleep(1.0)
        assert sorted(gated.started) == [1, 2]
        await gated.finish(2)
        assert gated.started[2:] == [3]
        plans[3].cancel()  # whoever gives up waiting leaves its turn to the next
        await gated.finish(1)
        assert gated.started[2:] == [3, 5]
        await gated.finish(3)
        await gated.finish(5)
        assert [each.cancelled() for each in plans] == [False, False, False, True, False]

    run(play(), random.Random(0))


class PlanningWorld(World):
    """Ranks without faults, whose plans are made when the test says so."""

    def __init__(self) -> None:
        super().__init__(0)
        self.faulty, self.full_chance = False, 0.0
        self.gated = GatedPlanner()

    def make_planner(self) -> Planner:
        self.gated = GatedPlanner()
        return self.gated

    async def ranks(self, count: int) -> list[SimulatedRank]:
        ranks = [SimulatedRank(self, number) for number in range(count)]
        for rank in ranks:
            assert await rank.attach()
            await rank.register(8)
        return ranks


async def upload(rank: SimulatedRank, trace_id: int, num_accesses: int) -> None:
    chunk = next(each for each in rank.chunks if rank.kinds(each) & WEIGHT)
    await rank.tenant.set_trace(trace_id, lambda: trace_of(num_accesses, chunk))


class FairWorld(PlanningWorld):
    async def play(self) -> None:
        greedy, *others = await self.ranks(3)
        for length in range(1, 6):
            await upload(greedy, length, length)
        for index, other in enumerate(others):
            await upload(other, 1, 10 + index)
        await asyncio.sleep(1.0)
        assert self.gated.started == [1, 10], "one plan a tenant, two at a time"
        await self.gated.finish(1)
        assert self.gated.started == [1, 10, 11], "the third tenant was there before the first one's second plan"
        await self.gated.finish(10)
        assert self.gated.started == [1, 10, 11, 2]
        await self.gated.finish(11)
        assert self.gated.started == [1, 10, 11, 2], "one plan a tenant, also when a planner is free"
        for rank in (greedy, *others):
            await rank.end()


def test_a_tenant_with_many_traces_lets_the_others_have_their_turns() -> None:
    FairWorld().run()


class BoundedWorld(PlanningWorld):
    async def play(self) -> None:
        (rank,) = await self.ranks(1)
        for trace_id in range(TRACES_MAX):
            await upload(rank, trace_id, 1 + trace_id)
        with pytest.raises(ValueError, match=f"{TRACES_MAX} traces wait"):
            await upload(rank, TRACES_MAX, 100)
        await upload(rank, 3, 50)  # a newer one in the place of an older one is none more
        await asyncio.sleep(1.0)
        await self.gated.finish(1)  # made, and not followed yet: it still waits for its pass
        with pytest.raises(ValueError, match="traces wait"):
            await upload(rank, TRACES_MAX, 100)
        await rank.end()


def test_at_most_so_many_traces_of_a_tenant_wait() -> None:
    BoundedWorld().run()


def test_a_plan_that_is_cancelled_closes_its_files_when_no_thread_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else their numbers are given to other files, a swap file's say, and the thread writes into those."""
    begun, go_on = threading.Event(), threading.Event()
    errors: list[OSError] = []

    def slow_dump(value: object, fd: int) -> None:
        begun.set()
        go_on.wait(DEADLINE_S)
        try:
            dump(value, fd)
        except OSError as error:
            errors.append(error)

    async def play() -> None:
        planning = asyncio.ensure_future(Planner().plan(REQUEST))
        await asyncio.to_thread(begun.wait, DEADLINE_S)
        planning.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not planning.done()
        go_on.set()
        await asyncio.gather(planning, return_exceptions=True)
        assert planning.cancelled()

    monkeypatch.setattr(planner, "dump", slow_dump)
    asyncio.run(play())
    assert errors == []

"""Plans come from a process of their own, which can fail, be cancelled, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from io_daemon.errors import WorldError
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.trace import Trace
from io_daemon.serve import planner
from io_daemon.serve.planner import Planner
from io_daemon.shared.protocol import Access
from tests.support.daemon import DEADLINE_S, WEIGHT, ServedDaemon, chunk_is_intact, eventually, specs, write_chunk

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

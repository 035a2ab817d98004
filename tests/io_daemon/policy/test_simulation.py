"""Whole steps in a simulated world: traffic against the bound, stalls, faults, several tenants, small budgets.

Every lease's contents are checked by ModelTenant in all of these; each run is a function of its seed.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence

import numpy as np
import pytest

from io_daemon.policy import eviction
from io_daemon.policy.actions import StartIo
from io_daemon.policy.counters import Counters
from io_daemon.policy.eviction import rank_of
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.swap_object import SwapObject
from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX, PAGE_BYTES, Access, ChunkSpec, IoEnd, Status
from io_daemon.shared.states import ObjectFlags
from tests.support.simulator import DiskModel, Pass, Rank, Simulator, counted_since
from tests.support.step_traces import chunk_specs, cyclic_scan, evaluation, fill, training_step

DEMAND_FRAMES = 8
"""Of one update: weight, gradient, three fp32 states of two frames each."""
# A frame stands for 2 MB, so a byte per microsecond here is half a GB/s there.
SSD = DiskModel(read_bytes_per_us=4.0, write_bytes_per_us=4.0, latency_us=80.0, in_flight_bytes_max=16 * PAGE_BYTES)


def run_steps(
    num_frames: int,
    specs: Sequence[ChunkSpec],
    passes: Sequence[Pass],
    *,
    window: int,
    seed: int = 1,
    disk: DiskModel = SSD,
    compute_us: float = 1000.0,
    leases_ahead: int = 1,
) -> tuple[Rank, Counters]:
    """The rank after its passes, and the counters of the last one."""
    simulator = Simulator(seed, disk)
    options = {"num_frames": num_frames, "in_flight_frames_max": window, "num_files": 2}
    rank = simulator.add_rank(options, passes=passes, leases_ahead=leases_ahead, compute_us=compute_us)
    rank.tenant.register(specs)
    simulator.run()
    return rank, counted_since(rank.tenant.at_mark, rank.tenant.scheduler.counters)


def moved_frames(counters: Counters) -> int:
    return (sum(counters.bytes_read) + sum(counters.bytes_written)) // PAGE_BYTES


def repeated(accesses: Sequence[Access], times: int) -> list[Pass]:
    return [Pass(accesses=accesses, upload=index == 0) for index in range(times)]


@pytest.mark.parametrize(("num_objects", "num_frames", "window"), [(100, 40, 4), (100, 90, 8), (64, 10, 2), (30, 4, 1)])
def test_a_cyclic_scan_hits_all_but_the_window(num_objects: int, num_frames: int, window: int) -> None:
    chunks = range(num_objects)
    written = Pass(accesses=fill(chunks, mask=1), trace_id=9)
    specs = [ChunkSpec((PAGE_BYTES,))] * num_objects
    _, last = run_steps(num_frames, specs, [written, *repeated(cyclic_scan(chunks), 5)], window=window)
    assert last.hits + last.prefetch_hits + last.misses == num_objects
    assert last.hits >= num_frames - window - 2
    missed = num_objects - last.hits
    assert missed <= sum(last.bytes_read) / PAGE_BYTES <= missed + window, "the window may reach into the next pass"
    assert sum(last.bytes_written) == 0
    assert last.misses <= num_objects // 10, "what does not hit is prefetched"


def test_before_a_trace_is_known_a_scan_misses_but_is_served() -> None:
    chunks = range(30)
    passes = [Pass(accesses=fill(chunks, mask=1), trace_id=9), Pass(accesses=cyclic_scan(chunks))]
    _, last = run_steps(10, [ChunkSpec((PAGE_BYTES,))] * 30, passes, window=2)
    assert last.prefetch_hits == 0
    assert last.misses >= 20


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("num_chunks", "num_frames", "window"), [(40, 64, 8), (40, 120, 16), (84, 128, 16), (84, 256, 16)]
)
def test_a_training_step_moves_little_more_than_it_must(
    num_chunks: int, num_frames: int, window: int, micro_batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within 5% of what its plan says, and so of the bound for the frames that the window leaves."""
    chunks = range(num_chunks)
    step, specs = training_step(chunks, micro_batches=micro_batches), chunk_specs(num_chunks, PAGE_BYTES)
    _, last = run_steps(num_frames, specs, [Pass(accesses=fill(chunks), trace_id=9), *repeated(step, 6)], window=window)
    sizes = [size // PAGE_BYTES for size in specs[0].object_bytes] + [0] * (KINDS_MAX - len(specs[0].object_bytes))
    object_frames = np.array(sizes * num_chunks, dtype=np.uint8)
    whole = plan(PlanRequest(Trace.from_accesses(step), object_frames, num_frames))
    slack = window + DEMAND_FRAMES
    room = max(num_frames - slack, num_frames // 2)
    planned = plan(PlanRequest(Trace.from_accesses(step), object_frames, room))
    moved = moved_frames(last)
    with capsys.disabled():
        print(
            f"\n{num_chunks} chunks, {num_frames} frames, window {window}, {micro_batches} micro-batches:"
            f" {moved} frames moved, {moved / planned.bound_frames:.3f} of the bound beside the window,"
            f" {moved / whole.bound_frames:.3f} of that of the arena",
            end="",
        )
    assert moved <= 1.05 * planned.moved_frames
    assert moved >= whole.bound_frames, "the bound is one"


def test_prefetch_and_write_behind_hide_io_behind_compute() -> None:
    """Reads, writes and compute of about equal length: a step takes as long as the longest of the three."""
    chunks = range(60)
    scan = [Access(chunk, 1, 1, 0) for chunk in chunks]  # read and write all
    disk = DiskModel(read_bytes_per_us=4.0, write_bytes_per_us=4.0, latency_us=80.0)
    passes = [Pass(accesses=fill(chunks, mask=1), trace_id=9), *repeated(scan, 5)]
    rank, last = run_steps(24, [ChunkSpec((PAGE_BYTES,))] * 60, passes, window=8, disk=disk, compute_us=1100.0)
    ends = rank.pass_ends_us
    untraced_us, traced_us = ends[1] - ends[0], ends[-1] - ends[-2]
    floor_us = max(60 * 1100.0, sum(last.bytes_read) / 4.0, sum(last.bytes_written) / 4.0)
    assert traced_us <= 1.02 * floor_us
    assert traced_us < untraced_us
    assert last.misses == 0


def test_a_pass_of_another_kind_in_between_costs_little() -> None:
    """Two training steps, an evaluation, training again: the policy finds its way back."""
    chunks = range(40)
    step, specs = training_step(chunks), chunk_specs(40, PAGE_BYTES)
    filled = Pass(accesses=fill(chunks), trace_id=9)
    train, evaluate = Pass(accesses=step), Pass(accesses=evaluation(chunks), trace_id=1, upload=True)
    _, undisturbed = run_steps(120, specs, [filled, *repeated(step, 4)], window=8)
    passes = [filled, *repeated(step, 3), evaluate, train, evaluate, train, train]
    _, after = run_steps(120, specs, passes, window=8)
    assert moved_frames(after) <= 1.1 * moved_frames(undisturbed)


@pytest.mark.parametrize("seed", range(3))
def test_steps_that_deviate_from_the_trace_are_still_served_well(seed: int) -> None:
    """A few accesses are left out or come twice in every step."""
    rng = random.Random(seed)
    chunks = range(40)
    step, specs = training_step(chunks), chunk_specs(40, PAGE_BYTES)
    filled = Pass(accesses=fill(chunks), trace_id=9)
    _, exact = run_steps(120, specs, [filled, *repeated(step, 5)], window=8)
    passes = [filled, *repeated(step, 2)]
    for _ in range(3):
        deviating = []
        for access in step:
            if access.dead_mask or rng.random() > 0.05:
                deviating.append(access)
            elif rng.random() < 0.5:
                deviating += [access, access]
        passes.append(Pass(accesses=deviating))
    _, last = run_steps(120, specs, passes, window=8)
    assert moved_frames(last) <= 1.25 * moved_frames(exact)


@pytest.mark.parametrize("leases_ahead", [0, 1, 5])
@pytest.mark.parametrize("spare_frames", [0, 1, 7])
def test_the_smallest_budget_trains(spare_frames: int, leases_ahead: int) -> None:
    chunks = range(10)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks, micro_batches=2), 4)]
    specs = chunk_specs(10, PAGE_BYTES)
    rank, _ = run_steps(DEMAND_FRAMES + spare_frames, specs, passes, window=4, leases_ahead=leases_ahead)
    assert rank.finished
    assert rank.failure is None


def test_with_room_for_all_nothing_moves() -> None:
    chunks = range(20)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks), 4)]
    rank, last = run_steps(20 * DEMAND_FRAMES + 32, chunk_specs(20, PAGE_BYTES), passes, window=16)
    assert moved_frames(last) == 0
    assert rank.stall_us < 0.01 * rank.pass_ends_us[-1]


@pytest.mark.parametrize("spare_chunks", [0, 40], ids=["all that is registered", "all that is used"])
@pytest.mark.parametrize("traced", [False, True])
def test_what_fits_to_the_last_frame_is_not_written_again_and_again(spare_chunks: int, traced: bool) -> None:
    chunks = range(20)
    update = [Access(chunk, 1, 1, 0) for chunk in chunks]
    passes = [Pass(accesses=fill(chunks, mask=1), trace_id=9)]
    passes += [Pass(accesses=update, upload=traced and index == 0) for index in range(8)]
    rank, last = run_steps(20, [ChunkSpec((PAGE_BYTES,))] * (20 + spare_chunks), passes, window=8)
    assert moved_frames(last) == 0
    assert moved_frames(rank.tenant.scheduler.counters) == 0


def test_what_does_not_fit_is_written_behind_without_a_plan() -> None:
    """Beside leases that are short of frames: a rank that goes over twice its frames seldom waits for a write."""
    chunks = range(60)
    update = [Access(chunk, 0, 1, 0) for chunk in chunks]
    passes = [Pass(accesses=update) for _ in range(4)]
    rank, _ = run_steps(24, [ChunkSpec((PAGE_BYTES,))] * 60, passes, window=8, compute_us=1400.0)
    assert rank.stall_us <= 0.1 * rank.pass_ends_us[-1]


def no_nearer_for_the_dirty(item: SwapObject, now: int) -> int:
    """``rank_of`` without making the next use of a dirty object nearer."""
    dirty = item.flags & ObjectFlags.DIRTY
    item.flags &= ~ObjectFlags.DIRTY
    overwritten, item.overwritten = item.overwritten, item.overwritten and not dirty
    rank = rank_of(item, now)
    item.flags, item.overwritten = item.flags | dirty, overwritten
    return rank


def test_clean_objects_leave_before_dirty_ones_of_about_the_same_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a plan that saves 4% of a step's traffic, and more of its stalls: a dirty one costs a write as well."""
    chunks = range(40)
    step, specs = training_step(chunks, micro_batches=4), chunk_specs(40, PAGE_BYTES)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *[Pass(accesses=step)] * 4]
    ours, _ = run_steps(120, specs, passes, window=16, leases_ahead=4)
    monkeypatch.setattr(eviction, "rank_of", no_nearer_for_the_dirty)
    without, _ = run_steps(120, specs, passes, window=16, leases_ahead=4)
    totals = [rank.tenant.scheduler.counters for rank in (ours, without)]
    print(f"{moved_frames(totals[1]) / moved_frames(totals[0]):.3f} {without.stall_us / ours.stall_us:.3f}")
    assert moved_frames(totals[1]) >= 1.03 * moved_frames(totals[0])
    assert without.stall_us >= 1.05 * ours.stall_us


@pytest.mark.parametrize("seed", range(4))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    chunks = range(12)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks), 3)]
    disk = DiskModel(read_bytes_per_us=4.0, write_bytes_per_us=3.0, latency_us=500.0, jitter=20.0)
    runs = [run_steps(30, chunk_specs(12, PAGE_BYTES), passes, window=8, seed=seed, disk=disk) for _ in range(2)]
    assert runs[0][0].pass_ends_us == runs[1][0].pass_ends_us
    assert runs[0][1] == runs[1][1]


def faulty(chance: float, *, write: bool, outcome: IoEnd) -> DiskModel:
    def fault(rng: random.Random, action: StartIo) -> IoEnd | None:
        return outcome if action.write is write and rng.random() < chance else None

    return DiskModel(latency_us=300.0, jitter=10.0, fault=fault)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("write", "outcome"),
    [
        (False, IoEnd(Status.IO_ERROR, errno.EIO, 0, PAGE_BYTES, 0)),
        (False, IoEnd(Status.INTEGRITY, 0, 0, 1, 2)),
        (True, IoEnd(Status.SHORT_IO, 0, 0, PAGE_BYTES, 512)),
        (True, IoEnd(Status.IO_ERROR, errno.ENOSPC, 0, PAGE_BYTES, 0)),
    ],
)
def test_a_fault_of_the_disk_ends_in_its_own_error_and_nothing_else(seed: int, write: bool, outcome: IoEnd) -> None:
    chunks = range(12)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks), 6)]
    disk = faulty(0.004, write=write, outcome=outcome)
    simulator = Simulator(seed, disk)
    rank = simulator.add_rank({"num_frames": 40, "in_flight_frames_max": 8}, passes=passes, leases_ahead=3)
    rank.tenant.register(chunk_specs(12, PAGE_BYTES))
    simulator.run()
    counters = rank.tenant.scheduler.counters
    if rank.failure is None:
        # Prefetch met the error and the retry on demand did not, or the fault never came, or came too late.
        assert rank.finished
    else:
        assert (rank.failure.status, rank.failure.error_number) == (outcome.status, outcome.error_number)
        assert (rank.failure.expected, rank.failure.actual) == (outcome.expected, outcome.actual)
        assert counters.io_errors >= 1
    assert rank.tenant.scheduler.num_leases == 0
    assert rank.tenant.scheduler.idle


def test_one_tenants_fault_is_not_anothers() -> None:
    chunks = range(12)
    passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks), 4)]
    simulator = Simulator(3, SSD)
    ranks = [
        simulator.add_rank({"num_frames": 40, "in_flight_frames_max": 8}, passes=passes, compute_us=500.0)
        for _ in range(3)
    ]
    for rank in ranks:
        rank.tenant.register(chunk_specs(12, PAGE_BYTES))
    rank, _, _ = ranks
    simulator.after(30_000.0, lambda: setattr(rank.tenant, "finish", lambda io_id, _outcome: type(rank.tenant).finish(
        rank.tenant, io_id, IoEnd(Status.IO_ERROR, errno.EIO, 0, PAGE_BYTES, 0))))  # fmt: skip
    simulator.run()
    assert ranks[0].failure is not None
    assert ranks[0].failure.error_number == errno.EIO
    for other in ranks[1:]:
        assert other.failure is None
        assert other.tenant.scheduler.counters.io_errors == 0


def test_tenants_with_equal_work_end_together_and_a_small_one_first() -> None:
    simulator = Simulator(5, SSD)
    ranks = []
    for num_chunks in (24, 24, 6):
        chunks = range(num_chunks)
        passes = [Pass(accesses=fill(chunks), trace_id=9), *repeated(training_step(chunks), 4)]
        rank = simulator.add_rank({"num_frames": 24, "in_flight_frames_max": 8}, passes=passes, compute_us=100.0)
        rank.tenant.register(chunk_specs(num_chunks, PAGE_BYTES))
        ranks.append(rank)
    simulator.run()
    first, second, small = (rank.pass_ends_us[-1] for rank in ranks)
    assert abs(first - second) <= 0.05 * max(first, second)
    assert small <= 0.5 * first

"""Plans, the cursor that follows them, and the order of eviction."""

from __future__ import annotations

import itertools
import pickle
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from io_daemon.policy import eviction
from io_daemon.policy.cursor import RESYNC_LOOK_AHEAD, STRAYS_MAX, UNKNOWN_USE, UNPLANNED, Cursor
from io_daemon.policy.eviction import SLICE, STREAMING, WORTHLESS, EvictionOrder, rank_of
from io_daemon.policy.residency import Plan, PlanRequest
from io_daemon.policy.residency import plan as plan_for
from io_daemon.policy.swap_object import SwapObject
from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX, Access, kinds_of
from io_daemon.shared.states import ObjectFlags
from tests.support.step_traces import chunk_specs, cyclic_scan, training_step

NUM_CHUNKS = 4
ONE_FRAME_EACH = np.ones(NUM_CHUNKS * KINDS_MAX, dtype=np.uint8)


@st.composite
def traces(draw: st.DrawFn, accesses_max: int = 14) -> list[Access]:
    accesses = []
    for _ in range(draw(st.integers(1, accesses_max))):
        read, write = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        dead = draw(st.sampled_from([0, 0, 0, 3])) & (read | write)
        if read | write:
            accesses.append(Access(draw(st.integers(0, NUM_CHUNKS - 1)), read, write, dead))
    return accesses or [Access(0, 1, 0, 0)]


def plan(trace: Trace, object_frames: NDArray[np.uint8], num_frames: int) -> Plan:
    return plan_for(PlanRequest(trace, object_frames, num_frames))


def item_of(chunk: int, kind: int = 0, *, next_use: int = 0, flags: int = ObjectFlags.BORN) -> SwapObject:
    item = SwapObject(object_bytes=4096, num_frames=1, object_id=chunk * KINDS_MAX + kind, chunk=chunk, kind=kind)
    item.next_use, item.flags = next_use, flags
    return item


def next_use(accesses: list[Access], begin: int, chunk: int, kind: int) -> tuple[int, bool] | None:
    """Accesses from position ``begin`` (included) to the next use, and whether that is write-only: by looking."""
    for ahead in range(len(accesses)):
        access = accesses[(begin + ahead) % len(accesses)]
        if access.chunk == chunk and (access.read_mask | access.write_mask) >> kind & 1:
            return ahead, not access.read_mask >> kind & 1
    return None


def moved_frames(accesses: list[Access], made: Plan, kept: NDArray[np.bool_]) -> int:
    """Frames read and written per pass if just the gaps in ``kept`` are kept and every object takes one frame."""
    moved = 0
    for begin, end in itertools.pairwise(made.first_use.tolist()):
        object_id = int(np.searchsorted(made.first_use, begin, side="right")) - 1
        bit = 1 << object_id % KINDS_MAX
        uses = [accesses[made.position[use]] for use in range(begin, end)]
        for index, here in enumerate(uses):
            following = uses[(index + 1) % len(uses)]
            if not here.dead_mask & bit and following.read_mask & bit and not kept[begin + index]:
                moved += 1
            if here.write_mask & bit and not here.dead_mask & bit:
                for ahead in range(len(uses)):
                    if (
                        ahead
                        and (uses[(index + ahead) % len(uses)].write_mask | uses[(index + ahead) % len(uses)].dead_mask)
                        & bit
                    ):
                        break
                    if not kept[begin + (index + ahead) % len(uses)]:
                        moved += 1
                        break
    return moved


def in_use_frames(accesses: list[Access], made: Plan, kept: NDArray[np.bool_]) -> list[int]:
    """Frames taken at each access: by the access and by the gaps kept over it."""
    taken = [(access.read_mask | access.write_mask).bit_count() for access in accesses]
    for use in np.flatnonzero(kept).tolist():
        for ahead in range(1, int(made.distance[use])):
            taken[(int(made.position[use]) + ahead) % len(accesses)] += 1
    return taken


@given(traces(), st.integers(2, 8))
@settings(deadline=None)
def test_a_plan_fits_its_room_counts_right_and_respects_its_bound(accesses: list[Access], num_frames: int) -> None:
    made = plan(Trace.from_accesses(accesses), ONE_FRAME_EACH, num_frames)
    assert made.selective
    assert made.moved_frames == moved_frames(accesses, made, made.kept)
    assert made.bound_frames <= made.moved_frames + 1e-6
    needed = [(access.read_mask | access.write_mask).bit_count() for access in accesses]
    for taken, need in zip(in_use_frames(accesses, made, made.kept), needed, strict=True):
        assert taken <= max(num_frames, need)


@given(traces(accesses_max=6), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_no_choice_beats_the_bound(accesses: list[Access], num_frames: int) -> None:
    made = plan(Trace.from_accesses(accesses), ONE_FRAME_EACH, num_frames)
    num_uses = len(made.position)
    if num_uses > 9:
        return
    best = made.moved_frames
    for choice in itertools.product([False, True], repeat=num_uses):
        kept = np.array(choice)
        if max(in_use_frames(accesses, made, kept)) <= num_frames:
            best = min(best, moved_frames(accesses, made, kept))
    assert made.bound_frames <= best + 1e-6


@given(traces())
@settings(deadline=None)
def test_next_uses_are_what_looking_ahead_finds(accesses: list[Access]) -> None:
    made = plan(Trace.from_accesses(accesses), ONE_FRAME_EACH, 4)
    for position, access in enumerate(accesses):
        for kind in kinds_of(access.read_mask | access.write_mask):
            use = made.use_at[position * KINDS_MAX + kind]
            found = next_use(accesses, position + 1, access.chunk, kind)
            assert found is not None
            assert (made.distance[use], made.next_write_only[use]) == (found[0] + 1, found[1])
            assert made.position[use] == position


@pytest.mark.parametrize(("num_chunks", "num_frames"), [(10, 4), (40, 39), (7, 1), (5, 9)])
def test_a_cyclic_scan_keeps_all_but_the_frame_in_use(num_chunks: int, num_frames: int) -> None:
    frames = np.ones(num_chunks * KINDS_MAX, dtype=np.uint8)
    made = plan(Trace.from_accesses(cyclic_scan(range(num_chunks))), frames, num_frames)
    assert made.kept.sum() == (num_frames - 1 if num_frames < num_chunks else num_chunks)


@pytest.mark.parametrize("num_frames", [24, 60, 120, 200])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_steps_are_planned_close_to_the_bound(num_frames: int, micro_batches: int) -> None:
    """The bound is that of the Lagrangian dual, at most the linear program's; integrality and rounding add the rest."""
    num_chunks = 40
    sizes = [size // 4096 for size in chunk_specs(1, 4096)[0].object_bytes] + [0] * 3
    trace = Trace.from_accesses(training_step(range(num_chunks), micro_batches=micro_batches))
    made = plan(trace, np.array(sizes * num_chunks, dtype=np.uint8), num_frames)
    assert made.bound_frames <= made.moved_frames <= 1.06 * made.bound_frames


def test_a_long_trace_is_planned_in_coarser_time_and_a_huge_one_not_at_all() -> None:
    accesses = [Access(index % 3000, 1, 0, 0) for index in range(9000)]
    made = plan(Trace.from_accesses(accesses), np.ones(3000 * KINDS_MAX, dtype=np.uint8), 1000)
    assert made.selective
    assert 2900 <= made.kept.sum() <= 3 * 999
    huge = plan(Trace.from_accesses(accesses * 4), np.ones(3000 * KINDS_MAX, dtype=np.uint8), 1000)
    assert not huge.selective
    assert huge.kept.all()


def test_pinned_objects_take_no_room() -> None:
    made = plan(Trace.from_accesses(cyclic_scan(range(3))), np.zeros(3 * KINDS_MAX, dtype=np.uint8), 1)
    assert made.moved_frames == made.bound_frames == 0


def test_a_plan_can_come_from_another_process() -> None:
    request = PlanRequest(Trace.from_accesses(training_step(range(3))), np.ones(3 * KINDS_MAX, dtype=np.uint8), 9)
    made = plan_for(request)
    again = pickle.loads(pickle.dumps(plan_for(pickle.loads(pickle.dumps(request)))))
    assert (again.kept == made.kept).all()
    assert len(again) == len(made)


# The cursor.


def cursor_on(accesses: list[Access]) -> Cursor:
    cursor = Cursor()
    assert cursor.start_pass(plan(Trace.from_accesses(accesses), ONE_FRAME_EACH, 4))
    return cursor


def advance(cursor: Cursor, access: Access) -> int:
    return cursor.advance(access.chunk, access.read_mask, access.write_mask)


@given(traces(), st.integers(1, 3))
@settings(deadline=None)
def test_a_faithful_pass_is_followed_for_ever_and_predicted_exactly(accesses: list[Access], num_passes: int) -> None:
    cursor = cursor_on(accesses)
    items = {(c, k): item_of(c, k) for c in range(NUM_CHUNKS) for k in range(2)}
    for tick in range(num_passes * len(accesses)):
        access = accesses[tick % len(accesses)]
        assert advance(cursor, access) == tick
        for kind in kinds_of(access.read_mask | access.write_mask):
            item = items[access.chunk, kind]
            cursor.predict(item, tick)
            found = next_use(accesses, tick + 1, access.chunk, kind)
            assert found is not None
            assert (item.next_use, item.overwritten) == (tick + 1 + found[0], found[1])
    assert not cursor.start_pass(cursor.plan), "a whole number of passes: nothing to renew"


@given(traces(), st.data())
@settings(deadline=None)
def test_refreshed_predictions_are_those_from_here(accesses: list[Access], data: st.DataObject) -> None:
    cursor = cursor_on(accesses)
    for access in accesses[: data.draw(st.integers(0, len(accesses)))]:
        advance(cursor, access)
    for chunk in range(NUM_CHUNKS):
        item = item_of(chunk)
        cursor.refresh(item)
        found = next_use(accesses, cursor.tick, chunk, 0)
        if found is None:
            assert item.next_use >= UNKNOWN_USE
        else:
            assert (item.next_use - cursor.tick, item.overwritten) == found


SCAN = cyclic_scan(range(NUM_CHUNKS))


def test_left_out_accesses_are_skipped() -> None:
    accesses = [Access(index % NUM_CHUNKS, 1, index % 3, 0) for index in range(60)]
    cursor = cursor_on(accesses)
    assert advance(cursor, accesses[0]) == 0
    assert advance(cursor, accesses[RESYNC_LOOK_AHEAD // 2]) <= RESYNC_LOOK_AHEAD // 2


def test_a_stray_access_leaves_the_cursor_where_it_is() -> None:
    cursor = cursor_on(SCAN)
    advance(cursor, SCAN[0])
    assert advance(cursor, Access(0, 2, 0, 0)) == UNPLANNED
    assert advance(cursor, SCAN[1]) == 1


def test_many_strays_move_the_cursor_to_the_next_occurrence() -> None:
    accesses = [Access(0, 1, 0, 0)] * 50 + [Access(1, 1, 0, 0), Access(2, 1, 0, 0)] + [Access(3, 1, 0, 0)] * 50
    cursor = cursor_on(accesses)
    found = [advance(cursor, Access(2, 1, 0, 0)) for _ in range(STRAYS_MAX)]
    assert found == [UNPLANNED] * (STRAYS_MAX - 1) + [51]
    assert cursor.tick == 52
    assert advance(cursor, accesses[52]) == 52


def test_an_early_mark_begins_the_pass_anew() -> None:
    cursor = cursor_on(SCAN)
    advance(cursor, SCAN[0])
    epoch = cursor.epoch
    assert cursor.start_pass(cursor.plan)
    assert cursor.epoch > epoch
    assert advance(cursor, SCAN[0]) == 1


def test_without_a_plan_reuse_distance_is_the_guess() -> None:
    cursor = Cursor()
    fresh, used = item_of(0), item_of(1)
    for item in (used, fresh, used):
        cursor.predict(item, cursor.advance(item.chunk, 1, 0))
    assert used.next_use == cursor.tick + 2
    assert fresh.next_use > UNKNOWN_USE - 10
    older = item_of(2)
    older.next_use = UNKNOWN_USE - 1
    assert older.next_use > fresh.next_use, "least recently used leaves first"
    for _ in range(5):
        cursor.advance(3, 1, 0)
    cursor.refresh(used)
    assert used.next_use == UNKNOWN_USE - used.last_use, "overdue: nothing is known of it any more"


# Eviction.


def test_ranks() -> None:
    now = 100
    near, far = item_of(0, next_use=110, flags=0), item_of(1, next_use=500, flags=0)
    dirty = item_of(2, next_use=500, flags=ObjectFlags.DIRTY)
    slightly_nearer = item_of(3, next_use=480, flags=0)
    streaming = item_of(4, next_use=105, flags=0)
    streaming.kept = False
    worthless = item_of(5, next_use=101, flags=0)
    worthless.overwritten = True
    unknown = item_of(6, next_use=UNKNOWN_USE - 50, flags=0)
    order = sorted(
        [near, far, dirty, slightly_nearer, streaming, worthless, unknown], key=lambda item: -rank_of(item, now)
    )
    assert order == [worthless, unknown, streaming, far, slightly_nearer, dirty, near]
    assert rank_of(streaming, now) > STREAMING > rank_of(far, now)
    assert rank_of(worthless, now) == WORTHLESS
    assert rank_of(dirty, now) == now + 300, "three quarters as far as it is"
    overwritten_dirty = item_of(7, next_use=300, flags=ObjectFlags.DIRTY)
    overwritten_dirty.overwritten = True
    assert rank_of(overwritten_dirty, now) < 300, "its contents may still be asked for: they cost a write"


class Predictions(Cursor):
    """Says of every chunk what the test has put down."""

    def __init__(self) -> None:
        super().__init__()
        self.next_use: dict[int, int] = {}

    def refresh(self, item: SwapObject) -> None:
        item.next_use = self.next_use[item.chunk]


@given(st.lists(st.tuples(st.sampled_from("pdox"), st.integers(0, 9), st.integers(0, 50)), max_size=200))
@settings(deadline=None)
def test_the_order_against_a_sorted_list(steps: list[tuple[str, int, int]]) -> None:
    cursor = Predictions()
    order = EvictionOrder(cursor)
    items = [item_of(chunk) for chunk in range(10)]
    ranks: dict[int, int] = {}
    for verb, index, rank in steps:
        if verb == "p":
            cursor.next_use[index] = ranks[index] = rank
            order.push(items[index])
        elif verb == "d":
            order.discard(items[index])
            ranks.pop(index, None)
        elif verb == "x":
            cursor.next_use = {each: (each * 7 + rank) % 11 for each in cursor.next_use}
            ranks = {each: cursor.next_use[each] for each in ranks}
            order.rank_anew()
        else:
            popped = order.pop_above(rank)
            above = {each: value for each, value in ranks.items() if value > rank}
            if not above:
                assert popped is None
            else:
                assert popped is not None
                assert above[popped.chunk] == max(above.values())
                del ranks[popped.chunk]
        assert len(order) == len(ranks)
        assert [each in order for each in items] == [index in ranks for index in range(10)]


def test_a_new_plan_ranks_a_large_arena_a_slice_at_a_time() -> None:
    """What is found meanwhile is the best of what has been ranked, and nothing is lost or found twice."""
    cursor = Predictions()
    order = EvictionOrder(cursor)
    items = [item_of(chunk) for chunk in range(5 * SLICE)]
    cursor.next_use = {item.chunk: 1 for item in items}
    for item in items:
        order.push(item)
    refreshed: list[int] = []
    cursor.next_use = {item.chunk: 10 + item.chunk * 7 % len(items) for item in items}
    looked_up = cursor.refresh

    def refresh(item: SwapObject) -> None:
        refreshed.append(item.chunk)
        looked_up(item)

    cursor.refresh = refresh  # type: ignore[method-assign]
    order.rank_anew()
    assert not refreshed
    popped = order.pop_above(0)
    assert popped is not None
    assert len(refreshed) == SLICE
    assert popped.next_use == max(cursor.next_use[chunk] for chunk in refreshed)

    refreshed.clear()
    order.rank_anew()  # again, before all were ranked
    order.discard(items[0] if popped is not items[0] else items[1])
    found = {popped.chunk}
    previous, num_before = 1 << 60, 0
    while (victim := order.pop_above(0)) is not None:
        assert victim.chunk not in found
        if len(refreshed) == num_before:
            assert victim.next_use <= previous
        found.add(victim.chunk)
        previous, num_before = victim.next_use, len(refreshed)
    assert len(found) == len(items) - 1
    assert len(order) == 0

    order.push(items[3])
    order.rank_anew()
    assert order.pop_above(cursor.next_use[3]) is None, "all are ranked before there is said to be none"
    assert order.pop_above(cursor.next_use[3] - 1) is items[3]


def test_the_order_does_not_grow_with_use(monkeypatch: pytest.MonkeyPatch) -> None:
    cursor, rng = Predictions(), random.Random(1)
    num_clearings, clear = 0, eviction._live

    def counted(entries: list[eviction._Entry]) -> list[eviction._Entry]:
        nonlocal num_clearings
        num_clearings += 1
        return clear(entries)

    monkeypatch.setattr(eviction, "_live", counted)
    order = EvictionOrder(cursor)
    items = [item_of(chunk) for chunk in range(50)]
    for _ in range(20_000):
        item = rng.choice(items)
        order.discard(item)
        cursor.next_use[item.chunk] = rng.randrange(1000)
        order.push(item)
        if rng.random() < 0.1:
            order.rank_anew()  # passes by turns, of which none is short of frames
    assert len(order._heap) + len(order._unranked) <= 2 * (2 * len(items) + 65)
    assert 0 < num_clearings < 20_000 // 50, "the dead are looked for when they are as many as the living"

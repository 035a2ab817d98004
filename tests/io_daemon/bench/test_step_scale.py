"""A smaller step is still that step: order, mix and work by share, and it never comes to a halt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon.bench.steps.step_scale import (
    chunks_kept,
    frames_required,
    is_fine,
    of_node,
    scaled,
    with_budget,
    with_resized_chunks,
)
from io_daemon.errors import BudgetError
from io_daemon.policy.step_trace import Events, StepTrace, load, work_before
from io_daemon.policy.window import ahead_bytes, window_frames
from tests.support.small_step import FRAME_BYTES, STATE, small_step

AHEAD_BYTES = 4 * FRAME_BYTES


def total_work(trace: StepTrace) -> float:
    return sum(trace.events.gap) + trace.tail


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.floats(0, 1))
def test_kept_chunks_are_spread_evenly(chunk_bytes: list[int], share: float) -> None:
    kept = chunks_kept(chunk_bytes, share)
    assert kept == sorted(set(kept))
    assert kept
    # at every point the share of what has passed is met to within the largest chunk
    for stop in range(1, len(chunk_bytes) + 1):
        passed = sum(chunk_bytes[:stop])
        taken = sum(chunk_bytes[index] for index in kept if index < stop)
        assert abs(taken - share * passed) <= max(chunk_bytes)


@given(
    num_chunks=st.integers(1, 24),
    share=st.floats(0.01, 1),
    ahead=st.integers(0, 4),
    gap=st.floats(0, 1),
    measured=st.booleans(),
)
def test_a_scaled_step_is_whole_and_does_its_share(
    num_chunks: int, share: float, ahead: int, gap: float, measured: bool
) -> None:
    full = small_step(num_chunks, ahead=ahead, gap=gap, measured=measured, num_frames=200)
    trace, scale = scaled(full, share, ahead_bytes=AHEAD_BYTES)
    StepTrace.model_validate(trace.model_dump())
    assert scale == pytest.approx(len(trace.chunks) / num_chunks)
    assert total_work(trace) == pytest.approx(scale * total_work(full), rel=1e-9, abs=1e-12)
    assert trace.num_frames >= frames_required(trace)
    assert len(trace.accesses) * num_chunks == len(full.accesses) * len(trace.chunks)


@given(st.floats(0.001, 1))
def test_order_and_mix_stay(share: float) -> None:
    full = load("gpt-168m")
    trace, scale = scaled(full, share, ahead_bytes=AHEAD_BYTES)
    assert 0 < scale <= 1
    chunk_of = {tuple(a): None for a in trace.accesses}
    assert len(chunk_of) <= len(trace.accesses)
    bytes_by_kind = [sum(sizes[kind] for sizes, _ in trace.chunks) for kind in range(5)]
    full_by_kind = [sum(sizes[kind] for sizes, _ in full.chunks) for kind in range(5)]
    assert [part / whole for part, whole in zip(bytes_by_kind, full_by_kind, strict=True)] == pytest.approx(
        [scale] * 5, rel=0.02
    )
    # no access changes places: the sequence of (kinds read, kinds written) is a subsequence of the full one
    masks = iter(zip(full.leases.read, full.leases.write, strict=True))
    assert all(pair in masks for pair in zip(trace.leases.read, trace.leases.write, strict=True))


def test_large_chunks_become_smaller_before_any_is_left_out() -> None:
    full = load("llama-70b")
    trace, scale = scaled(full, 0.2, ahead_bytes=0)
    assert len(trace.chunks) == len(full.chunks)
    assert trace.events.ops == full.events.ops
    assert trace.num_frames == pytest.approx(full.num_frames, abs=1)
    assert scale == pytest.approx(0.2, rel=0.01)
    assert sum(trace.events.gap) == pytest.approx(0.2 * sum(full.events.gap), rel=0.01)


@given(st.floats(1e-4, 1))
def test_objects_keep_their_number_of_frames(factor: float) -> None:
    full = small_step(3)
    trace = with_resized_chunks(full, factor)
    for chunk in range(3):
        for kind in range(5):
            assert trace.object_frames(chunk, 1 << kind) <= full.object_frames(chunk, 1 << kind)


def test_frames_required_counts_what_is_held_together() -> None:
    update_frames = 1 + 1 + 3 * 2
    assert frames_required(small_step(ahead=0)) == 2 * update_frames
    # leases asked for ahead and waited for in turn may each be granted when its turn comes
    assert frames_required(small_step(ahead=3)) == 2 * update_frames
    # one waited for before all others are: those come first, and hold their frames
    numbers = list(range(12))
    last_first = Events(ops="a" * 12 + "w" + "r" * 12, lease=[*numbers, 11, *numbers], gap=[0.0] * 25)
    assert frames_required(small_step(3).model_copy(update={"events": last_first})) == 9 + 3 * update_frames
    pinned = small_step(4, pinned_mask=STATE)
    assert pinned.pinned_frames == 4 * 6
    assert frames_required(pinned) == 4 * 6 + 2 * 2


def test_a_budget_changes_the_arena_alone() -> None:
    trace = small_step(num_frames=24)
    more = with_budget(trace, 4096 + 40 * FRAME_BYTES)
    assert more.num_frames == 40
    assert more.events == trace.events
    assert with_budget(trace, trace.host_budget_bytes).num_frames == trace.num_frames
    assert work_before(more) == work_before(trace)
    everything = with_budget(trace, 1 << 40)
    assert everything.num_frames <= trace.total_frames + frames_required(trace)


def test_a_budget_that_cannot_work_is_refused_with_the_least_that_does() -> None:
    trace = small_step(staging_bytes=10_000)
    with pytest.raises(BudgetError) as caught:
        with_budget(trace, 4096 + FRAME_BYTES)
    assert with_budget(trace, caught.value.smallest_bytes).num_frames == frames_required(trace)
    with pytest.raises(BudgetError):
        with_budget(trace, caught.value.smallest_bytes - 1)


def test_an_arena_of_a_few_leases_is_coarse() -> None:
    assert not is_fine(small_step(num_frames=24))
    assert is_fine(small_step(num_frames=16 * 8))


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_what_may_stay_shrinks_with_the_state_though_the_window_does_not(share: float) -> None:
    full = load("gpt-168m")
    window = ahead_bytes(32, 1 << 20, 1) // full.frame_bytes
    trace, scale = scaled(full, share, ahead_bytes=ahead_bytes(32, 1 << 20, 1))
    largest_lease = 8
    assert full.num_frames - window - largest_lease == pytest.approx(
        (trace.num_frames - window - largest_lease) / scale, rel=0.02, abs=4 / scale
    )


def test_a_smaller_step_asks_for_no_more_at_once() -> None:
    full = load("gpt-168m")
    required = [frames_required(scaled(full, share, ahead_bytes=AHEAD_BYTES)[0]) for share in (1.0, 0.5, 0.1)]
    assert all(smaller <= larger for larger, smaller in pairwise(required))


@given(num_ranks=st.integers(1, 64), share=st.floats(0.01, 1), ahead=st.integers(0, 4), measured=st.booleans())
def test_a_node_moves_and_computes_what_its_ranks_do(num_ranks: int, share: float, ahead: int, measured: bool) -> None:
    rank = small_step(12, ahead=ahead, measured=measured, num_frames=200)
    node = of_node(rank.model_copy(update={"ranks_per_node": num_ranks}), ahead_bytes=AHEAD_BYTES)
    assert node.ranks_per_node == 1
    assert (node.events.ops, node.events.lease, node.leases) == (rank.events.ops, rank.events.lease, rank.leases)
    assert node.swap_bytes == num_ranks * rank.swap_bytes
    assert total_work(node) == pytest.approx(num_ranks * total_work(rank))
    for of_rank, of_all in zip(work_before(rank), work_before(node), strict=True):
        # passes go over the frames, which are larger
        assert of_all == pytest.approx((of_rank.share, num_ranks * of_rank.flops, of_rank.part))
    assert node.num_frames >= frames_required(node)
    smaller, scale = scaled(node, share, ahead_bytes=AHEAD_BYTES)
    assert total_work(smaller) == pytest.approx(scale * num_ranks * total_work(rank))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_as_much_may_stay_on_a_node_as_on_its_ranks(num_ranks: int) -> None:
    """Every rank has a window of its own; the one that stands for them has one."""
    ahead = ahead_bytes(8, 1 << 20, 1)
    rank = load("gpt-168m").model_copy(update={"ranks_per_node": num_ranks})
    node = of_node(rank, ahead_bytes=ahead)
    kept, kept_of_node = (
        each.num_frames - window_frames(each.num_frames, each.frame_bytes, ahead) for each in (rank, node)
    )
    assert kept_of_node == kept
    assert node.num_frames * node.frame_bytes < num_ranks * rank.num_frames * rank.frame_bytes


def test_a_budget_is_shared_by_the_ranks_of_a_node() -> None:
    rank = small_step(staging_bytes=10_000).model_copy(update={"ranks_per_node": 3})
    assert with_budget(rank, 10_000 + 3 * (4096 + 40 * FRAME_BYTES)).num_frames == 40
    with pytest.raises(BudgetError) as caught:
        with_budget(rank, 1 << 20)
    assert with_budget(rank, caught.value.smallest_bytes).num_frames == frames_required(rank)
    with pytest.raises(BudgetError):
        with_budget(rank, caught.value.smallest_bytes - 1)

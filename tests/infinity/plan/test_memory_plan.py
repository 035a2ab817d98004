"""The budget's arithmetic: a plan fits, and the smallest budget named by the error is the smallest that works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import BudgetError
from infinity.plan.memory_plan import (
    DEMAND_SETS_MIN,
    LARGE_CHUNKS_WANTED,
    LARGE_NUMEL,
    LARGE_SETS_WANTED,
    MemoryPlan,
    StateShape,
    plan_memory,
)
from infinity.plan.sharding import NORM_BLOCK
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind

BF16: Mapping[int, int] = {
    ObjectKind.WEIGHT: 2,
    ObjectKind.GRAD: 2,
    ObjectKind.MASTER: 4,
    ObjectKind.STATE_0: 4,
    ObjectKind.STATE_1: 4,
}
FP32: Mapping[int, int] = {kind: 4 for kind in BF16 if kind != ObjectKind.MASTER}
WEIGHT_ONLY: Mapping[int, int] = {ObjectKind.WEIGHT: 2}


def shape(numels: list[int], itemsizes: Mapping[int, int], pinned_mask: int = 0) -> StateShape:
    return StateShape(
        group_shard_numels=numels,
        group_trainable=[True] * len(numels),
        itemsizes=itemsizes,
        trained_mask=~ObjectKind.WEIGHT.mask,
        pinned_mask=pinned_mask,
    )


def plan(state: StateShape, budget_bytes: int | None, *, ranks: int = 1) -> MemoryPlan:
    return plan_memory(
        state, budget_bytes=budget_bytes, chunk_numel_max=10**9, local_world_size=ranks, budget_key="host_budget_bytes"
    )


@given(
    st.lists(st.integers(64, 5_000_000), min_size=1, max_size=5),
    st.integers(1 << 20, 1 << 30),
    st.sampled_from([0, ObjectKind.WEIGHT.mask, ObjectKind.STATE_0.mask]),
    st.integers(1, 4),
)
def test_a_plan_fits_its_budget_or_names_the_smallest(
    numels: list[int], budget_bytes: int, pinned_mask: int, ranks: int
) -> None:
    state = shape(numels, BF16, pinned_mask)
    try:
        made = plan(state, budget_bytes, ranks=ranks)
    except BudgetError as error:
        assert error.smallest_bytes > budget_bytes
        assert "host_budget_bytes" in str(error)
        made = plan(state, error.smallest_bytes, ranks=ranks)
        assert ranks * made.arena_bytes <= error.smallest_bytes
        with pytest.raises(BudgetError):
            plan(state, error.smallest_bytes - ranks * PAGE_BYTES - ranks, ranks=ranks)
    else:
        assert ranks * made.arena_bytes <= budget_bytes
    assert made.num_frames - made.pinned_frames >= DEMAND_SETS_MIN * made.demand_frames
    assert made.chunk_numel % NORM_BLOCK == 0
    assert made.frame_bytes % PAGE_BYTES == 0


def test_groups_have_room_for_their_own_kinds() -> None:
    """A trained group may have no weights beside its masters, and a frozen one has nothing else."""
    shard = 1 << 20
    state = replace(shape([shard, shard], BF16), group_trainable=[True, False])
    itemsizes = [sum(BF16.values()) + 2, sum(BF16.values())]
    for frozen_mask, itemsize in zip((0, ObjectKind.WEIGHT.mask), itemsizes, strict=True):
        made = plan(replace(state, frozen_mask=frozen_mask), 1 << 30)
        assert made.holds_all
        assert made.swap_bytes == shard * itemsize


def test_groups_have_weights_of_their_own_size() -> None:
    shard = 1 << 20
    state = replace(shape([shard, shard], FP32), group_trainable=[True, False], group_weight_bytes=[4, 1])
    made = plan(state, 1 << 30)
    assert made.frame_bytes == made.chunk_numel
    assert made.swap_bytes == shard * (sum(FP32.values()) + 1)
    assert made.demand_frames == sum(FP32.values())


def test_fp32_objects_of_a_bf16_model_take_two_frames() -> None:
    made = plan(shape([1 << 24], BF16), 512 << 20)
    assert made.frame_bytes == 2 * made.chunk_numel
    assert made.demand_frames == 1 + 1 + 2 + 2 + 2


def test_pinned_kinds_need_no_streaming_frames() -> None:
    made = plan(shape([1 << 20], WEIGHT_ONLY, ObjectKind.WEIGHT.mask), None)
    assert made.demand_frames == 0
    assert made.swap_bytes == 0
    assert made.pinned_frames * made.frame_bytes == 2 << 20


def test_who_has_nothing_to_keep_has_the_smallest_arena() -> None:
    made = plan(replace(shape([1 << 20], {ObjectKind.MASTER: 4}), group_trainable=[False]), 1 << 20)
    assert (made.num_frames, made.pinned_frames, made.swap_bytes, made.holds_all) == (1, 0, 0, True)


def test_the_arena_is_no_larger_than_the_state_needs() -> None:
    made = plan(shape([1 << 20], BF16), 1 << 40)
    assert made.arena_bytes < 3 * (16 << 20)


def test_a_chunk_never_exceeds_the_sub_group() -> None:
    made = plan_memory(
        shape([1 << 26], BF16), budget_bytes=1 << 32, chunk_numel_max=40_000, local_world_size=1, budget_key="k"
    )
    assert made.chunk_numel == 2 * NORM_BLOCK


def test_where_everything_fits_chunks_are_large_and_equal_parts_of_a_group() -> None:
    """Fewer leases on as many bytes; a budget that holds few of them, or that they would fill with empty frames, has
    smaller ones."""
    layers = shape([12_600_000] * 12, BF16)
    roomy, tight = plan(layers, 4 << 30), plan(layers, 256 << 20)
    assert 4 * roomy.chunk_numel >= 12_600_000 > 4 * (roomy.chunk_numel - NORM_BLOCK)
    assert roomy.chunk_numel <= LARGE_NUMEL
    assert roomy.num_frames * roomy.frame_bytes < 1.1 * 16 * 12 * 12_600_000
    assert tight.chunk_numel < roomy.chunk_numel / 2
    pinned = plan(shape([12_600_000] * 12, BF16, pinned_mask=~0), 4 << 30)
    assert pinned.chunk_numel == roomy.chunk_numel
    uneven = plan(shape([12_600_000] + [700_000] * 200, BF16), 4 << 30)
    assert uneven.chunk_numel < roomy.chunk_numel / 2, "two thirds of most chunks would be empty"


@pytest.mark.parametrize("budget_bytes", [256 << 20, 512 << 20, 1 << 30])
def test_what_streams_is_cut_into_equal_parts_of_a_group_that_leave_sets_to_overlap(budget_bytes: int) -> None:
    """What a chunk costs, however large it is, is the larger part of a step beyond the bytes."""
    made = plan(shape([12_600_000] * 12, BF16), budget_bytes)
    parts = round(12_600_000 / made.chunk_numel)
    assert 0 <= parts * made.chunk_numel - 12_600_000 < parts * NORM_BLOCK
    assert LARGE_SETS_WANTED <= made.num_frames // made.demand_frames < 2 * LARGE_SETS_WANTED
    assert not made.holds_all
    assert made.chunk_numel > 900_000


def test_large_chunks_are_no_larger_than_the_device_and_the_model_have_use_for() -> None:
    large = shape([200_000_000] * 40, BF16)
    assert LARGE_NUMEL / 2 < plan(large, 2 << 30).chunk_numel <= LARGE_NUMEL
    on_a_device = plan_memory(
        large, budget_bytes=8 << 30, chunk_numel_max=10**9, local_world_size=1, budget_key="k", large_numel=1 << 26
    )
    assert LARGE_NUMEL < on_a_device.chunk_numel <= 1 << 26
    small = plan(shape([1_000_000] * 30, BF16), 100 << 20)
    assert small.chunks_max >= LARGE_CHUNKS_WANTED


def test_a_small_model_has_few_chunks_unless_they_would_stay_empty() -> None:
    """A lease costs what it costs, however little it holds."""
    few = plan(shape([1_250_000], BF16), 1 << 30)
    assert few.chunk_numel > 8 * NORM_BLOCK
    assert few.num_frames * few.frame_bytes < 1.5 * 16 * 1_250_000, "with two sets of frames to work in"
    many = plan(shape([17_000] * 60, BF16), 1 << 30)
    assert many.chunk_numel == NORM_BLOCK, "two blocks in a chunk would leave half of it empty"
    tight = plan(shape([1_250_000], BF16), 4 << 20)
    assert tight.chunk_numel < few.chunk_numel, "the budget decides first"

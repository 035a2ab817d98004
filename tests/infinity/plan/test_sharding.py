"""Placement: every element exactly once, cuts only where parity allows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.plan.sharding import ALIGNMENT, NORM_BLOCK, cut_chunks, place_group
from tests.support.work import lines_run

numels = st.lists(st.integers(1, 100_003), min_size=1, max_size=6)


@given(numels, st.integers(1, 5), st.integers(1, 3))
def test_every_element_lies_in_exactly_one_segment(sizes: list[int], world_size: int, blocks: int) -> None:
    group = place_group(0, list(enumerate(sizes)), world_size=world_size, trainable=True)
    covered: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(sizes))}
    for rank in range(world_size):
        for chunk in cut_chunks(group, rank=rank, chunk_numel=blocks * NORM_BLOCK):
            for segment in chunk.segments:
                assert 0 <= segment.chunk_offset
                assert segment.chunk_offset + segment.numel <= chunk.numel
                covered[segment.param].append((segment.param_offset, segment.numel))
    for index, ranges in covered.items():
        position = 0
        for start, numel in sorted(ranges):
            assert start == position
            assert start % ALIGNMENT == 0
            position += numel
        assert position == sizes[index]


@given(numels, st.integers(1, 4), st.integers(1, 4))
def test_norm_ranges_do_not_depend_on_the_chunk_size(sizes: list[int], blocks: int, other_blocks: int) -> None:
    group = place_group(0, list(enumerate(sizes)), world_size=1, trainable=True)

    def ranges(chunk_numel: int) -> list[tuple[int, int]]:
        return [
            (chunk.start + offset, numel)
            for chunk in cut_chunks(group, rank=0, chunk_numel=chunk_numel)
            for segment in chunk.segments
            for offset, numel in segment.norm_ranges()
        ]

    assert ranges(blocks * NORM_BLOCK) == ranges(other_blocks * NORM_BLOCK)
    assert sum(numel for _, numel in ranges(blocks * NORM_BLOCK)) == sum(sizes)


def test_chunks_are_whole_norm_blocks() -> None:
    group = place_group(0, [(0, 100)], world_size=1, trainable=True)
    with pytest.raises(ValueError, match="not a multiple"):
        cut_chunks(group, rank=0, chunk_numel=NORM_BLOCK + 64)


def test_padding_is_in_no_rank_s_valid_range() -> None:
    group = place_group(0, [(0, 65)], world_size=2, trainable=True)
    assert group.shard_numel == 64
    assert [group.params[0].valid_numel(rank) for rank in range(2)] == [64, 1]
    assert group.numel == 65


@given(numels, st.integers(1, 64), st.integers(1, 2))
def test_the_first_rank_stands_for_every_rank(sizes: list[int], world_size: int, blocks: int) -> None:
    """What ``infinity trace`` records of one: the same chunks, of which others touch as many or fewer."""
    group = place_group(0, list(enumerate(sizes)), world_size=world_size, trainable=True)
    first, *others = [cut_chunks(group, rank=rank, chunk_numel=blocks * NORM_BLOCK) for rank in range(world_size)]
    for chunks in others:
        assert [(chunk.start, chunk.numel) for chunk in chunks] == [(chunk.start, chunk.numel) for chunk in first]
        touched = [bool(chunk.segments) for chunk in chunks]
        assert all(own.segments or not other for own, other in zip(first, touched, strict=True))
    padding = world_size * sum(chunk.numel for chunk in first) - sum(sizes)
    assert 0 <= padding < world_size * ALIGNMENT * len(sizes)


def test_cutting_costs_each_parameter_and_each_chunk_once() -> None:
    """In lines run, of a group of small parameters: for each chunk all of them were looked at."""

    def work(num_params: int) -> int:
        group = place_group(0, [(param, 64) for param in range(num_params)], world_size=1, trainable=True)
        return lines_run(lambda: cut_chunks(group, rank=0, chunk_numel=NORM_BLOCK), "infinity/plan")

    few, many = work(512), work(8192)
    assert many <= 20 * few, f"{few} lines for 2 chunks of 256 parameters, {many} for 32"

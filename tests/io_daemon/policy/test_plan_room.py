"""What a plan does with room: whatever saves a read and fits is kept, whatever was tried and taken back before it."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX, Access, kinds_of
from tests.io_daemon.policy.test_residency import in_use_frames, traces

SEEDS = 130
"""Of random traces, in about one of twenty of which a span is taken back where a single gap is to fit."""


def left_out(accesses: list[Access], num_frames: int) -> list[int]:
    """Gaps that are not kept, would save a read, and fit beside those that are."""
    num_objects = KINDS_MAX * (1 + max(access.chunk for access in accesses))
    made = plan(PlanRequest(Trace.from_accesses(accesses), np.ones(num_objects, dtype=np.uint8), num_frames))
    taken = in_use_frames(accesses, made, made.kept)
    found = []
    for position, access in enumerate(accesses):
        for kind in kinds_of((access.read_mask | access.write_mask) & ~access.dead_mask):
            use = int(made.use_at[position * KINDS_MAX + kind])
            inside = [(position + ahead) % len(accesses) for ahead in range(1, int(made.distance[use]))]
            if not (made.next_write_only[use] or made.kept[use]) and all(taken[at] < num_frames for at in inside):
                found.append(use)
    return found


@given(traces(), st.integers(1, 8))
def test_nothing_that_saves_a_read_and_fits_is_left_out(accesses: list[Access], num_frames: int) -> None:
    assert not left_out(accesses, num_frames)


def test_nor_after_a_span_that_was_tried_and_taken_back() -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        num_chunks, num_accesses = rng.randint(4, 8), rng.randint(14, 30)
        accesses = []
        for _ in range(num_accesses):
            chunk, mask = rng.randrange(num_chunks), rng.choice([1, 1, 1, 3])
            accesses.append(Access(chunk, mask, rng.choice([0, 0, 0, mask]), 0))
        assert not left_out(accesses, rng.randint(3, num_chunks + 1)), seed

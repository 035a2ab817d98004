"""Transitions: what the tables allow goes through, everything else names both ends."""

from __future__ import annotations

import itertools

import pytest

from infinity.states import PHASE_TRANSITIONS, SHARDED_TRANSITIONS, ShardedState, StepPhase, check_transition


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ShardedState, repeat=2)))
def test_sharded_state(before: ShardedState, after: ShardedState) -> None:
    if after in SHARDED_TRANSITIONS[before]:
        assert check_transition(SHARDED_TRANSITIONS, before, after) is after
    else:
        with pytest.raises(RuntimeError, match=f"{before.name} -> {after.name}"):
            check_transition(SHARDED_TRANSITIONS, before, after)


def test_a_failed_engine_can_only_be_closed() -> None:
    assert PHASE_TRANSITIONS[StepPhase.FAILED] == {StepPhase.CLOSED}
    assert not PHASE_TRANSITIONS[StepPhase.CLOSED]

"""The engine's states and their allowed transitions. Pure.

==============  =======================================================================================
ShardedState    tensors that occupy device memory
==============  =======================================================================================
SHARDED         none; every use of a parameter asks its owner first
UNSHARDING      none yet: leases on the weight chunks are issued (frames in the arena, not device memory)
UNSHARDED       the full weights of the group, in memory that goes with its last view
==============  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, TypeVar


class ShardedState(Enum):
    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


class StepPhase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    OPTIMIZER = auto()
    CHECKPOINT = auto()
    """All state is being saved or loaded."""
    FAILED = auto()
    """A world error left the step, or what was loaded, half applied: only ``destroy`` is allowed."""
    CLOSED = auto()


SHARDED_TRANSITIONS: Final[Mapping[ShardedState, frozenset[ShardedState]]] = {
    ShardedState.SHARDED: frozenset({ShardedState.UNSHARDING}),
    ShardedState.UNSHARDING: frozenset({ShardedState.UNSHARDED, ShardedState.SHARDED}),
    ShardedState.UNSHARDED: frozenset({ShardedState.SHARDED}),
}

PHASE_TRANSITIONS: Final[Mapping[StepPhase, frozenset[StepPhase]]] = {
    StepPhase.IDLE: frozenset(
        {StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.OPTIMIZER, StepPhase.CHECKPOINT, StepPhase.CLOSED}
    ),
    # a model may train itself inside its forward, as Lightning's do that optimize by hand
    StepPhase.FORWARD: frozenset({StepPhase.IDLE, StepPhase.BACKWARD, StepPhase.OPTIMIZER, StepPhase.FAILED}),
    StepPhase.BACKWARD: frozenset({StepPhase.IDLE, StepPhase.FORWARD, StepPhase.FAILED}),
    StepPhase.OPTIMIZER: frozenset({StepPhase.IDLE, StepPhase.FORWARD, StepPhase.FAILED}),
    StepPhase.CHECKPOINT: frozenset({StepPhase.IDLE, StepPhase.FAILED}),
    StepPhase.FAILED: frozenset({StepPhase.CLOSED}),
    StepPhase.CLOSED: frozenset(),
}

State = TypeVar("State", ShardedState, StepPhase)


def check_transition(table: Mapping[State, frozenset[State]], before: State, after: State) -> State:
    """``after``, if the table allows to go there from ``before``; RuntimeError names both otherwise."""
    if after not in table[before]:
        raise RuntimeError(f"{type(before).__name__}: {before.name} -> {after.name} is not allowed")
    return after

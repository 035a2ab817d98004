"""What a ZeRO stage means: which states are sharded, when gradients are reduced, and by which collective. Pure.

Every stage computes the same update. They differ in what a rank keeps whole (memory) and in when it communicates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from infinity.config import ZeroOptimization

STAGES = (0, 1, 2, 3)


class Reduction(Enum):
    """How a gradient leaves backward. All of them give the mean over the ranks."""

    ALL_REDUCE = "all-reduce"
    """Every rank gets the whole gradient."""
    REDUCE_SCATTER = "reduce-scatter"
    """Every rank gets its shard of it."""
    NONE = "none"
    """There is one rank: its gradient is the mean."""


class ReductionTime(Enum):
    EVERY_MICRO_BATCH = "every micro-batch"
    BOUNDARY = "boundary"
    """The last micro-batch of a step: gradients of the others are summed where they are."""


class WeightsReturn(Enum):
    """How the weights that a rank updated reach the others."""

    AT_USE = "all-gather at use"
    """Weights are sharded: each use gathers them."""
    AFTER_UPDATE = "all-gather after the update"
    """Each rank updated its shard of whole weights."""
    NONE = "none"
    """Every rank updated everything, or there is one rank."""


@dataclass(frozen=True, kw_only=True)
class StagePolicy:
    """One stage at one world size. What is not sharded is whole on every rank."""

    stage: int
    shards_states: bool
    """Master weights and moments: each rank updates its shard."""
    shards_gradients: bool
    """Gradients between their reduction and the update."""
    shards_weights: bool
    """Weights between their uses."""
    reduction: Reduction
    reduction_time: ReductionTime
    weights_return: WeightsReturn

    def __post_init__(self) -> None:
        if self.shards_weights > self.shards_gradients or self.shards_gradients > self.shards_states:
            raise ValueError(f"stage {self.stage} shards weights without gradients, or gradients without states")

    @classmethod
    def of(cls, zero: ZeroOptimization, world_size: int, *, reduce_scatter: bool = True) -> StagePolicy:
        """The stage that ``zero_optimization`` names. ``reduce_scatter`` false asks for all-reduce where a stage has
        the choice: stages 1 and 2, whose ranks then keep their shard of what they got."""
        stage = zero.stage
        if stage not in STAGES:
            raise ValueError(f"stage {stage} is none of {STAGES}")
        shards_gradients = stage >= 2
        return cls(
            stage=stage,
            shards_states=stage >= 1,
            shards_gradients=shards_gradients,
            shards_weights=stage >= 3,
            reduction=_reduction(stage, world_size, reduce_scatter=reduce_scatter),
            reduction_time=ReductionTime.EVERY_MICRO_BATCH if shards_gradients else ReductionTime.BOUNDARY,
            weights_return=_weights_return(stage, world_size),
        )

    def as_run(self) -> StagePolicy:
        """What the engine does for it: stages 0 and 1 shard what stage 2 shards, and gradients are reduce-scattered
        in every backward. The results are the same."""
        alone = self.reduction is Reduction.NONE
        return replace(
            self,
            shards_states=True,
            shards_gradients=True,
            reduction=self.reduction if alone else Reduction.REDUCE_SCATTER,
            reduction_time=ReductionTime.EVERY_MICRO_BATCH,
            weights_return=_weights_return(max(self.stage, 2), 1 if alone else 2),
        )

    def reduces(self, *, boundary: bool) -> bool:
        """Whether gradients of a micro-batch are reduced; ``boundary``: it is the last one of its step."""
        if self.reduction is Reduction.NONE:
            return False
        return boundary or self.reduction_time is ReductionTime.EVERY_MICRO_BATCH

    def may_skip_reduction(self) -> bool:
        """Whether ``no_sync`` is possible: a sharded gradient has no place for what is not reduced."""
        return not self.shards_gradients

    def whole_bytes_per_param(self, *, weight: int, gradient: int, states: int) -> int:
        """Bytes that every rank keeps of each parameter, whatever the world size."""
        kept = ((self.shards_weights, weight), (self.shards_gradients, gradient), (self.shards_states, states))
        return sum(size for sharded, size in kept if not sharded)


def _reduction(stage: int, world_size: int, *, reduce_scatter: bool) -> Reduction:
    if world_size == 1:
        return Reduction.NONE
    if stage == 0 or (stage < 3 and not reduce_scatter):
        return Reduction.ALL_REDUCE
    return Reduction.REDUCE_SCATTER


def _weights_return(stage: int, world_size: int) -> WeightsReturn:
    if world_size == 1 or stage == 0:
        return WeightsReturn.NONE
    return WeightsReturn.AT_USE if stage == 3 else WeightsReturn.AFTER_UPDATE

"""What a ZeRO stage means: what is sharded, when gradients are reduced, and by which collectives. Pure.

Every stage computes the same update. They differ in what a rank keeps whole (memory) and in when it communicates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from infinity.config import Config

STAGES = (0, 1, 2, 3)


class Reduction(Enum):
    """How a gradient leaves backward. Both give the mean over the ranks, with the same bits."""

    ALL_REDUCE = "all-reduce"
    """Every rank gets the whole gradient."""
    REDUCE_SCATTER = "reduce-scatter"
    """Every rank gets its shard of it."""


class Gathering(Enum):
    """How shards become whole, with the same bytes."""

    ALL_GATHER = "all-gather"
    BROADCASTS = "broadcasts"
    """Each rank's shard, one after the other."""
    ALL_REDUCE = "all-reduce"
    """A sum of shards that are zero elsewhere."""


@dataclass(frozen=True, kw_only=True)
class StagePolicy:
    """What is not sharded is whole on every rank."""

    stage: int
    shards_states: bool
    """Master weights and moments: each rank updates its shard. Else each updates everything, and no rank needs
    another's weights."""
    shards_gradients: bool
    """Gradients between the micro-batches of a step: they are reduced in every backward. Else they are summed where
    they are, and reduced in the last one."""
    shards_weights: bool
    """Weights between their uses. Else they are gathered after the update."""
    reduction: Reduction
    gathering: Gathering
    predivide_factor: float | None
    """What gradients are divided by before they are summed, the rest after; None: by the number of ranks, as DDP."""
    averages: bool
    """Gradients become their mean over ranks; else their sum, and nothing divides them."""

    def __post_init__(self) -> None:
        if self.shards_weights > self.shards_gradients or self.shards_gradients > self.shards_states:
            raise ValueError(f"stage {self.stage} shards weights without gradients, or gradients without states")

    @classmethod
    def of(cls, config: Config) -> StagePolicy:
        zero = config.zero_optimization
        stage = zero.stage
        if stage not in STAGES:
            raise ValueError(f"stage {stage} is none of {STAGES}")
        scatters = stage >= 1 and zero.reduce_scatter
        factor = config.gradient_predivide_factor
        return cls(
            stage=stage,
            shards_states=stage >= 1,
            shards_gradients=stage >= 2,
            shards_weights=stage >= 3,
            reduction=Reduction.REDUCE_SCATTER if scatters else Reduction.ALL_REDUCE,
            gathering=_gathering(
                stage,
                partitions=zero.allgather_partitions,
                by_reduction=zero.stage3_use_all_reduce_for_fetch_params,
            ),
            predivide_factor=None if factor == 1.0 or config.prescale_gradients else factor,
            averages=config.gradient_allreduce_op == "mean",
        )

    def reduces(self, *, boundary: bool) -> bool:
        """Whether gradients of a micro-batch are reduced; ``boundary``: it is the last one of its step."""
        return boundary or self.shards_gradients

    @property
    def may_skip_reduction(self) -> bool:
        """Whether ``no_sync`` is possible: a sharded gradient has no place for what is not reduced."""
        return not self.shards_gradients


def _gathering(stage: int, *, partitions: bool, by_reduction: bool) -> Gathering:
    if stage == 3:
        return Gathering.ALL_REDUCE if by_reduction else Gathering.ALL_GATHER
    return Gathering.ALL_GATHER if partitions else Gathering.BROADCASTS

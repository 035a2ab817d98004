"""The stages as a table: what each shards, when it reduces and how."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from infinity.config import ZeroOptimization
from infinity.plan.stage import STAGES, Reduction, ReductionTime, StagePolicy, WeightsReturn

ALL_REDUCE, REDUCE_SCATTER, NONE = Reduction.ALL_REDUCE, Reduction.REDUCE_SCATTER, Reduction.NONE
EVERY, BOUNDARY = ReductionTime.EVERY_MICRO_BATCH, ReductionTime.BOUNDARY


class Row(NamedTuple):
    stage: int
    sharded: str
    """States, gradients, weights."""
    reduction: Reduction
    without_reduce_scatter: Reduction
    time: ReductionTime
    weights_return: WeightsReturn
    whole_bytes: int
    """For each parameter with Adam: 2 of weight, 2 of gradient, 12 of states."""


TABLE = [
    Row(0, "", ALL_REDUCE, ALL_REDUCE, BOUNDARY, WeightsReturn.NONE, 16),
    Row(1, "s", REDUCE_SCATTER, ALL_REDUCE, BOUNDARY, WeightsReturn.AFTER_UPDATE, 4),
    Row(2, "sg", REDUCE_SCATTER, ALL_REDUCE, EVERY, WeightsReturn.AFTER_UPDATE, 2),
    Row(3, "sgw", REDUCE_SCATTER, REDUCE_SCATTER, EVERY, WeightsReturn.AT_USE, 0),
]


def _policy(stage: int, world_size: int = 4, *, reduce_scatter: bool = True) -> StagePolicy:
    return StagePolicy.of(ZeroOptimization(stage=stage), world_size, reduce_scatter=reduce_scatter)


def test_the_table_has_every_stage() -> None:
    assert tuple(row.stage for row in TABLE) == STAGES


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"stage {row.stage}")
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_stage(row: Row, world_size: int) -> None:
    policy = _policy(row.stage, world_size)
    assert policy == StagePolicy(
        stage=row.stage,
        shards_states="s" in row.sharded,
        shards_gradients="g" in row.sharded,
        shards_weights="w" in row.sharded,
        reduction=row.reduction,
        reduction_time=row.time,
        weights_return=row.weights_return,
    )
    assert policy.reduces(boundary=True)
    assert policy.reduces(boundary=False) is (row.time is EVERY)
    assert policy.may_skip_reduction() is ("g" not in row.sharded)
    assert policy.whole_bytes_per_param(weight=2, gradient=2, states=12) == row.whole_bytes


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"stage {row.stage}")
def test_without_reduce_scatter_only_the_collective_changes(row: Row) -> None:
    policy = _policy(row.stage, reduce_scatter=False)
    assert policy == replace(_policy(row.stage), reduction=row.without_reduce_scatter)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_one_rank_talks_to_nobody(stage: int, reduce_scatter: bool) -> None:
    policy = _policy(stage, 1, reduce_scatter=reduce_scatter)
    assert not policy.reduces(boundary=True)
    assert not policy.reduces(boundary=False)
    assert (policy.reduction, _policy(stage, 1).shards_states) == (NONE, stage >= 1)
    assert policy.weights_return is WeightsReturn.NONE


def test_each_stage_keeps_less_than_the_one_before() -> None:
    kept = [_policy(stage).whole_bytes_per_param(weight=2, gradient=4, states=12) for stage in STAGES]
    assert kept == sorted(set(kept), reverse=True)


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="shards weights without gradients"):
        replace(_policy(0), shards_weights=True)
    with pytest.raises(ValueError, match="gradients without states"):
        replace(_policy(2), shards_states=False)
    with pytest.raises(ValueError, match="stage 5 is none of"):
        StagePolicy.of(ZeroOptimization.model_construct(stage=5), 2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_runs_is_stage_2_or_3(world_size: int) -> None:
    for stage in STAGES:
        run, like = _policy(stage, world_size).as_run(), _policy(max(stage, 2), world_size)
        assert run == replace(like, stage=stage)
        assert _policy(stage, world_size, reduce_scatter=False).as_run() == run

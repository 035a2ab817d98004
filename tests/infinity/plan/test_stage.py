"""The stages as a table: what each shards, when it reduces and how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from infinity.config import parse_config
from infinity.config.sections import ZeroOptimization
from infinity.plan.stage import STAGES, Gathering, Reduction, StagePolicy


class Row(NamedTuple):
    stage: int
    sharded: str
    """States, gradients, weights."""
    reduction: Reduction


TABLE = [
    Row(0, "", Reduction.ALL_REDUCE),
    Row(1, "s", Reduction.REDUCE_SCATTER),
    Row(2, "sg", Reduction.REDUCE_SCATTER),
    Row(3, "sgw", Reduction.REDUCE_SCATTER),
]


def _policy(stage: int, zero: dict[str, Any] | None = None, **config: Any) -> StagePolicy:
    sections = {"train_batch_size": 8, "zero_optimization": {"stage": stage, **(zero or {})}, **config}
    return StagePolicy.of(parse_config(sections, world_size=1))


def test_the_table_has_every_stage() -> None:
    assert tuple(row.stage for row in TABLE) == STAGES


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"stage {row.stage}")
def test_a_stage(row: Row) -> None:
    policy = _policy(row.stage)
    assert policy == StagePolicy(
        stage=row.stage,
        shards_states="s" in row.sharded,
        shards_gradients="g" in row.sharded,
        shards_weights="w" in row.sharded,
        reduction=row.reduction,
        gathering=Gathering.ALL_GATHER,
        predivide_factor=None,
        averages=True,
    )
    assert policy.reduces(boundary=True)
    assert policy.reduces(boundary=False) is ("g" in row.sharded)
    assert policy.may_skip_reduction is ("g" not in row.sharded)


@pytest.mark.parametrize("stage", STAGES)
def test_keys_choose_the_collectives_and_nothing_else(stage: int) -> None:
    plain = _policy(stage)
    assert _policy(stage, {"reduce_scatter": False}) == replace(plain, reduction=Reduction.ALL_REDUCE)
    broadcasts = Gathering.BROADCASTS if stage < 3 else Gathering.ALL_GATHER
    assert _policy(stage, {"allgather_partitions": False}) == replace(plain, gathering=broadcasts)
    reduced = Gathering.ALL_REDUCE if stage == 3 else Gathering.ALL_GATHER
    assert _policy(stage, {"stage3_use_all_reduce_for_fetch_params": True}) == replace(plain, gathering=reduced)


def test_prescaling_leaves_nothing_for_a_factor() -> None:
    assert _policy(2, gradient_predivide_factor=3.0).predivide_factor == 3.0
    assert _policy(2, gradient_predivide_factor=3.0, prescale_gradients=True).predivide_factor is None
    assert not _policy(2, gradient_allreduce_op="sum").averages
    assert _policy(2, prescale_gradients=True) == _policy(2)


def test_what_is_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="shards weights without gradients"):
        replace(_policy(0), shards_weights=True)
    with pytest.raises(ValueError, match="gradients without states"):
        replace(_policy(2), shards_states=False)
    config = parse_config({"train_batch_size": 8}, world_size=1)
    with pytest.raises(ValueError, match="stage 5 is none of"):
        StagePolicy.of(config.model_copy(update={"zero_optimization": ZeroOptimization.model_construct(stage=5)}))

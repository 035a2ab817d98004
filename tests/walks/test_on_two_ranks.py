"""What two ranks do together with every optimizer, dtype and stage: clip, overflow on one of them, save, export."""

from __future__ import annotations

import pytest

from tests.walks.judge import judge_walk
from tests.walks.settings import CLIPPING, Recipe, Setting
from tests.walks.walk import Action


def trained(*batches: int) -> list[Action]:
    return [action for batch in batches for action in (("call", batch, False), ("backward", False), ("step",))]


def overflowing(batch: int, rank: int, accumulation: int) -> list[Action]:
    """A step whose gradients are not finite on one rank, in its first micro-batch."""
    rest = trained(*range(batch, batch + accumulation - 1))
    return [("call", batch, False), ("backward", False, 1e30, rank), ("step",), *rest, ("weights",)]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "tier"), [(1, "none"), (2, "nvme"), (3, "none"), (3, "nvme")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "amsgrad", "SGD", "Lion", "RMSprop"])
def test_two_ranks_clip_overflow_and_write_as_plain_torch_does(
    optimizer: str, dtype: str, stage: int, tier: str
) -> None:
    recipe = Recipe(optimizer=optimizer, clipping=CLIPPING)
    start = Setting(
        dtype=dtype,
        stage=stage,
        states=tier,
        params=tier if stage == 3 else "none",
        budget_times=1.5,
        accumulation=2 if stage == 2 else 1,
    )
    actions = [
        *trained(1, 2, 3, 4),
        ("grad_norm",),
        *(overflowing(50, 1, start.accumulation) if dtype == "fp16" else []),
        *trained(6, 7),
        ("save", "tag", False),
        ("export", "weights"),
        *trained(8, 9),
        *(overflowing(60, 0, start.accumulation) if dtype == "fp16" else []),
        ("all_masters",),
        ("load", "tag", ""),
        *trained(11, 12),
        ("load_export", "weights"),
        ("weights",),
    ]
    verdict = judge_walk(recipe, start, actions, num_ranks=2)
    assert verdict.outcome == "equal", verdict.message

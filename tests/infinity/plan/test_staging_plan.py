"""What models under construction take of the host budget."""

from __future__ import annotations

import pytest

from infinity.config import Config, parse_config
from infinity.errors import BudgetError
from infinity.plan.staging_plan import activations_plan, budget_beside, staging_plan
from io_daemon.shared.protocol import PAGE_BYTES


def config_of(budget_bytes: int) -> Config:
    return parse_config({"train_batch_size": 1, "io_daemon": {"host_budget_bytes": budget_bytes}})


@pytest.mark.parametrize(
    ("budget", "ranks", "piece"),
    [
        (64 << 20, 1, 2 << 20),  # an eighth, in four frames
        (64 << 20, 4, 1 << 19),
        (64 << 30, 1, 4 << 20),  # 16 MiB at most
        (1 << 20, 2, 16384),
        (1 << 20, 16, PAGE_BYTES),  # a page at least
        (3 << 20, 1, 98304),  # whole pages
    ],
)
def test_the_staging_arena_is_a_share_of_the_budget(budget: int, ranks: int, piece: int) -> None:
    plan = staging_plan(config_of(budget), ranks)
    assert (plan.frame_bytes, plan.chunk_numel, plan.num_frames) == (piece, piece, 4)
    assert (plan.pinned_frames, plan.demand_frames, plan.swap_bytes) == (0, 1, 0)


def test_waiting_activations_have_more_frames_since_they_are_read_ahead() -> None:
    plan = activations_plan(config_of(64 << 30), 1)
    assert (plan.frame_bytes, plan.num_frames) == (8 << 20, 8)


def test_the_engines_arenas_get_the_rest() -> None:
    config = config_of(1 << 20)
    assert budget_beside(1000, config) == (1 << 20) - 1000
    assert budget_beside((1 << 20) - 1, config) == 1
    with pytest.raises(BudgetError) as caught:
        budget_beside(1 << 20, config)
    assert (caught.value.smallest_bytes, caught.value.budget_bytes) == (2 << 20, 1 << 20)

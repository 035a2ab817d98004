"""The plan beside the optimum of a linear program, which knows nothing of how the plan is made."""

from __future__ import annotations

import pytest

from benchmarks.lower_bound import frames_of, frames_to_share, least_moved_frames
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.step_trace import load


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["gpt-168m", "llama-8b"])
def test_the_plan_of_a_training_step_is_within_2_percent_of_the_optimum(name: str, share: float) -> None:
    trace = load(name)
    num_frames = int(share * frames_to_share(trace)[0])
    least = least_moved_frames(trace, num_frames)
    made = plan(PlanRequest(trace.access_trace(), frames_of(trace), num_frames))
    assert made.bound_frames <= least + 1e-6 * least
    assert least - 1e-6 * least <= made.moved_frames <= 1.02 * least

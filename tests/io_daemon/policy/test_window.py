"""Figures of the prefetch window, by hand."""

from __future__ import annotations

import pytest

from io_daemon.policy.window import READY_AHEAD_DEPTHS, ahead_bytes, frames_to_plan, window_frames

MB = 1 << 20


def test_the_window_is_some_queue_depths_of_every_device() -> None:
    assert ahead_bytes(32, MB, 1) == READY_AHEAD_DEPTHS * 32 * MB
    assert ahead_bytes(8, 2 * MB, 3) == READY_AHEAD_DEPTHS * 48 * MB


@pytest.mark.parametrize(
    ("num_frames", "num_bytes", "expected"),
    [
        (100, 8 * MB, 8),
        (100, 8 * MB + 1, 9),  # whole frames
        (100, 80 * MB, 50),  # half the arena at most
        (7, 80 * MB, 3),
        (100, MB, 2),  # two at least
        (2, 80 * MB, 2),
    ],
)
def test_the_window_in_frames(num_frames: int, num_bytes: int, expected: int) -> None:
    assert window_frames(num_frames, MB, num_bytes) == expected


@pytest.mark.parametrize(
    ("usable", "window", "demand", "expected"), [(100, 10, 8, 82), (100, 40, 10, 50), (100, 45, 10, 50), (11, 4, 9, 5)]
)
def test_what_a_plan_may_fill(usable: int, window: int, demand: int, expected: int) -> None:
    """All but the window and one lease, which stream; half at least."""
    assert frames_to_plan(usable, window, demand) == expected

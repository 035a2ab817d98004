from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from io_daemon.bench.steps.break_even import StepParts, break_even_note, hidden_from

seconds = st.floats(0, 1e4)


shares = st.floats(0, 1)


def parts_of(
    compute_s: float, between: float, update_s: float, compute_stall_s: float, update_stall_s: float
) -> StepParts:
    return StepParts(compute_s, between * compute_s, update_s, compute_stall_s, update_stall_s)


def stall_share_at(parts: StepParts, compute_s: float) -> float:
    """With more forward and backward: what runs between updates hides their stalls one for one, the rest its own."""
    more_s, between = compute_s - parts.compute_s, parts.between_s / parts.compute_s
    stall_s = max(0.0, parts.compute_stall_s - (1 - between) * more_s)
    stall_s += max(0.0, parts.update_stall_s - between * more_s)
    return stall_s / (compute_s + parts.update_s + stall_s)


@given(st.builds(parts_of, st.floats(1e-3, 1e4), shares, seconds, seconds, seconds), st.floats(0.01, 0.5))
def test_is_the_least_compute_that_hides_the_io(parts: StepParts, share: float) -> None:
    from_s = hidden_from(parts, share)
    assert from_s >= parts.compute_s
    assert stall_share_at(parts, from_s) <= share * (1 + 1e-6)
    assume(from_s > parts.compute_s * (1 + 1e-6))
    less_s = parts.compute_s + 0.99 * (from_s - parts.compute_s)
    assert stall_share_at(parts, less_s) > share * (1 - 1e-6)


@pytest.mark.parametrize(
    ("parts", "seconds_expected"),
    [
        (StepParts(10, 0, 1, 0, 0), 10),
        (StepParts(10, 0, 0, 10, 0), 19),
        (StepParts(10, 0, 1, 0, 1), 18),
        (StepParts(10, 10, 0, 0, 10), 19),
        (StepParts(10, 5, 0, 0, 10), 10 + 9 / 0.525),
        (StepParts(0, 0, 1, 0, 1), 18),
        (StepParts(10, 5e-324, 1, 0, 1), 18),
    ],
)
def test_by_hand(parts: StepParts, seconds_expected: float) -> None:
    assert hidden_from(parts, 0.05) == pytest.approx(seconds_expected)


def test_says_it_in_tokens() -> None:
    note = break_even_note(StepParts(10, 0, 0, 10, 0), 1000)
    assert "19 s of forward and backward" in note
    assert "1,900 tokens a step instead of 1,000" in note
    assert "1.9 times" in break_even_note(StepParts(10, 0, 0, 10, 0), None)
    assert "hidden" in break_even_note(StepParts(10, 0, 1, 0, 0), 1000)

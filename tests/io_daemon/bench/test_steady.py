"""Burst and steady state are told apart, and noise is not mistaken for either."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon.bench.steady import find_steady_state


def noisy(levels: list[float], share: float = 0.03) -> list[float]:
    random = np.random.default_rng(0)
    return [level * (1 + share * float(random.standard_normal())) for level in levels]


def test_a_flat_rate_is_steady_from_the_start() -> None:
    found = find_steady_state(noisy([100.0] * 100), 0.1)
    assert found.reached
    assert (found.begin_s, found.burst_bw_bytes) == (0.0, None)
    assert found.bw_bytes == pytest.approx(100, rel=0.02)


def test_a_cache_that_runs_out_is_told_apart() -> None:
    found = find_steady_state(noisy([400.0] * 30 + [100.0] * 70), 0.5)
    assert found.reached
    assert found.begin_s == pytest.approx(15.0)
    assert found.bw_bytes == pytest.approx(100, rel=0.02)
    assert found.burst_bw_bytes == pytest.approx(400, rel=0.02)


def test_a_rate_that_keeps_falling_is_not_steady() -> None:
    assert not find_steady_state([100.0 - i * 0.9 for i in range(100)], 1.0).reached


def test_a_rate_that_swings_is_not_steady() -> None:
    assert not find_steady_state(
        [100.0, 100.0, 100.0, 100.0, 100.0, 160.0, 160.0, 160.0, 160.0, 160.0] * 10, 1.0
    ).reached


def test_half_a_second_says_nothing_about_a_state() -> None:
    assert not find_steady_state([100.0] * 20, 0.1).reached
    assert find_steady_state([100.0] * 50, 0.1).reached


@pytest.mark.parametrize("rates", [[], [1.0], [1.0] * 4, [0.0] * 50])
def test_too_little_says_nothing(rates: list[float]) -> None:
    assert not find_steady_state(rates, 1.0).reached


@given(st.lists(st.floats(0, 1e10), max_size=300), st.floats(0.01, 100))
def test_whatever_comes_the_answer_is_consistent(rates: list[float], interval_s: float) -> None:
    found = find_steady_state(rates, interval_s)
    assert found.reached == (found.begin_s is not None) == (found.bw_bytes is not None)
    if found.begin_s is not None:
        assert 0 <= found.begin_s < interval_s * len(rates)
        assert (found.burst_bw_bytes is None) == (found.begin_s == 0)

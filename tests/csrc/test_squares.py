"""Sums of squares in torch's order, in numbers that follow one another in parts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from io_daemon import _native

LANES, STATE = 8, 16
Column = NDArray[np.float32]


def expected(values: Column) -> Column:
    """By the words of the header: each product and each sum is rounded to fp32."""
    state = np.zeros(STATE, dtype=np.float32)
    whole = len(values) // LANES * LANES
    for row in values[:whole].reshape(-1, LANES):
        state[:LANES] += row * row
    state[LANES : LANES + len(values) - whole] = values[whole:]
    state[-1] = 0.0 if np.isfinite(values).all() else np.nan
    return state


@given(
    numel=st.integers(0, 300),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    seed=st.integers(0, 2**32 - 1),
    in_bf16=st.booleans(),
)
def test_the_sums_are_those_of_the_column_however_it_is_cut(
    numel: int, cuts: list[int], seed: int, in_bf16: bool
) -> None:
    generator = np.random.default_rng(seed)
    values = (generator.standard_normal(numel) * 10.0 ** generator.uniform(-4, 4, numel)).astype(np.float32)
    if in_bf16:
        values = (values.view(np.uint32) & 0xFFFF_0000).view(np.float32)
    given_as = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16) if in_bf16 else values
    state = np.zeros(STATE, dtype=np.float32)
    places = sorted({0, numel, *(cut for cut in cuts if cut < numel)})
    for first, stop in pairwise(places):
        _native.add_squares(given_as[first:stop], state, first, numel)
    assert state.tobytes() == expected(values).tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 3, 9, 31, 32, 34])
def test_what_is_not_finite_is_marked_and_what_is_only_large_is_not(place: int, bad: float) -> None:
    values = np.ones(35, dtype=np.float32)
    state = np.zeros(STATE, dtype=np.float32)
    values[place] = 1e30
    _native.add_squares(values, state, 0, 35)
    assert state[-1] == 0.0
    values[place] = bad
    _native.add_squares(values, state, 0, 35)
    assert np.isnan(state[-1])


def test_what_does_not_fit_is_refused() -> None:
    values, state = np.ones(4, dtype=np.float32), np.zeros(STATE, dtype=np.float32)
    for first, count in ((0, 3), (2, 5), (5, 4)):
        with pytest.raises(ValueError, match="no more numbers"):
            _native.add_squares(values, state, first, count)
    with pytest.raises(ValueError, match="differ in length"):
        _native.add_squares(values, state[:-1], 0, 4)
    with pytest.raises(TypeError):
        _native.add_squares(values.astype(np.float64), state, 0, 4)  # type: ignore[arg-type]
    assert not state.any()
    for states, norms in ((state[:-1], state[:1]), (state, state[:2])):
        with pytest.raises(ValueError, match="differ in length"):
            _native.norms_of_squares(states, np.array([3]), norms)

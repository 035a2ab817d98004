"""Values of 32 bits as numbers and signed rests, and back: lengths around a block, marks, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from io_daemon import _native

BLOCK = 4096
SIGN = np.int32(-(1 << 31))


@pytest.mark.parametrize("count", [0, 1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_both_ways_are_the_definition(count: int) -> None:
    random = np.random.default_rng(count)
    values = random.standard_normal(count).astype(np.float32).view(np.int32)
    values[values & 0xFFFF == 0x8000] += 1  # ties need a mark
    numbers, rests = np.zeros(count, dtype=np.int16), np.zeros(count, dtype=np.int16)
    markers = np.ones(count, dtype=np.int32)
    assert _native.cut_halves(values, numbers, rests, markers) == []
    expected = ((numbers.astype(np.int64) << 16) + rests) & 0xFFFF_FFFF
    assert np.array_equal(values.view(np.uint32), expected)
    found = np.zeros(count, dtype=np.int32)
    assert _native.join_halves(numbers, rests, markers, found) == []
    assert np.array_equal(found, values)


def test_a_tie_that_is_rounded_down_is_marked_in_whichever_block_it_is() -> None:
    count, places = 2 * BLOCK + 2, [1, BLOCK - 1, BLOCK, 2 * BLOCK + 1]
    values = np.full(count, 0x3F81_0001, dtype=np.int32)
    values[places] = 0x3F80_8000
    numbers, rests = np.zeros(count, dtype=np.int16), np.zeros(count, dtype=np.int16)
    markers = np.ones(count, dtype=np.int32)
    assert _native.cut_halves(values, numbers, rests, markers) == places
    assert np.flatnonzero(markers < 0).tolist() == places
    found = np.zeros(count, dtype=np.int32)
    assert _native.join_halves(numbers, rests, markers, found) == places
    assert np.array_equal(found, values)
    assert (markers == 1).all()


def test_a_marker_that_is_negative_where_a_mark_would_be_loses_none() -> None:
    values = np.full(BLOCK + 2, 0x3F81_0001, dtype=np.int32)
    values[[0, BLOCK + 1]] = 0x3F80_8000
    markers = np.ones(BLOCK + 2, dtype=np.int32)
    markers[BLOCK + 1] |= SIGN
    before = markers.copy()
    halves = np.zeros(BLOCK + 2, dtype=np.int16)
    assert _native.cut_halves(values, halves, halves.copy(), markers) is None
    assert np.array_equal(markers, before)


def test_arrays_of_other_lengths_or_dtypes_are_refused() -> None:
    halves, words = np.zeros(4, dtype=np.int16), np.zeros(4, dtype=np.int32)
    for arrays in ((halves[:3], halves, words, words), (halves, halves, words[:3], words)):
        with pytest.raises(ValueError, match="length"):
            _native.join_halves(*arrays)
        with pytest.raises(ValueError, match="length"):
            _native.cut_halves(words, arrays[0], halves, arrays[2])
    with pytest.raises(TypeError):
        _native.join_halves(words, halves, words, words)  # type: ignore[arg-type]

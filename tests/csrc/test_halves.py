"""Values of 32 bits from upper halves and signed rests, and back: against the definition, at lengths around a block."""

from __future__ import annotations

import numpy as np
import pytest

from io_daemon import _native

BLOCK = 4096


@pytest.mark.parametrize("count", [0, 1, 7, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_both_ways_are_the_definition(count: int) -> None:
    random = np.random.default_rng(count)
    uppers = random.integers(-(1 << 15), 1 << 15, count, dtype=np.int16)
    rests = random.integers(-(1 << 15), 1 << 15, count, dtype=np.int16)
    markers = random.integers(-1, 1000, count, dtype=np.int32)
    values = np.zeros(count, dtype=np.int32)
    negative = _native.join_halves(uppers, rests, markers, values)
    expected = ((uppers.astype(np.int64) << 16) + rests) & 0xFFFF_FFFF
    assert np.array_equal(values.view(np.uint32), expected)
    assert negative == np.flatnonzero(markers < 0).tolist()
    found = np.zeros(count, dtype=np.int16)
    assert _native.cut_halves(values, uppers, found, markers) == ([], negative)
    assert np.array_equal(found, rests)


@pytest.mark.parametrize(("rest", "fits"), [(-32769, False), (-32768, True), (32767, True), (32768, False)])
def test_a_rest_that_does_not_fit_is_named(rest: int, fits: bool) -> None:
    values = np.zeros(BLOCK + 2, dtype=np.int32)
    values[[1, BLOCK + 1]] = rest
    zeros, rests = np.zeros(BLOCK + 2, dtype=np.int16), np.zeros(BLOCK + 2, dtype=np.int16)
    misfits, negative = _native.cut_halves(values, zeros, rests, np.zeros_like(values))
    assert (misfits, negative) == ([] if fits else [1, BLOCK + 1], [])


def test_arrays_of_other_lengths_or_dtypes_are_refused() -> None:
    halves, words = np.zeros(4, dtype=np.int16), np.zeros(4, dtype=np.int32)
    for arrays in ((halves[:3], halves, words, words), (halves, halves, words[:3], words)):
        with pytest.raises(ValueError, match="length"):
            _native.join_halves(*arrays)
        with pytest.raises(ValueError, match="length"):
            _native.cut_halves(words, arrays[0], halves, arrays[2])
    with pytest.raises(TypeError):
        _native.join_halves(words, halves, words, words)  # type: ignore[arg-type]

"""fp32 values in 8 bits, against the list of all numbers that a block's byte and a code can mean."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from io_daemon import _native

BLOCK = 64
SHAPES = {True: (3, 127), False: (4, 255)}
"""Whether there is a sign -> bits behind the point, and the code of what is not finite."""


def narrowed(values: NDArray[np.float32], is_signed: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes and powers."""
    stored = np.full(values.size + values.size // BLOCK, 0xAA, dtype=np.uint8)
    assert not _native.narrow_blocks(values.view(np.int32), stored, is_signed)
    return stored[: values.size], stored[values.size :]


def widened(codes: NDArray[np.uint8], powers: NDArray[np.uint8], is_signed: bool) -> NDArray[np.float32]:
    values = np.full(codes.size, np.nan, dtype=np.float32)
    _native.widen_blocks(np.concatenate([codes, powers]), values.view(np.int32), is_signed)
    return values


def meant(power: int, is_signed: bool) -> NDArray[np.float64]:
    """What the codes 0 to that of the largest number mean, without a sign."""
    mantissa, code_max = SHAPES[is_signed]
    steps = np.arange(1, code_max) + ((power - ((code_max + 1 >> mantissa) - 1)) << mantissa)
    exponent, rest = steps >> mantissa, (steps & (1 << mantissa) - 1) / (1 << mantissa)
    normal = np.ldexp(1.0 + rest, exponent - 127)
    return np.concatenate([[0.0], np.where(exponent > 0, normal, np.ldexp(rest, -126))])


@pytest.mark.parametrize("is_signed", [True, False])
def test_every_code_means_its_number_and_comes_back(is_signed: bool) -> None:
    mantissa, code_max = SHAPES[is_signed]
    least = (code_max + 1 >> mantissa) - 1  # below, some codes would mean numbers below zero
    for power in range(least, 255):
        numbers = meant(power, is_signed)
        codes = np.arange(-(-code_max // (BLOCK - 1)) * BLOCK, dtype=np.int64)
        codes = (codes // BLOCK * (BLOCK - 1) + codes % BLOCK) % code_max
        codes[BLOCK - 1 :: BLOCK] = code_max - 1  # the largest of each block gives it its power
        powers = np.full(codes.size // BLOCK, power, dtype=np.uint8)
        for sign in (0, 128) if is_signed else (0,):
            bytes_of = (codes | sign).astype(np.uint8)
            found = widened(bytes_of, powers, is_signed)
            assert np.array_equal(np.abs(found), numbers[codes].astype(np.float32)), power
            assert np.array_equal(np.signbit(found), np.full(codes.size, sign > 0))
            again, powers_again = narrowed(found, is_signed)
            assert np.array_equal(again, bytes_of)
            assert np.array_equal(powers_again, powers)


@pytest.mark.parametrize("is_signed", [True, False])
def test_of_all_numbers_within_reach_the_nearest_is_taken(is_signed: bool) -> None:
    mantissa, code_max = SHAPES[is_signed]
    random = np.random.default_rng(1)
    spread = np.exp2(random.uniform(-24, 0, (400, BLOCK))) * np.exp2(random.integers(-90, 120, (400, 1)))
    values = spread.astype(np.float32)
    bits = values.view(np.int32)
    bits[::3] = bits[::3] & -(1 << 19) | 1 << 18  # between two numbers, or on one
    codes, powers = narrowed(values.reshape(-1), is_signed)
    assert codes.max() == code_max - 1
    for block, row, power in zip(codes.reshape(-1, BLOCK), values.astype(np.float64), powers, strict=True):
        numbers = meant(int(power), is_signed)
        assert row.max() > numbers[-1] / 2 * (1 - 2.0 ** -(mantissa + 2)), "no smaller power would do"
        within = row >= numbers[1]
        distance = np.abs(numbers[1:][None, :] - row[:, None])
        nearest = distance.min(axis=1)
        chosen = np.abs(numbers[block] - row)
        assert np.array_equal(chosen[within], nearest[within])
        tied = within & ((distance == nearest[:, None]).sum(axis=1) > 1)
        assert not (block[tied] & 1).any(), "ties go to the even one"
        below = row < numbers[1] - (numbers[2] - numbers[1]) / 2
        assert (block[below] == (0 if is_signed else 1)).all()


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("odd", [np.inf, np.nan, np.float32(np.finfo(np.float32).max)])
def test_what_is_not_finite_has_the_last_code_and_moves_no_other(is_signed: bool, odd: float) -> None:
    _, code_max = SHAPES[is_signed]
    values = np.full(2 * BLOCK, 1.5, dtype=np.float32)
    plain, plain_powers = narrowed(values, is_signed)
    values[7] = odd
    codes, powers = narrowed(values, is_signed)
    assert codes[7] == code_max
    assert np.isnan(widened(codes, powers, is_signed)[7])
    assert np.array_equal(np.delete(codes, 7), np.delete(plain, 7))
    assert np.array_equal(powers, plain_powers)


@pytest.mark.parametrize("is_signed", [True, False])
def test_zeros_stay_zeros_of_their_sign(is_signed: bool) -> None:
    values = np.zeros(2 * BLOCK, dtype=np.float32)
    values[1::2] = -0.0
    values[BLOCK] = 3.0
    codes, powers = narrowed(values, is_signed)
    found = widened(codes, powers, is_signed)
    assert np.array_equal(found, values)
    assert np.array_equal(np.signbit(found), np.signbit(values) & is_signed)


@pytest.mark.parametrize("place", [0, 63, 64, 127])
def test_a_negative_value_is_told_wherever_it_is(place: int) -> None:
    values = np.ones(2 * BLOCK, dtype=np.float32)
    values[place] = -1e-45
    stored = np.zeros(2 * BLOCK + 2, dtype=np.uint8)
    assert _native.narrow_blocks(values.view(np.int32), stored, False)
    assert not _native.narrow_blocks(values.view(np.int32), stored, True)


@pytest.mark.parametrize(("num_values", "num_bytes"), [(BLOCK, BLOCK), (BLOCK - 1, BLOCK), (2 * BLOCK, 2 * BLOCK + 1)])
def test_lengths_that_do_not_fit_are_refused(num_values: int, num_bytes: int) -> None:
    values, stored = np.zeros(num_values, dtype=np.int32), np.zeros(num_bytes, dtype=np.uint8)
    with pytest.raises(ValueError):
        _native.narrow_blocks(values, stored, True)
    with pytest.raises(ValueError):
        _native.widen_blocks(stored, values, True)


@pytest.mark.parametrize("dropped", [16, 20])
def test_rounding_by_chance_takes_one_of_both_neighbours_and_the_mean_is_kept(dropped: int) -> None:
    value, step = np.float32(1.0).view(np.int32) + 3 * (1 << dropped - 2), 1 << dropped
    values = np.full(1 << 16, value, dtype=np.int32)
    _native.round_by_chance(values, dropped, 7, 0)
    below = int(value) // step * step
    assert set(values.tolist()) == {below, below + step}
    assert float(np.mean(values == below + step)) == pytest.approx(0.75, abs=0.01)
    again = np.full(100, value, dtype=np.int32)
    _native.round_by_chance(again, dropped, 7, 50)
    assert again.tolist() == values[50:150].tolist(), "by the place, wherever a piece begins"


@pytest.mark.parametrize("odd", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_is_not_rounded(odd: float) -> None:
    values = np.array([odd], dtype=np.float32).view(np.int32)
    before = values.copy()
    _native.round_by_chance(values, 16, 7, 0)
    assert values.tolist() == before.tolist()

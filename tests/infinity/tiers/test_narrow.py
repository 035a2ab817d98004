"""fp32 values in fewer bits: what is told apart, what stays as it is, and rounding that is right on the average."""

from __future__ import annotations

import pytest
import torch

from infinity.plan.narrow import BLOCK, Narrow
from infinity.tiers import narrow as forms
from tests.support.reference import differing_bits

NUMEL = 50 * BLOCK
EIGHT_BITS = (Narrow.SIGNED_8, Narrow.UNSIGNED_8)


def awkward(form: Narrow) -> torch.Tensor:
    """Values of very different size, zeros of both signs, blocks of nothing but zeros, of numbers too small to be
    normal, and with what is not finite."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(NUMEL, generator=generator) * torch.exp(4 * torch.randn(NUMEL, generator=generator))
    values = values if form.is_signed else values.abs()
    values[::97], values[5], values[70] = 0.0, torch.inf, torch.nan
    values[BLOCK * 8 : BLOCK * 9] = -0.0
    values[BLOCK * 9 : BLOCK * 10] *= 1e-40
    values[BLOCK * 11], values[BLOCK * 12] = torch.finfo(torch.float32).max, 2 - 2**-23
    return values


def stored(values: torch.Tensor, form: Narrow) -> torch.Tensor:
    found = torch.zeros(form.numel(values.numel()), dtype=form.dtype)
    forms.narrow(values, found, form)
    return found


def widened(found: torch.Tensor, form: Narrow, numel: int = NUMEL) -> torch.Tensor:
    values = torch.full((numel,), torch.nan)
    forms.widen(found, values, form)
    return values


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_core_and_torch_agree(form: Narrow) -> None:
    values, found = awkward(form), torch.zeros(form.numel(NUMEL), dtype=torch.uint8)
    assert forms._narrow_blocks(values, found, form) is False
    assert torch.equal(found, stored(values, form))
    by_torch = torch.empty(NUMEL)
    forms._widen_blocks(found, by_torch, form)
    assert not differing_bits(by_torch, widened(found, form))


@pytest.mark.parametrize("form", Narrow)
def test_what_was_widened_stays_what_it_is(form: Narrow) -> None:
    once = widened(stored(awkward(form), form), form)
    assert not differing_bits(widened(stored(once, form), form), once)


@pytest.mark.parametrize(
    ("form", "error_max"), [(Narrow.BF16, 2**-8), (Narrow.SIGNED_8, 2**-4), (Narrow.UNSIGNED_8, 2**-5)]
)
def test_values_within_reach_of_the_largest_are_near(form: Narrow, error_max: float) -> None:
    values = torch.exp2(torch.rand(NUMEL, generator=torch.Generator().manual_seed(0)) * 14)
    values *= torch.where(torch.arange(NUMEL) % 2 == 0, 1.0, -1.0 if form.is_signed else 1.0)
    assert float(((widened(stored(values, form), form) - values) / values).abs().max()) <= error_max


def test_below_reach_a_signed_value_is_zero_and_an_unsigned_one_is_not() -> None:
    values = torch.full((BLOCK,), 1e-30)
    values[7] = 1.0
    signed, unsigned = (widened(stored(values, form), form, BLOCK) for form in EIGHT_BITS)
    assert signed.tolist() == [0.0] * 7 + [1.0] + [0.0] * (BLOCK - 8)
    assert unsigned[7] == 1.0
    assert bool((unsigned > 0).all()), "what divides by a second moment does not find zero"
    assert float(unsigned.min()) < 2**-14


@pytest.mark.parametrize("form", Narrow)
def test_what_is_not_finite_is_never_finite_and_harms_no_other(form: Narrow) -> None:
    values = torch.ones(NUMEL)
    values[3], values[BLOCK + 1] = torch.nan, torch.inf
    found = widened(stored(values, form), form)
    assert (~found.isfinite()).nonzero().view(-1).tolist() == [3, BLOCK + 1]
    assert bool((found[found.isfinite()] == 1).all())


def test_a_sign_without_a_bit_for_it_is_told() -> None:
    values = torch.ones(NUMEL)
    values[40] = -0.0
    stored(values, Narrow.UNSIGNED_8)
    values[41] = -1e-45
    with pytest.raises(ValueError, match="negative"):
        stored(values, Narrow.UNSIGNED_8)
    found = torch.zeros(Narrow.UNSIGNED_8.numel(NUMEL), dtype=torch.uint8)
    assert forms._narrow_blocks(values, found, Narrow.UNSIGNED_8) is True


@pytest.mark.parametrize("form", Narrow)
def test_chance_is_right_on_the_average_and_depends_on_places_alone(form: Narrow) -> None:
    step = 2.0 ** (form.dropped_bits - 23)
    values = torch.full((1 << 16,), 1 + 0.3 * step)
    whole = values.clone()
    forms.round_by_chance(whole, form, seed=11, first=0)
    assert set(whole.tolist()) == {1.0, 1 + step}
    assert float((whole == 1 + step).double().mean()) == pytest.approx(0.3, abs=0.01)
    parts = values.clone()
    for first in range(0, values.numel(), 999):
        forms.round_by_chance(parts[first : first + 999], form, seed=11, first=first)
    assert torch.equal(parts, whole)
    other = values.clone()
    forms.round_by_chance(other, form, seed=12, first=0)
    assert not torch.equal(other, whole)
    assert not differing_bits(widened(stored(whole, form), form, 1 << 16), whole), "the store then loses nothing"


def test_chance_depends_on_places_alone_also_beyond_32_bits() -> None:
    form, begin = Narrow.BF16, (1 << 32) - 100
    values = torch.full((1000,), 1 + 0.3 * 2.0 ** (form.dropped_bits - 23))
    whole, parts = values.clone(), values.clone()
    forms.round_by_chance(whole, form, seed=11, first=begin)
    for first, last in ((0, 90), (90, 300), (300, 1000)):
        forms.round_by_chance(parts[first:last], form, seed=11, first=begin + first)
    assert torch.equal(parts, whole)


@pytest.mark.parametrize("form", Narrow)
@pytest.mark.parametrize("first", [0, 0xFFF0_0000, (1 << 33) + 7])
def test_core_and_torch_draw_the_same(form: Narrow, first: int) -> None:
    values = awkward(form)
    by_torch = values.clone()
    forms._round_by_chance(by_torch, form.dropped_bits, 0xDEAD_BEEF, first)
    forms.round_by_chance(values, form, seed=0xDEAD_BEEF, first=first)
    assert not differing_bits(values, by_torch)


def test_an_average_that_rounding_to_nearest_would_hold_fast_falls() -> None:
    """A second moment whose gradients have become zero, over a thousand steps of beta 0.999."""
    moments = {form: torch.ones(1 << 10) for form in Narrow}
    nearest = torch.ones(1)
    for step in range(1000):
        nearest = (nearest * 0.999).bfloat16().float()
        for form, values in moments.items():
            values.mul_(0.999)
            forms.round_by_chance(values, form, seed=step, first=0)
    assert nearest.item() == 1.0
    for values in moments.values():
        assert float(values.mean()) == pytest.approx(0.999**1000, rel=0.05)

"""The forms of fp32 values in fewer bits, there and back, and rounding to such values by chance.

What was widened is narrowed to the same bytes, so that a value that nobody changes stays what it is. On the CPU the
core does it; elsewhere torch's operations do the same.
"""

from __future__ import annotations

from typing import Final

import torch

from infinity.plan.narrow import BLOCK, Narrow
from io_daemon import _native

_MANTISSA_BITS: Final = 23
_INFINITY, _NAN = 0x7F80_0000, 0x7FC0_0000
_WORD: Final = 0xFFFF_FFFF


def narrow(values: torch.Tensor, stored: torch.Tensor, form: Narrow) -> None:
    """Write ``values`` (fp32, 1-D, contiguous) to ``stored``, [form.numel(numel)] of the form's dtype.

    Raises:
        ValueError: a value is negative, and the form has no sign; it is stored without.
    """
    if values.device.type == "meta":
        return
    if form is Narrow.BF16:
        stored.copy_(values)
        return
    if values.device.type == "cpu":
        negative = _native.narrow_blocks(values.view(torch.int32).numpy(), stored.numpy(), form.is_signed)
    else:
        negative = _narrow_blocks(values, stored, form)
    if negative:
        raise ValueError("a value whose form has no sign is negative")


def widen(stored: torch.Tensor, values: torch.Tensor, form: Narrow) -> None:
    """The inverse of ``narrow``."""
    if values.device.type == "meta":
        return
    if form is Narrow.BF16:
        values.copy_(stored)
    elif values.device.type == "cpu":
        _native.widen_blocks(stored.numpy(), values.view(torch.int32).numpy(), form.is_signed)
    else:
        _widen_blocks(stored, values, form)


def round_by_chance(values: torch.Tensor, form: Narrow, *, seed: int, first: int) -> None:
    """Round ``values`` (fp32, 1-D, contiguous) in place to such as the form has, up with the chance of what is cut off.

    An average that moves by less than half of what its form can tell would never move if it were rounded to the nearest
    value; so it is right on the average.

    Args:
        seed: 32 bits; the same ones draw the same numbers.
        first: the place of the first value, on which its number depends.
    """
    if values.device.type == "meta":
        return
    same = _WORD + 1 - (first & _WORD)
    if values.numel() > same:  # a place's upper half is in the seed, and it is another from there on
        round_by_chance(values[same:], form, seed=seed, first=first + same)
        values = values[:same]
    if values.device.type == "cpu":
        _native.round_by_chance(values.view(torch.int32).numpy(), form.dropped_bits, seed, first)
    else:
        _round_by_chance(values, form.dropped_bits, seed, first)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int64) & _WORD


def _put_bits(bits: torch.Tensor, values: torch.Tensor) -> None:
    values.view(torch.int32).copy_(torch.where(bits > 0x7FFF_FFFF, bits - (1 << 32), bits))


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    bits = bits ^ bits >> 16
    bits = _times(bits, 0x85EB_CA6B)
    bits = bits ^ bits >> 13
    bits = _times(bits, 0xC2B2_AE35)
    return bits ^ bits >> 16


def _times(bits: torch.Tensor, factor: int) -> torch.Tensor:
    """The product modulo 2**32, of factors whose whole product an int64 cannot hold."""
    low, high = factor & 0xFFFF, factor >> 16
    return bits * low + ((bits * high & 0xFFFF) << 16) & _WORD


def _round_by_chance(values: torch.Tensor, dropped: int, seed: int, first: int) -> None:
    bits, cut = _bits(values), (1 << dropped) - 1
    places = torch.arange(values.numel(), device=values.device) + (first & _WORD) & _WORD
    seed ^= int(_mixed(torch.tensor(first >> 32, device="cpu")))
    drawn = _mixed(_times(places, 0x9E37_79B1) ^ seed)
    rounded = bits + (drawn & cut) & ~cut
    _put_bits(torch.where(bits & 0x7FFF_FFFF < _INFINITY, rounded, bits), values)


def _shape(form: Narrow) -> tuple[int, int, int]:
    """(bits behind the point, the largest code, powers of two less one)."""
    mantissa = _MANTISSA_BITS - form.dropped_bits
    code_max = 127 if form.is_signed else 255
    return mantissa, code_max, (code_max + 1 >> mantissa) - 1


def _narrow_blocks(values: torch.Tensor, stored: torch.Tensor, form: Narrow) -> bool:
    mantissa, code_max, powers = _shape(form)
    dropped = form.dropped_bits
    bits = _bits(values).view(-1, BLOCK)
    magnitudes = bits & 0x7FFF_FFFF
    rounded = magnitudes + (1 << dropped - 1) - 1 + (magnitudes >> dropped & 1) >> dropped
    is_infinite = rounded >= _INFINITY >> dropped
    largest = torch.where(is_infinite, 0, rounded).amax(dim=1, keepdim=True)
    top = largest + 1 >> mantissa
    codes = (rounded - (top - powers << mantissa)).clamp(min=0 if form.is_signed else 1)
    codes = torch.where(magnitudes == 0, 0, torch.where(is_infinite, code_max, codes))
    if form.is_signed:
        codes |= bits >> 31 << 7
    numel = values.numel()
    stored[:numel].copy_(codes.view(-1))
    stored[numel:].copy_(top.view(-1))
    return not form.is_signed and bool(((bits >> 31 != 0) & (magnitudes != 0)).any())


def _widen_blocks(stored: torch.Tensor, values: torch.Tensor, form: Narrow) -> None:
    mantissa, code_max, powers = _shape(form)
    numel = values.numel()
    codes = stored[:numel].view(-1, BLOCK).to(torch.int64)
    base = stored[numel:].view(-1, 1).to(torch.int64) - powers << mantissa
    magnitudes = codes & code_max
    bits = magnitudes + base << form.dropped_bits
    bits = torch.where(magnitudes == 0, 0, torch.where(magnitudes == code_max, _NAN, bits))
    if form.is_signed:
        bits |= codes >> 7 << 31
    _put_bits(bits.view(-1), values)

"""Values of fp32 as a bf16 number and a 16-bit rest, and back: exact for every one of the 2**32 patterns.

As integers, a value is its rounding shifted up by 16, plus the rest, which is signed: what was rounded up has a
negative one. That leaves what no 16 bits can say: an even number stands for 65,537 values, the ties on both of its
sides among them. And a NaN must stay one when it is cut. Values that need more carry one *mark*, kept in the sign of
another value that is never negative (a second moment):

=============================  ==================  ============  ==============================
value                          number              rest          with a mark, the value is
=============================  ==================  ============  ==============================
a tie that was rounded down    even                -32,768       65,536 more
NaN with 0x7FFF8000 or above   0x7FFF              negative      65,536 more
NaN below 0x7F808000           0x7F81              positive      65,536 less
=============================  ==================  ============  ==============================

Only there does a sign mean anything; everywhere else it belongs to its own value. Arithmetic makes none of these NaNs,
so that a moment that has become NaN, whose sign is any, keeps it.
"""

from __future__ import annotations

from typing import Final

import torch

from infinity.plan.precision import REST
from io_daemon import _native

_UNIT: Final = 1 << 16
_TIE: Final = -(1 << 15)
_INFINITY, _FIRST_NAN, _LAST_NAN = 0x7F80, 0x7F81, 0x7FFF
_POSITIVE: Final = 0x7FFF
_LOST: Final = "a value whose sign is needed is negative"


def join(numbers: torch.Tensor, rests: torch.Tensor, markers: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Put values together. All tensors are 1-D, of one length, and contiguous.

    Args:
        numbers: bf16.
        rests: ``REST``.
        markers: fp32 values, whose signs are marks: these are taken away.
        out: fp32; the values.

    Returns:
        The places of the marks, int64.
    """
    if out.device.type == "meta":
        return torch.empty(0, dtype=torch.int64, device="cpu")
    bits, uppers, signs = out.view(torch.int32), numbers.view(torch.int16), markers.view(torch.int32)
    if _are_here(numbers, out):
        return _places(_native.join_halves(uppers.numpy(), rests.numpy(), signs.numpy(), bits.numpy()))
    bits.copy_(uppers).bitwise_left_shift_(16).add_(rests)
    negative = (signs < 0).nonzero().view(-1)
    change = _meaning(_taken(uppers, negative), rests[negative])
    marked = negative[change != 0]
    bits[marked] += change[change != 0]
    _flip(signs, marked)
    return marked


def cut(values: torch.Tensor, numbers: torch.Tensor, rests: torch.Tensor, markers: torch.Tensor) -> torch.Tensor:
    """Take values apart: the inverse of ``join``.

    Args:
        values: fp32.
        numbers: bf16; are written: what the values round to. Of a NaN it is the NaN's own upper half.
        rests: are written.
        markers: get the marks.

    Returns:
        The places of the marks, int64.

    Raises:
        ValueError: a marker is negative where its sign would be a mark; no marker has changed.
    """
    if values.device.type == "meta":
        return torch.empty(0, dtype=torch.int64, device="cpu")
    bits, uppers, signs = values.view(torch.int32), numbers.view(torch.int16), markers.view(torch.int32)
    if _are_here(numbers, values):
        marks = _native.cut_halves(bits.numpy(), uppers.numpy(), rests.numpy(), signs.numpy())
        if marks is None:
            raise ValueError(_LOST)
        return _places(marks)
    numbers.copy_(values)
    differences = bits - uppers.to(bits.device, torch.int32).bitwise_left_shift_(16)
    rests.copy_(differences)
    is_misfit = (differences.add_(-_TIE).bitwise_right_shift_(16) != 0) | values.isnan()
    found = _cut_by_hand(is_misfit.nonzero().view(-1), bits, uppers, rests)
    negative = (signs < 0).nonzero().view(-1)
    if bool(_meaning(_taken(uppers, negative), rests[negative]).any()):
        raise ValueError(_LOST)
    _flip(signs, found)
    return found


def unmark(markers: torch.Tensor, places: torch.Tensor) -> None:
    """Take marks away, or put those back that were taken away."""
    _flip(markers.view(torch.int32), places)


def _are_here(*tensors: torch.Tensor) -> bool:
    """Whether the core can reach them."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _places(found: list[int]) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.int64, device="cpu")


def _cut_by_hand(places: torch.Tensor, bits: torch.Tensor, numbers: torch.Tensor, rests: torch.Tensor) -> torch.Tensor:
    """Take apart what its own rounding and a rest do not give; the places of those that need a mark."""
    values = bits[places].to(torch.int64) & 0xFFFF_FFFF
    sign, magnitudes = values & 0x8000_0000, values & 0x7FFF_FFFF
    is_nan = magnitudes > _INFINITY << 16
    halves = magnitudes >> 16
    to_even = magnitudes + 0x7FFF + (halves & 1) >> 16
    to_nan = (magnitudes + 0x8000 >> 16).clamp(_FIRST_NAN, _LAST_NAN)
    upper = torch.where(is_nan, to_nan, to_even)
    lower = magnitudes - (upper << 16)
    fits = (lower >= _TIE) & (lower < -_TIE)
    lower = torch.where(fits, lower, torch.where(lower < 0, lower + _UNIT, lower - _UNIT))
    found = _wrapped(upper | sign >> 16)
    numbers[places.to(numbers.device)] = found.to(numbers.device)
    rests[places] = lower.to(REST)
    return places[~fits]


def _meaning(numbers: torch.Tensor, rests: torch.Tensor) -> torch.Tensor:
    """What a mark would add to each value as an integer, int32: 0 where there is none."""
    magnitudes = numbers & _POSITIVE
    is_tie = (rests == _TIE) & (magnitudes < _INFINITY) & (magnitudes & 1 == 0)
    above = is_tie | (magnitudes == _LAST_NAN) & (rests < 0)
    below = (magnitudes == _FIRST_NAN) & (rests > 0)
    return (above.to(torch.int32) - below.to(torch.int32)) * _UNIT


def _flip(signs: torch.Tensor, places: torch.Tensor) -> None:
    if places.numel():
        signs[places] ^= torch.iinfo(torch.int32).min


def _taken(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values[places.to(values.device)].to(places.device)


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    """Unsigned 16-bit integers as signed ones of the same bits."""
    return torch.where(values >= 1 << 15, values - _UNIT, values).to(torch.int16)

"""Every fp32 pattern comes back from its bf16 number, its rest and its mark, and markers keep what they were."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infinity.tiers import halves
from infinity.tiers.halves import cut, join, unmark
from tests.support.reference import differing_bits

LOW = torch.arange(1 << 16)
SIGNS = (0, 0x8000)
CLEAR = torch.tensor([0.0, 1.0, 2.0**-149, 3e38, torch.inf, torch.nan])
"""Markers whose sign is free: zero, one, the least denormal, nearly the largest, infinity, NaN."""


pytestmark = pytest.mark.usefixtures("one_thread")


def values_above(upper: Sequence[int]) -> torch.Tensor:
    """All values whose upper halves are these."""
    bits = (torch.tensor(upper).view(-1, 1) << 16 | LOW).view(-1)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def markers_for(numel: int) -> torch.Tensor:
    return CLEAR.repeat(-(-numel // len(CLEAR)))[:numel]


def marks_of(values: torch.Tensor) -> torch.Tensor:
    """The places where a marker may not be negative."""
    numbers, rests = values.bfloat16(), torch.empty(values.numel(), dtype=torch.int16)
    cut(values, numbers, rests, torch.ones_like(values))
    return halves._meaning(numbers.view(torch.int16), rests).nonzero().view(-1)


def there_and_back(values: torch.Tensor, markers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers, places of the marks), after the checks that hold of any values."""
    numbers, rests, kept = values.to(torch.bfloat16), torch.empty(values.numel(), dtype=torch.int16), markers.clone()
    rounded = numbers.clone()
    marks = cut(values, numbers, rests, kept)
    found = torch.full_like(values, torch.nan)
    assert torch.equal(join(numbers, rests, kept, found).sort().values, marks.sort().values)
    assert differing_bits(found, values) == 0
    assert differing_bits(kept, markers) == 0, "markers are what they were"
    is_number = ~values.isnan()
    assert differing_bits(numbers[is_number], rounded[is_number]) == 0
    assert bool(numbers[~is_number].isnan().all())
    return numbers, marks


REPRESENTATIVE = sorted({0, 1, 2, 0x7F, 0x80, 0x81, 0x7F7E, *range(0x37, 0x7F80, 1021), *range(0x7F7F, 0x8000)})
"""Upper halves: zero, denormals, normal numbers odd and even, the largest, infinity, all NaNs."""


@pytest.mark.parametrize("sign", SIGNS)
def test_every_rest_beside_representative_numbers(sign: int) -> None:
    for first in range(0, len(REPRESENTATIVE), 16):
        values = values_above([upper | sign for upper in REPRESENTATIVE[first : first + 16]])
        there_and_back(values, markers_for(values.numel()))


@pytest.mark.slow
@pytest.mark.parametrize("sign", SIGNS)
def test_every_value_there_is(sign: int) -> None:
    markers = markers_for(32 << 16)
    for upper in range(sign, sign + 0x8000, 32):
        there_and_back(values_above(range(upper, upper + 32)), markers)


@pytest.mark.parametrize(
    ("bits", "number", "is_marked"),
    [
        (0x3F80_8000, 0x3F80, True),  # a tie that was rounded down
        (0x3F81_8000, 0x3F82, False),  # and up
        (0x3F80_8001, 0x3F81, False),
        (0x0000_8000, 0x0000, True),  # a denormal one
        (0x7F7F_8000, 0x7F80, False),  # too large for bf16
        (0x7F80_0000, 0x7F80, False),
        (0x7F80_0001, 0x7F81, True),  # NaNs that infinity or zero would be cut from
        (0x7FFF_FFFF, 0x7FFF, True),
        (0x7FC0_0000, 0x7FC0, False),  # NaNs that arithmetic makes
        (0x7FFF_0000, 0x7FFF, False),
    ],
)
@pytest.mark.parametrize("sign", SIGNS)
def test_what_is_marked(bits: int, number: int, is_marked: bool, sign: int) -> None:
    values = values_above([bits >> 16 | sign])[bits & 0xFFFF :][:1]
    numbers, marks = there_and_back(values, torch.ones(1))
    assert int(numbers.view(torch.int16)) & 0xFFFF == number | sign
    assert marks.numel() == is_marked


def test_a_number_that_is_no_rounding_is_made_one() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))  # a tie, one number in 65,536, is marked
    numbers, rests, markers = torch.zeros(1000).bfloat16(), torch.empty(1000, dtype=torch.int16), torch.ones(1000)
    cut(values, numbers, rests, markers)
    assert torch.equal(numbers, values.bfloat16())
    assert torch.equal(join(numbers, rests, markers, found := torch.empty(1000)), torch.empty(0, dtype=torch.int64))
    assert torch.equal(found, values)


def test_a_negative_marker_is_kept_where_its_sign_is_free_and_refused_where_it_is_needed() -> None:
    free = torch.tensor([1.0, 1 + 2**-9, torch.nan])
    there_and_back(free, torch.tensor([-0.0, -1.0, -torch.nan]))
    for needed in (1 + 2**-8, 1 + 3 * 2**-8):  # ties: the one would be marked, the other taken for a marked one
        values = torch.tensor([1.0, needed])
        with pytest.raises(ValueError, match="negative"):
            cut(values, values.bfloat16(), torch.empty(2, dtype=torch.int16), torch.tensor([1.0, -1.0]))


def test_marks_can_be_put_back() -> None:
    values, rests, markers = torch.tensor([1 + 2**-8, 2.0]), torch.empty(2, dtype=torch.int16), torch.ones(2)
    cut(values, values.bfloat16(), rests, markers)
    marked = markers.clone()
    places = join(values.bfloat16(), rests, markers, torch.empty(2))
    assert places.tolist() == [0]
    unmark(markers, places)
    assert differing_bits(markers, marked) == 0


def test_the_core_and_torch_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_above([0x0000, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0xFF80, 0xFFFF])
    found = []
    for is_here in (True, False):
        monkeypatch.setattr(halves, "_are_here", lambda *_tensors, is_here=is_here: is_here)
        numbers, rests = values.bfloat16(), torch.empty(values.numel(), dtype=torch.int16)
        markers = torch.where(torch.arange(values.numel()) % 3 == 1, -torch.nan, 1.0)
        markers[marks_of(values)] = 1.0
        marks = cut(values, numbers, rests, markers)
        there_and_back(values, markers.abs())
        found.append((numbers.view(torch.int16), rests, markers.view(torch.int32), marks))
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))

"""Forms in which the store has fp32 states of an optimizer in fewer bits. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Final

import torch

from io_daemon.shared.protocol import STATE_KINDS, ObjectKind

BLOCK: Final = 64
"""Values that share a byte in the 8-bit forms. Parameters and shards begin at multiples of it, so that what is in a
block depends neither on the budget nor on the number of ranks."""


class Narrow(Enum):
    BF16 = "bf16"
    SIGNED_8 = "8bit"
    """A sign, four bits for the power of two below the block's largest value, and three behind the point."""
    UNSIGNED_8 = "8bit unsigned"
    """Four bits for the power of two, and four behind the point."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self is Narrow.BF16 else torch.uint8

    @property
    def dropped_bits(self) -> int:
        """The lowest bits of an fp32 value that it does not have."""
        return {Narrow.BF16: 16, Narrow.SIGNED_8: 20, Narrow.UNSIGNED_8: 19}[self]

    @property
    def is_signed(self) -> bool:
        return self is not Narrow.UNSIGNED_8

    @property
    def bytes_per_value(self) -> float:
        return 2 if self is Narrow.BF16 else 1 + 1 / BLOCK

    def numel(self, numel: int) -> int:
        """Elements of ``dtype`` for so many values, a multiple of ``BLOCK``."""
        return numel if self is Narrow.BF16 else numel + numel // BLOCK


def narrows_of(
    moments: str, states: Mapping[str, torch.dtype], unsigned: Collection[ObjectKind]
) -> dict[ObjectKind, Narrow]:
    """The form of each of the optimizer's states.

    Args:
        moments: what the configuration says: "fp32", "bf16" or "8bit".
        unsigned: the kinds of states that are never negative.
    """
    if moments == "fp32":
        return {}
    if moments == "bf16":
        return dict.fromkeys(STATE_KINDS[: len(states)], Narrow.BF16)
    return {kind: Narrow.UNSIGNED_8 if kind in unsigned else Narrow.SIGNED_8 for kind in STATE_KINDS[: len(states)]}

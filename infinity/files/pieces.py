"""Tensors on their way from and to files: how much of one is in memory at once, and its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

PIECE_NUMEL = 1 << 21
"""Elements that are read or written at once; two such pieces are in memory while one takes the other's place."""


def pieces(numel: int, numel_max: int | None = None, *, num_ranks: int = 1) -> Iterator[tuple[int, int]]:
    """(first element, numel) of each piece of so many elements.

    Args:
        numel_max: the most elements of a piece; by default ``PIECE_NUMEL``.
        num_ranks: how many such pieces come together.
    """
    step = max(1, (numel_max or PIECE_NUMEL) // num_ranks)
    for first in range(0, numel, step):
        yield first, min(step, numel - first)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Dense values as uint8 [their bytes], on the CPU; their own memory where they are there, one behind another."""
    return values.detach().cpu().reshape(-1).view(torch.uint8)


def bytes_of(values: torch.Tensor) -> memoryview:
    """The same as a buffer."""
    flat: Any = as_bytes(values).numpy()
    return memoryview(flat)

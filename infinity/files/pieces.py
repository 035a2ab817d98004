"""Tensors on their way from and to files: how much of one is in memory at once, and its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")

PIECE_NUMEL = 1 << 21
"""Elements that are read or written at once; two such pieces are in memory while one takes the other's place."""


SHARES_MAX = 256
"""A piece is cut into so many parts at most. What thousands of ranks have a part of each is longer instead: parts of a
few hundred elements, each written by itself, would take days of a trillion."""


def pieces(numel: int, numel_max: int | None = None, *, num_ranks: int = 1) -> Iterator[tuple[int, int]]:
    """(first element, numel) of each piece of so many elements.

    Args:
        numel_max: the most elements of a piece; by default ``PIECE_NUMEL``.
        num_ranks: how many such pieces come together, each a part of one, see ``SHARES_MAX``.
    """
    step = max(1, (numel_max or PIECE_NUMEL) // min(num_ranks, SHARES_MAX))
    for first in range(0, numel, step):
        yield first, min(step, numel - first)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Dense values as uint8 [their bytes], on the CPU; their own memory where they are there, one behind another."""
    return values.detach().cpu().reshape(-1).contiguous().view(torch.uint8)  # of an expanded one reshape keeps a view


def bytes_of(values: torch.Tensor) -> memoryview:
    """The same as a buffer."""
    flat: Any = as_bytes(values).numpy()
    return memoryview(flat)


def making_on_cpu(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Tensors that ``function`` makes on the way are on the CPU, wherever its caller has new ones go."""

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call

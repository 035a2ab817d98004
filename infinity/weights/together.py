"""Which parameters travel by one call: a model may have a hundred thousand of them, and each call is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

import torch

from infinity.tiers.collectives import Collectives

TOGETHER_NUMEL: Final = 1 << 20
"""Elements of parameters that travel together."""

Item = TypeVar("Item")


def together(items: Iterable[Item], tensor_of: Callable[[Item], torch.Tensor]) -> Iterator[list[Item]]:
    """``items`` in their order, cut so that each list has at most ``TOGETHER_NUMEL`` elements of one dtype on one
    device, or one item."""
    several: list[Item] = []
    kind, numel = None, 0
    for item in items:
        tensor = tensor_of(item)
        if several and ((tensor.dtype, tensor.device) != kind or numel + tensor.numel() > TOGETHER_NUMEL):
            yield several
            several, numel = [], 0
        several.append(item)
        kind, numel = (tensor.dtype, tensor.device), numel + tensor.numel()
    if several:
        yield several


def broadcast(flats: list[torch.Tensor], collectives: Collectives, what: str) -> list[torch.Tensor]:
    """Rank 0's values of ``flats``, 1-D and of one dtype and device, by one collective: views of what came."""
    values = flats[0] if len(flats) == 1 else torch.cat(flats)
    collectives.broadcast(values, what)
    return list(torch.split(values, [flat.numel() for flat in flats]))

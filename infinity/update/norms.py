"""The norm of a step's gradients.

One rank takes it as ``torch.nn.utils.clip_grad_norm_`` does, bit for bit: the norm of each parameter's gradient, in
fp32 and in torch's order, and then the norm of these. Several ranks hold a part of each parameter, and that order goes
from part to part: they take sums of squares in fp64, where torch's rounding does not happen (1e-4 of the norm of some
million elements).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from infinity.plan.sharding import NORM_BLOCK, Segment
from infinity.tiers.base import spans
from io_daemon import _native

_log = logging.getLogger(__name__)

Sums = NDArray[np.float32]

BLOCKS_TOGETHER: Final = 4
"""Norms of so many blocks are taken by one call: in fp64 they lie in a core's own cache."""
CAST_NUMEL: Final = 1 << 16
"""Elements in fp16 that are cast at a time: both forms lie in a core's own cache."""
_STATE: Final = 16
_NOT_FINITE: Final = _STATE - 1
_TRIED: Final = (1, 7, 8, 100, 4_099, 70_001)


class Norm(NamedTuple):
    value: torch.Tensor
    """0-D fp32, on the CPU."""
    is_finite: bool
    """Every gradient is, also where the norm itself is too large for fp32."""


class Norms(Protocol):
    """What is known of the norms of the running step's gradients, segment by segment."""

    def clear(self) -> None:
        """The gradients are forgotten."""

    def drop(self, segment: Segment) -> None:
        """The segment's gradient has changed."""

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        """Note the segment's gradient, which lies in its chunk's ``pieces``. A parameter's segments come in order."""

    def lacks(self, segment: Segment) -> bool:
        """Whether the segment must be taken before ``total``."""

    def total(self, held: Sequence[Segment]) -> Norm:
        """The norm of all these segments, the same on every rank."""


def norms_of(
    numels: Sequence[int], *, num_ranks: int, on_cpu: bool, sum_over_ranks: Callable[[torch.Tensor], None]
) -> Norms:
    """Those that give torch's own bits where that can be done: on one rank, and on a CPU whose torch is understood.

    Args:
        numels: of each parameter, unsharded.
        sum_over_ranks: makes of a 0-D fp64 tensor the sum of all ranks' ones, in place.
    """
    if num_ranks == 1 and on_cpu and torch_sums_in_lanes():
        return ParamNorms(numels)
    return BlockNorms(sum_over_ranks, is_second_best=num_ranks == 1)


class ParamNorms:
    """Norms of whole parameters, with torch's bits."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._states = np.zeros((len(numels), _STATE), dtype=np.float32)
        self._taken = [0] * len(numels)
        """Elements of each parameter that its state has."""

    def clear(self) -> None:
        self._taken = [0] * len(self._numels)

    def drop(self, segment: Segment) -> None:
        self._taken[segment.param] = 0

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        param, state = segment.param, self._states[segment.param]
        if segment.param_offset == 0:
            state.fill(0.0)
        elif segment.param_offset != self._taken[param]:
            return  # one before it is still to come, and this one again
        for done, part in spans(pieces, segment.chunk_offset, segment.numel):
            _add_squares(part, state, segment.param_offset + done, self._numels[param])
        self._taken[param] = segment.param_offset + segment.numel

    def lacks(self, segment: Segment) -> bool:
        return self._taken[segment.param] != self._numels[segment.param]

    def total(self, held: Sequence[Segment]) -> Norm:
        states = self._states[sorted({segment.param for segment in held})]
        norms = torch.from_numpy(_norms_of(states))
        return Norm(torch.linalg.vector_norm(norms), not bool(np.isnan(states[:, _NOT_FINITE]).any()))


class BlockNorms:
    """Norms of the group shards' blocks in fp64, whose squares are summed in order: what the sum depends on, where
    groups, shards and chunks are cut, is gone when it is rounded to fp32."""

    def __init__(self, sum_over_ranks: Callable[[torch.Tensor], None], *, is_second_best: bool = False) -> None:
        """``is_second_best``: one rank's norms should be torch's, and it is told that these are not."""
        self._sum_over_ranks, self._is_to_tell = sum_over_ranks, is_second_best
        self._squares: dict[tuple[int, int], list[float]] = {}
        """By parameter and offset in it, of each block."""

    def clear(self) -> None:
        self._squares.clear()

    def drop(self, segment: Segment) -> None:
        self._squares.pop((segment.param, segment.param_offset), None)

    def take(self, segment: Segment, pieces: Sequence[torch.Tensor]) -> None:
        found = []
        for offset, numel, count in _norm_blocks(segment):
            parts = [part for _, part in spans(pieces, offset, count * numel)]
            values = torch.cat(parts) if len(parts) > 1 else parts[0]
            found.append(torch.linalg.vector_norm(values.view(count, numel), dim=1, dtype=torch.float64))
        norms = torch.cat(found)
        self._squares[segment.param, segment.param_offset] = (norms * norms).tolist()

    def lacks(self, segment: Segment) -> bool:
        return (segment.param, segment.param_offset) not in self._squares

    def total(self, held: Sequence[Segment]) -> Norm:
        if self._is_to_tell:
            self._is_to_tell = False
            _log.warning(
                "norms of gradients are summed in fp64 here, since torch's own order on this device is not known: what "
                "is clipped by them differs in the last bits from torch.nn.utils.clip_grad_norm_"
            )
        total = 0.0
        for segment in held:
            for square in self._squares[segment.param, segment.param_offset]:
                total += square
        square_sum = torch.tensor(total, dtype=torch.float64)
        self._sum_over_ranks(square_sum)
        return Norm(square_sum.sqrt().float(), bool(square_sum.isfinite()))


@cache
def torch_sums_in_lanes() -> bool:
    """Whether this CPU's torch takes norms in the order that ``_native.add_squares`` knows; asked of torch itself."""
    generator = torch.Generator().manual_seed(0)

    def agrees(numel: int) -> bool:
        values, state = torch.randn(numel, generator=generator), np.zeros(_STATE, dtype=np.float32)
        _add_squares(values, state, 0, numel)
        return float(_norms_of(state[None])[0]) == float(torch.linalg.vector_norm(values))

    return all(agrees(numel) for numel in _TRIED)


def _add_squares(values: torch.Tensor, state: Sums, first: int, numel: int) -> None:
    match values.dtype:
        case torch.float32:
            _native.add_squares(values.numpy(), state, first, numel)
        case torch.bfloat16:
            _native.add_squares(values.view(torch.int16).numpy(), state, first, numel)
        case _:
            for done in range(0, values.numel(), CAST_NUMEL):
                part = values[done : done + CAST_NUMEL].float()
                _native.add_squares(part.numpy(), state, first + done, numel)


def _norms_of(states: Sums) -> Sums:
    """[parameters]: of states [parameters, 16], each added up from the left."""
    sums: Sums = states[:, 0].copy()
    for column in range(1, _NOT_FINITE):
        sums += states[:, column]
    return np.sqrt(sums)


def _norm_blocks(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """(chunk offset, numel, how many) of the segment's norm blocks that are taken together: only whole ones are."""
    first = numel = count = 0
    for offset, length in segment.norm_ranges():
        if count and numel == length == NORM_BLOCK and count < BLOCKS_TOGETHER:
            count += 1
            continue
        if count:
            yield first, numel, count
        first, numel, count = offset, length, 1
    if count:
        yield first, numel, count

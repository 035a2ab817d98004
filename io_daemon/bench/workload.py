"""Which block next, and read or write: pure, and the same for the same seed.

Sequential runs go round the file; mixed ones have a position for reads and another for writes, half a file apart.
Random runs visit every block once before any twice, in an order that a Feistel network over the block numbers gives
(Luby and Rackoff 1988; cycle walking, Black and Rogaway 2002): no table, so a file may have any number of blocks. The
same block comes again only after all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.random import default_rng
from numpy.typing import NDArray

from io_daemon.bench.settings import IoSettings

NUM_ROUNDS: Final = 4
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Batch:
    """I/Os in the order in which they begin."""

    writes: NDArray[np.uint8]
    """1: write, 0: read."""
    blocks: NDArray[np.uint64]

    @cached_property
    def is_write(self) -> NDArray[np.bool_]:
        return self.writes.view(np.bool_)

    @cached_property
    def written(self) -> NDArray[np.uint64]:
        return self.blocks[self.is_write]


class Permutation:
    """A pseudo-random bijection of [0, num_blocks)."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._num_blocks = np.uint64(num_blocks)
        self._half_bits = np.uint64(max(1, -(-(num_blocks - 1).bit_length() // 2)))
        self._half_mask = (np.uint64(1) << self._half_bits) - np.uint64(1)
        self._keys = default_rng(seed).integers(0, 1 << 63, NUM_ROUNDS, dtype=np.uint64)

    def __call__(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """``positions`` in [0, num_blocks), any number of them."""
        found = self._mix(positions)
        while (outside := found >= self._num_blocks).any():
            found[outside] = self._mix(found[outside])  # the domain is less than 4 times too large
        return found

    def _mix(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._half_mask
        for key in self._keys:
            mixed = (right ^ key) * _MULTIPLIER
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(29))) >> np.uint64(17)) & self._half_mask
        return (left << self._half_bits) | right


class Workload:
    """The endless stream of one job's I/Os."""

    def __init__(self, settings: IoSettings, job: int = 0) -> None:
        num_blocks = settings.num_blocks
        self._num_blocks = num_blocks
        self._order = Permutation(num_blocks, settings.seed + job) if settings.random else None
        self._percent_write = 0 if not settings.writes else 100 if not settings.reads else 100 - settings.rwmixread
        self._num_ios = 0
        self._num_read = 0
        self._num_written = 0
        self._write_start = num_blocks // 2 if settings.mixed else 0

    def next(self, num_ios: int) -> Batch:
        """The next ``num_ios``. Of any first n I/Os, n * rwmixread / 100 are reads, within one."""
        count = np.arange(self._num_ios, self._num_ios + num_ios + 1, dtype=np.uint64) * np.uint64(self._percent_write)
        written = count // np.uint64(100)
        writes = np.diff(written).astype(np.uint8)
        self._num_ios += num_ios
        num_writes = int(writes.sum())
        positions = np.empty(num_ios, np.uint64)
        positions[writes == 0] = self._take(self._num_read, num_ios - num_writes, 0)
        positions[writes == 1] = self._take(self._num_written, num_writes, self._write_start)
        self._num_read += num_ios - num_writes
        self._num_written += num_writes
        return Batch(writes, positions if self._order is None else self._order(positions))

    def _take(self, start: int, num_ios: int, shift: int) -> NDArray[np.uint64]:
        positions = np.arange(start + shift, start + shift + num_ios, dtype=np.uint64)
        return positions % np.uint64(self._num_blocks)

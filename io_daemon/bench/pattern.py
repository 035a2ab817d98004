"""What the bytes of a benchmark file are, and how they are checked.

Every slot of the arena that writes are taken from holds random bytes of its own; before each write its first 32 bytes
become a stamp: seed, block, generation, slot. So a block that is read back says what it should be, and lost, stale,
misplaced, torn and flipped bytes are all told apart. Checking costs time, so it has a pass of its own: while a rate is
measured a write costs one stamp, and a read nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

STAMP_WORDS: Final = 4
STAMP_BYTES: Final = 8 * STAMP_WORDS


class Pattern:
    """Of one job: the slots that writes are taken from, and what each block of the file should hold."""

    def __init__(self, slots: NDArray[np.uint8], num_blocks: int, seed: int) -> None:
        """``slots``: [num_slots, bs], uint8, of 8-byte aligned rows; filled here."""
        self._slots = slots
        words = slots.reshape(-1).view(np.uint64).reshape(slots.shape[0], -1)
        random = np.random.Generator(np.random.SFC64(seed))
        body = random.integers(0, 1 << 64, words.shape[1], dtype=np.uint64)
        for slot, key in zip(words, random.integers(0, 1 << 64, len(words), dtype=np.uint64), strict=True):
            np.bitwise_xor(body, key, out=slot)  # as random, and ten times as fast as drawing every word
        self._stamps = words[:, :STAMP_WORDS]
        self._seed = np.uint64(seed)
        self._generations = np.zeros(num_blocks, np.uint64)
        """0: never written."""

    def stamp(self, blocks: NDArray[np.uint64], slots: NDArray[np.uint64]) -> None:
        """The blocks are about to be written from these slots, one generation on."""
        self._generations[blocks] += np.uint64(1)
        stamps = np.empty((blocks.size, STAMP_WORDS), np.uint64)
        stamps[:, 0], stamps[:, 1], stamps[:, 2], stamps[:, 3] = self._seed, blocks, self._generations[blocks], slots
        self._stamps[slots] = stamps

    def find_faults(self, blocks: NDArray[np.uint64], found: NDArray[np.uint8]) -> list[tuple[int, str]]:
        """Check blocks that were read back; ``found``: [n, bs], uint8. Returns (block, what is wrong) of bad ones."""
        stamps = found.reshape(-1).view(np.uint64).reshape(found.shape[0], -1)[:, :STAMP_WORDS]
        return [
            (int(block), fault)
            for block, stamp, content in zip(blocks, stamps, found, strict=True)
            if (fault := self._fault(int(block), stamp, content)) is not None
        ]

    def _fault(self, block: int, stamp: NDArray[np.uint64], content: NDArray[np.uint8]) -> str | None:
        seed, found_block, generation, slot = (int(word) for word in stamp)
        expected = int(self._generations[block])
        if seed != int(self._seed) or slot >= len(self._slots) or found_block >= self._generations.size:
            return "its first bytes are not a stamp of this run"
        if found_block != block:
            return f"it holds block {found_block}"
        if generation != expected:
            return f"it holds write {generation} of this block, the last was {expected}"
        differs = content[STAMP_BYTES:] != self._slots[slot, STAMP_BYTES:]
        if differs.any():
            return f"{int(differs.sum())} bytes differ, the first at byte {STAMP_BYTES + int(differs.argmax())} of it"
        return None

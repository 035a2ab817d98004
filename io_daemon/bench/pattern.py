"""What the bytes of a benchmark file are, and how they are checked.

Every slot that writes are taken from holds random bytes of its own, and each write begins with a stamp of 24 bytes:
seed, block, generation. So a block that is read back says what it should be, and lost, stale, misplaced, torn and
flipped bytes are all told apart. Checking costs time, so it has a pass of its own: while a rate is measured a write
costs one stamp, and a read nothing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

STAMP_WORDS: Final = 3
STAMP_BYTES: Final = 8 * STAMP_WORDS


class Pattern:
    """Of one job: the slots that writes are taken from, and what each block of the file should hold."""

    def __init__(self, slots: NDArray[np.uint8], num_blocks: int, seed: int) -> None:
        """``slots``: [num_slots, bs], uint8, of 8-byte aligned rows of more than a stamp; filled here."""
        self._slots = slots
        words = slots.reshape(-1).view(np.uint64).reshape(slots.shape[0], -1)
        random = np.random.Generator(np.random.SFC64(seed))
        body = random.integers(0, 1 << 64, words.shape[1], dtype=np.uint64)
        for slot, key in zip(words, random.integers(0, 1 << 64, len(words), dtype=np.uint64), strict=True):
            np.bitwise_xor(body, key, out=slot)  # as random, and ten times as fast as drawing every word
        self._slot_of = {int(word): slot for slot, word in enumerate(words[:, STAMP_WORDS])}
        """By the first word behind the stamp."""
        self._seed = np.uint64(seed)
        self._generations = np.zeros(num_blocks, np.uint64)
        """0: never written."""

    def stamps(self, blocks: NDArray[np.uint64], is_write: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """[n, STAMP_BYTES]: what the writes among ``blocks`` begin with, one generation on; they are to be written."""
        written = blocks[is_write]
        self._generations[written] += np.uint64(1)
        stamps = np.zeros((blocks.size, STAMP_WORDS), np.uint64)
        stamps[:, 0], stamps[:, 1], stamps[is_write, 2] = self._seed, blocks, self._generations[written]
        return stamps.view(np.uint8)

    def find_faults(self, blocks: NDArray[np.uint64], found: NDArray[np.uint8]) -> list[tuple[int, str]]:
        """Check blocks that were read back; ``found``: [n, bs], uint8. Returns (block, what is wrong) of bad ones."""
        heads = found.reshape(-1).view(np.uint64).reshape(found.shape[0], -1)[:, : STAMP_WORDS + 1]
        return [
            (int(block), fault)
            for block, head, content in zip(blocks, heads, found, strict=True)
            if (fault := self._fault(int(block), head, content)) is not None
        ]

    def _fault(self, block: int, head: NDArray[np.uint64], content: NDArray[np.uint8]) -> str | None:
        seed, found_block, generation, first_word = (int(word) for word in head)
        expected = int(self._generations[block])
        if seed != int(self._seed) or found_block >= self._generations.size:
            return "its first bytes are not a stamp of this run"
        if found_block != block:
            return f"it holds block {found_block}"
        if generation != expected:
            return f"it holds write {generation} of this block, the last was {expected}"
        if (slot := self._slot_of.get(first_word)) is None:
            return f"8 bytes at byte {STAMP_BYTES} of it are none that were written"
        differs = content[STAMP_BYTES:] != self._slots[slot, STAMP_BYTES:]
        if differs.any():
            return f"{int(differs.sum())} bytes differ, the first at byte {STAMP_BYTES + int(differs.argmax())} of it"
        return None

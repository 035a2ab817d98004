"""What the bytes of a benchmark file are, and how they are checked.

Every slot that writes are taken from holds random bytes of its own, and each write carries a stamp of 24 bytes at the
beginning of every page: which run, which block, which write of it. So a block that is read back says what it should be,
page by page, and lost, stale, misplaced, torn and flipped bytes are all told apart, also from an earlier run's on the
same place of the drive. Checking costs time, so it has a pass of its own: while a rate is measured a write costs its
stamps, and a read nothing.
"""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np
from numpy.random import SFC64, Generator  # numpy itself imports it late, where files are to be cleaned up
from numpy.typing import NDArray

from io_daemon.shared.protocol import PAGE_BYTES

STAMP_WORDS: Final = 3
STAMP_BYTES: Final = 8 * STAMP_WORDS

Words = NDArray[np.uint64]


class Pattern:
    """The data of one job: the slots that writes are taken from, and what each block of the file should hold."""

    def __init__(self, slots: NDArray[np.uint8], num_blocks: int, seed: int) -> None:
        """``slots``: [num_slots, bs], uint8, of 8-byte aligned rows, whole pages or less than one; filled here."""
        self._slots = self._paged(slots)
        words = self._slots.reshape(len(slots), -1)
        random = Generator(SFC64(seed))
        body = random.integers(0, 1 << 64, words.shape[1], dtype=np.uint64)
        for slot, key in zip(words, random.integers(0, 1 << 64, len(words), dtype=np.uint64), strict=True):
            np.bitwise_xor(body, key, out=slot)  # as random, and ten times as fast as drawing every word
        self._slot_of = {int(word): slot for slot, word in enumerate(words[:, STAMP_WORDS])}
        """A slot is found by the first word behind the first stamp."""
        self._run = np.uint64(secrets.randbits(64))
        self._generations = np.zeros(num_blocks, np.uint64)
        """0: never written."""

    def stamps(self, blocks: NDArray[np.uint64], is_write: NDArray[np.bool_]) -> NDArray[np.uint8]:
        """[n, STAMP_BYTES]: what the pages of the writes among ``blocks`` begin with, one generation on; they are to be
        written."""
        written = blocks[is_write]
        self._generations[written] += np.uint64(1)
        stamps = np.zeros((blocks.size, STAMP_WORDS), np.uint64)
        stamps[:, 0], stamps[:, 1], stamps[is_write, 2] = self._run, blocks, self._generations[written]
        return stamps.view(np.uint8)

    def find_faults(self, blocks: NDArray[np.uint64], found: NDArray[np.uint8]) -> list[tuple[int, str]]:
        """Check blocks that were read back; ``found``: [n, bs], uint8. Returns (block, what is wrong) of bad ones."""
        return [
            (int(block), fault)
            for block, pages in zip(blocks, self._paged(found), strict=True)
            if (fault := self._fault(int(block), pages)) is not None
        ]

    def _fault(self, block: int, pages: Words) -> str | None:
        expected = np.array([self._run, block, self._generations[block]], np.uint64)
        wrong = (pages[:, :STAMP_WORDS] != expected).any(axis=1)
        if wrong.any():
            page = int(wrong.argmax())
            fault = self._stamp_fault(block, pages[page])
            return fault if len(pages) == 1 else f"{fault} ({int(wrong.sum())} of {len(pages)} pages, first {page})"
        if (slot := self._slot_of.get(int(pages[0, STAMP_WORDS]))) is None:
            return f"8 bytes at byte {STAMP_BYTES} of it are none that were written"
        differs = (pages[:, STAMP_WORDS:] != self._slots[slot, :, STAMP_WORDS:]).reshape(len(pages), -1)
        if differs.any():
            page, word = divmod(int(differs.argmax()), differs.shape[1])
            first_byte = page * PAGE_BYTES + 8 * (STAMP_WORDS + word)
            return f"{int(differs.sum())} words of 8 bytes differ, the first at byte {first_byte} of it"
        return None

    def _stamp_fault(self, block: int, page: Words) -> str:
        run, found_block, generation = (int(word) for word in page[:STAMP_WORDS])
        if run != int(self._run) or found_block >= self._generations.size:
            return "it has no stamp of this run"
        if found_block != block:
            return f"it holds block {found_block}"
        return f"it holds write {generation} of this block, the last was {int(self._generations[block])}"

    @staticmethod
    def _paged(blocks: NDArray[np.uint8]) -> Words:
        """[n, pages of a block, words of a page]."""
        num, bs = blocks.shape
        words: Words = blocks.reshape(-1).view(np.uint64)
        return words.reshape(num, max(1, bs // PAGE_BYTES), -1)

"""Batches of block I/Os for tests of engines: a file and an arena of as many blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from io_daemon.bench.engines.engine import BlockEngine
from tests.support.reactor import DEADLINE_S

BS: Final = 16384
NUM_SLOTS: Final = 64


def make_file(path: Path) -> Path:
    """``NUM_SLOTS`` blocks of random bytes."""
    path.write_bytes(np.random.default_rng(0).bytes(NUM_SLOTS * BS))
    return path


def batch(first: int, num: int, write: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.uint64]]:
    """Blocks first, first + 1, ... of the file and the same slots of the arena."""
    slots = np.arange(first, first + num, dtype=np.uint64)
    return np.full(num, write, dtype=np.uint8), slots * np.uint64(BS), slots


def reap_all(engine: BlockEngine, num: int) -> list[int]:
    tags: list[int] = []
    while len(tags) < num:
        ended = engine.reap(DEADLINE_S)
        assert ended, f"{len(tags)} of {num} batches ended"
        tags += ended
    return tags

"""Batches of block I/Os for tests of engines: a file and an arena of as many blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.bench.engines.engine import BlockEngine
from io_daemon.shared.protocol import PAGE_BYTES
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


def check_own_slots(engine: BlockEngine, path: Path, arena: Region, iodepth: int) -> None:
    """Batches that name no slots: writes come from the first ``iodepth`` with their headers over them, reads go into
    the next ``iodepth``, and nothing else of the arena is touched."""
    slots = arena.array().reshape(NUM_SLOTS, BS)
    slots[:] = np.random.default_rng(1).integers(0, 256, slots.shape, dtype=np.uint8)
    before = slots.copy()
    writes, offsets, _ = batch(0, NUM_SLOTS)
    writes[::2] = 1
    headers = np.random.default_rng(2).integers(0, 256, (NUM_SLOTS, 24), dtype=np.uint8)
    content = np.fromfile(path, np.uint8).reshape(NUM_SLOTS, BS)
    engine.submit(1, writes, offsets, None, headers)
    assert reap_all(engine, 1) == [1]
    found = np.fromfile(path, np.uint8).reshape(NUM_SLOTS, BS)
    assert (found[1::2] == content[1::2]).all()
    written, bodies, bodies_after = (
        [block.reshape(-1, PAGE_BYTES) for block in blocks]
        for blocks in (found[::2], before[:iodepth], slots[:iodepth])
    )
    assert all((block[:, :24] == header).all() for block, header in zip(written, headers[::2], strict=True))
    behind_headers = {bytes(body[:, 24:]) for body in bodies}
    assert {bytes(block[:, 24:]) for block in written} <= behind_headers
    assert {bytes(body[:, 24:]) for body in bodies_after} == behind_headers
    assert {bytes(slot) for slot in slots[iodepth : 2 * iodepth]} <= {bytes(block) for block in content[1::2]} | {
        bytes(slot) for slot in before[iodepth : 2 * iodepth]
    }
    assert (slots[2 * iodepth :] == before[2 * iodepth :]).all()


def reap_all(engine: BlockEngine, num: int) -> list[int]:
    tags: list[int] = []
    while len(tags) < num:
        ended = engine.reap(DEADLINE_S)
        assert ended, f"{len(tags)} of {num} batches ended"
        tags += ended
    return tags

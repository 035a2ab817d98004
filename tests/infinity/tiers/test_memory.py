"""The store in memory keeps what a lease said it changed, and nothing else."""

from __future__ import annotations

import torch

from infinity.tiers.base import ChunkLayout
from infinity.tiers.memory import MemoryStore

LAYOUT = ChunkLayout(numel=8, dtypes={0: torch.float32})


def test_what_a_lease_made_and_did_not_write_reads_as_zero() -> None:
    store = MemoryStore(torch.device("cpu"))
    store.register([LAYOUT])
    lease = store.acquire(0, write=1)
    lease.wait()
    lease.pieces(0)[0].fill_(7.0)
    lease.release()  # an update that failed: nothing is dirty
    lease = store.acquire(0, read=1)
    lease.wait()
    assert not lease.pieces(0)[0].any()

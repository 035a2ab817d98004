"""The other ranks of a node, beside the one that is replayed for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from io_daemon.rank.client import Client
from io_daemon.shared.protocol import PAGE_BYTES, ChunkSpec, ObjectKind

KIND_MASK = ObjectKind.WEIGHT.mask


class OtherRanks:
    """What they would move is in the replayed rank's larger chunks. The round trips are not: so each of them asks for
    as many leases, in the same order, on a chunk of its own that never leaves its frame."""

    def __init__(self, clients: Sequence[Client]) -> None:
        """``clients`` are connected; this attaches them."""
        self._clients = clients
        self._seqs: dict[int, list[int]] = {}
        """Of each lease, as the other ranks have it."""
        for client in clients:
            client.attach(num_frames=1, frame_bytes=PAGE_BYTES, swap_dirs=client.swap_dirs, chunks_max=1)
            client.register([ChunkSpec((PAGE_BYTES,), KIND_MASK)])
            seq = client.acquire(0, write=KIND_MASK)
            client.wait(seq)
            client.release(seq, dirty=KIND_MASK)

    @property
    def stall_s(self) -> float:
        """Seconds spent blocked in ``wait``."""
        return sum(client.stall_s for client in self._clients)

    def mark(self, trace_id: int) -> None:
        for client in self._clients:
            client.mark(trace_id)

    def acquire(self, lease: int) -> None:
        self._seqs[lease] = [client.acquire(0, read=KIND_MASK) for client in self._clients]

    def wait(self, lease: int) -> None:
        for client, seq in zip(self._clients, self._seqs[lease], strict=True):
            client.wait(seq)

    def release(self, lease: int) -> None:
        for client, seq in zip(self._clients, self._seqs.pop(lease), strict=True):
            client.release(seq)

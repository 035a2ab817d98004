"""Shards in this process's own memory: the tier ``none``, and the oracle that every other tier is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.tiers.base import ChunkLayout, Lease, ShardStore
from io_daemon.shared.protocol import Access, kinds_of


class MemoryLease(Lease):
    def __init__(self, store: MemoryStore, chunk: int, read: int, write: int) -> None:
        self.chunk = chunk
        self._store, self._read, self._write = store, read, write
        self._tensors: dict[int, torch.Tensor] = {}

    def wait(self) -> None:
        if not self._tensors:
            self._tensors = {kind: self._store.open(self.chunk, kind) for kind in kinds_of(self._read | self._write)}

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return [self._tensors[kind]]

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        for kind in kinds_of(dead):
            self._store.discard(self.chunk, kind)
        self._tensors = {}


class MemoryStore(ShardStore):
    """Every object a plain tensor on ``device``, made when first needed, dropped when dead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[int, ChunkLayout] = {}
        self._objects: dict[tuple[int, int], torch.Tensor] = {}
        self._num_registered = 0

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        chunks = range(self._num_registered, self._num_registered + len(layouts))
        self._layouts.update(zip(chunks, layouts, strict=True))
        self._num_registered = chunks.stop
        return chunks

    def unregister(self, chunks: range) -> None:
        for chunk in chunks:
            for kind in self._layouts.pop(chunk).dtypes:
                self.discard(chunk, kind)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        return MemoryLease(self, chunk, read, write)

    def open(self, chunk: int, kind: int) -> torch.Tensor:
        """The object's tensor; zeros if it was never written."""
        tensor = self._objects.get((chunk, kind))
        if tensor is None:
            layout = self._layouts[chunk]
            tensor = torch.zeros(layout.numel, dtype=layout.dtypes[kind], device=self._device)
            self._objects[chunk, kind] = tensor
        return tensor

    def discard(self, chunk: int, kind: int) -> None:
        self._objects.pop((chunk, kind), None)

    def mark(self, trace_id: int) -> None:
        """Nothing is prefetched here."""

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        """Nothing is prefetched here."""

    def stats(self) -> dict[str, float]:
        return {"resident_bytes": float(sum(t.numel() * t.element_size() for t in self._objects.values()))}

    def close(self) -> None:
        self._objects.clear()
        self._layouts.clear()

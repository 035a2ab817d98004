"""Shards in this process's own memory: the tier ``none``, and the oracle that every other tier is tested against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from infinity.errors import EngineStateError
from infinity.tiers.base import ChunkLayout, Lease, ManyPieces, ShardStore, is_beside
from infinity.tiers.pool import MemoryPool
from io_daemon.shared.protocol import Access, kinds_of

Views = Callable[[], list[torch.Tensor]]
"""What gives the elements of an object, 1-D and in order, where they lie at the time."""


class MemoryLease(Lease):
    def __init__(self, store: MemoryStore, chunk: int, read: int, write: int) -> None:
        self.chunk = chunk
        self._store, self._read, self._write = store, read, write
        self._tensors: dict[int, list[torch.Tensor]] = {}
        self._made = 0
        """Kinds that had no memory before: of undefined contents, unless this lease writes them."""

    def wait(self) -> None:
        if not self._tensors:
            self._made = sum(1 << kind for kind in kinds_of(self._write) if not self._store.has(self.chunk, kind))
            for kind in kinds_of(self._read | self._write):
                self._tensors[kind] = self._store.open(self.chunk, kind, read=bool(self._read >> kind & 1))

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._tensors[kind]

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        for kind in kinds_of(dead | self._made & ~dirty):
            self._store.discard(self.chunk, kind)
        self._tensors = {}


class MemoryStore(ShardStore):
    """Every object a plain tensor on ``device``, made when first needed, dropped when dead; but for those that lie in
    memory of somebody else's."""

    def __init__(
        self, device: torch.device, pool: MemoryPool | None = None, *, pools: Mapping[int, MemoryPool] | None = None
    ) -> None:
        """``pool``: where the tensors come from; None: torch. ``pools``: those of some kinds come from another."""
        self._device = device
        self._pools = dict(pools or {})
        self._pool = pool if pool is not None else MemoryPool(0, device)
        self._layouts: dict[int, ChunkLayout] = {}
        self._objects: dict[tuple[int, int], torch.Tensor] = {}
        self._elsewhere: dict[tuple[int, int], Views] = {}
        self._num_registered = 0
        self.away = 0
        """Kinds that wait in host memory."""

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        chunks = range(self._num_registered, self._num_registered + len(layouts))
        self._layouts.update(zip(chunks, layouts, strict=True))
        self._num_registered = chunks.stop
        return chunks

    def unregister(self, chunks: range) -> None:
        for chunk in chunks:
            for kind in self._layouts.pop(chunk).dtypes:
                self.discard(chunk, kind)
                self._elsewhere.pop((chunk, kind), None)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        self.refuse_away(read | write)
        return MemoryLease(self, chunk, read, write)

    def refuse_away(self, mask: int) -> None:
        """Raises EngineStateError if one of these kinds waits in host memory."""
        if mask & self.away:
            raise EngineStateError("states that this needs were offloaded: call engine.reload_states() before it")

    def has(self, chunk: int, kind: int) -> bool:
        return (chunk, kind) in self._objects or (chunk, kind) in self._elsewhere

    def keep_in(self, chunk: int, kind: int, views: Views) -> None:
        """From now on the object is what ``views`` gives, which has its contents already."""
        self._elsewhere[chunk, kind] = views
        self.discard(chunk, kind)

    def take_back(self, chunk: int, kind: int) -> None:
        """The counterpart of ``keep_in``: the object has memory of its own, with the contents."""
        views = self._elsewhere.pop((chunk, kind))
        self._objects[chunk, kind] = torch.cat(views())

    def open(self, chunk: int, kind: int, *, read: bool) -> list[torch.Tensor]:
        """The object's elements; zeros if it was never written and is to be read."""
        if (chunk, kind) in self._elsewhere:
            return ManyPieces(self._elsewhere[chunk, kind]())
        tensor = self._objects.get((chunk, kind))
        if tensor is None:
            layout = self._layouts[chunk]
            tensor = self._pools.get(kind, self._pool).empty(layout.numel_of(kind), layout.dtypes[kind])
            self._objects[chunk, kind] = tensor.zero_() if read else tensor
        return [tensor]

    def discard(self, chunk: int, kind: int) -> None:
        tensor = self._objects.pop((chunk, kind), None)
        if tensor is not None and is_beside(tensor.device):  # what the stream holds may still use it
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))

    def move_out(self, mask: int, *, pin_memory: bool, non_blocking: bool) -> None:
        """Objects of these kinds wait in host memory, until ``bring_back``."""
        self.away |= mask
        if self._device.type == "cpu":
            return
        for (chunk, kind), tensor in self._objects.items():
            if mask >> kind & 1 and tensor.device == self._device:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory, device="cpu")
                self._objects[chunk, kind] = host.copy_(tensor, non_blocking=non_blocking)

    def bring_back(self, *, non_blocking: bool) -> None:
        self.away = 0
        for key, tensor in self._objects.items():
            self._objects[key] = tensor.to(self._device, non_blocking=non_blocking)

    def trim(self) -> None:
        """Give the memory of what has died back to the system."""
        for pool in (self._pool, *self._pools.values()):
            pool.trim()

    def mark(self, trace_id: int) -> None:
        """Nothing is prefetched here."""

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        """Nothing is prefetched here."""

    def stats(self) -> dict[str, float]:
        return {"resident_bytes": float(sum(t.numel() * t.element_size() for t in self._objects.values()))}

    def close(self) -> None:
        self._objects.clear()
        self._elsewhere.clear()
        self._layouts.clear()
        self.trim()

"""A store of shards in memory that forgives nothing.

What is not asked for is not there, what is not said to be dirty is lost, what is only written is NaN before it is, and
every lease is counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.tiers.base import ChunkLayout, Lease, ShardStore
from io_daemon.shared.protocol import Access, kinds_of


def _spoiled(values: torch.Tensor) -> torch.Tensor:
    return values.fill_(torch.nan if values.is_floating_point() else -1)


class StrictLease(Lease):
    def __init__(self, store: StrictStore, chunk: int, read: int, write: int) -> None:
        self.chunk, self.read, self.write = chunk, read, write
        self.waited = self.released = False
        self._store = store
        self._whole: dict[int, torch.Tensor] = {}

    def wait(self) -> None:
        self._store.before_wait(self)
        if self.released:
            raise AssertionError("waited for after its release")
        self.waited = True
        for kind in kinds_of(self.read | self.write):
            held = self._store.object(self.chunk, kind).clone()
            self._whole[kind] = held if self.read >> kind & 1 else _spoiled(held)

    def pieces(self, kind: int) -> list[torch.Tensor]:
        if not self.waited or self.released:
            raise AssertionError("its bytes are not there")
        return list(torch.split(self._whole[kind], self._store.piece_numel))

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        if self.released:
            raise AssertionError("released twice")
        if dirty & ~self.write:
            raise AssertionError("dirty, and not asked for to be written")
        self.released = True
        self._store.num_held -= 1
        self._store.log.append(("release", self.chunk, dirty, dead))
        for kind in kinds_of(dirty):
            self._store.object(self.chunk, kind).copy_(self._whole[kind])
        for kind in kinds_of(dead):
            self._store.object(self.chunk, kind).zero_()
        for whole in self._whole.values():
            _spoiled(whole)


class StrictStore(ShardStore):
    """Objects come in pieces of ``piece_numel``. ``log``: acquisitions (chunk, read, write), releases (chunk, dirty,
    dead). ``before_wait`` may raise."""

    def __init__(self, piece_numel: int = 1 << 13) -> None:
        self.piece_numel = piece_numel
        self.log: list[tuple[str, int, int, int]] = []
        self.num_held = self.num_held_max = 0
        self.before_wait: Callable[[StrictLease], None] = lambda _lease: None
        self.layouts: list[ChunkLayout] = []
        self.unregistered: list[range] = []
        self.closed = False
        self._objects: dict[tuple[int, int], torch.Tensor] = {}

    def object(self, chunk: int, kind: int) -> torch.Tensor:
        """What the store keeps; zeros at first."""
        layout = self.layouts[chunk]
        return self._objects.setdefault((chunk, kind), torch.zeros(layout.numel_of(kind), dtype=layout.dtypes[kind]))

    def acquired(self) -> list[tuple[int, int, int]]:
        return [entry[1:] for entry in self.log if entry[0] == "acquire"]

    def released(self) -> list[tuple[int, int, int]]:
        return [entry[1:] for entry in self.log if entry[0] == "release"]

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        first = len(self.layouts)
        self.layouts += layouts
        return range(first, len(self.layouts))

    def unregister(self, chunks: range) -> None:
        self.unregistered.append(chunks)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> StrictLease:
        self.log.append(("acquire", chunk, read, write))
        self.num_held += 1
        self.num_held_max = max(self.num_held_max, self.num_held)
        return StrictLease(self, chunk, read, write)

    def mark(self, trace_id: int) -> None:
        """Nothing is prefetched here."""

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        """Nothing is prefetched here."""

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.closed = True

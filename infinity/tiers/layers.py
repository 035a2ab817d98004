"""Stores made of stores: one that splits kinds over two tiers, one that records a trace, one that poisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from infinity.plan.trace import AccessRecorder
from infinity.tiers.base import ChunkLayout, Lease, ShardStore, StoreLayer
from infinity.tiers.pool import POISON
from io_daemon.shared.protocol import Access, kinds_of


class SplitLease(Lease):
    def __init__(self, chunk: int, parts: Sequence[tuple[int, Lease]]) -> None:
        self.chunk = chunk
        self._parts = parts

    def wait(self) -> None:
        for _, lease in self._parts:
            lease.wait()

    def pieces(self, kind: int) -> list[torch.Tensor]:
        for mask, lease in self._parts:
            if mask >> kind & 1:
                return lease.pieces(kind)
        raise KeyError(kind)

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        for mask, lease in self._parts:
            lease.release(dirty=dirty & mask, dead=dead & mask)


class SplitStore(ShardStore):
    """Each chunk has some kinds on the device and the others in the daemon. Both stores number chunks alike, because
    every chunk is registered in both."""

    def __init__(self, device_store: ShardStore, host_store: ShardStore, device_masks: Sequence[int]) -> None:
        """``device_masks``: by chunk, the kinds that are on the device."""
        self._device_store, self._host_store = device_store, host_store
        self._stores = (device_store, host_store)
        self._device_masks = device_masks
        self._num_registered = 0

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        parts: tuple[list[ChunkLayout], list[ChunkLayout]] = ([], [])
        for chunk, layout in enumerate(layouts, start=self._num_registered):
            for part, (mask, _) in zip(parts, self._split(chunk), strict=True):
                part.append(replace(layout, dtypes={k: d for k, d in layout.dtypes.items() if mask >> k & 1}))
        ranges = [store.register(part) for store, part in zip(self._stores, parts, strict=True)]
        self._num_registered += len(layouts)
        if ranges[0] != ranges[1]:
            raise RuntimeError(f"the two stores number chunks differently: {ranges[0]} and {ranges[1]}")
        return ranges[0]

    def unregister(self, chunks: range) -> None:
        for store in self._stores:
            store.unregister(chunks)

    def _split(self, chunk: int) -> tuple[tuple[int, ShardStore], tuple[int, ShardStore]]:
        """(kinds, where they are)."""
        mask = self._device_masks[chunk]
        return (mask, self._device_store), (~mask & 0xFF, self._host_store)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        parts = [
            (mask, store.acquire(chunk, read=read & mask, write=write & mask))
            for mask, store in self._split(chunk)
            if (read | write) & mask
        ]
        return parts[0][1] if len(parts) == 1 else SplitLease(chunk, parts)

    def mark(self, trace_id: int) -> None:
        for store in self._stores:
            store.mark(trace_id)

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        for i, store in enumerate(self._stores):
            masked = ((a, self._split(a.chunk)[i][0]) for a in accesses)
            seen = [Access(a.chunk, a.read_mask & mask, a.write_mask & mask, a.dead_mask & mask) for a, mask in masked]
            if own := [a for a in seen if a.read_mask | a.write_mask]:
                store.set_trace(trace_id, own)

    def stats(self) -> dict[str, float]:
        return {key: value for store in self._stores for key, value in store.stats().items()}

    def close(self) -> None:
        for store in self._stores:
            store.close()


class TracedLease(Lease):
    def __init__(self, inner: Lease, recorder: AccessRecorder, position: int) -> None:
        self.chunk = inner.chunk
        self._inner, self._recorder, self._position = inner, recorder, position

    def wait(self) -> None:
        self._inner.wait()

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._inner.pieces(kind)

    def round_masters(self) -> None:
        self._inner.round_masters()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        self._recorder.released(self._position, dead)
        self._inner.release(dirty=dirty, dead=dead)


class TracedStore(StoreLayer):
    """Records the first complete pass of each trace id and hands it to the store below; the second as well where it is
    another, since the first knew less of what was to come."""

    def __init__(self, inner: ShardStore) -> None:
        super().__init__(inner)
        self._recorder: AccessRecorder | None = None
        self._trace_id = -1
        self._known: set[int] = set()
        self._recorded: dict[int, Sequence[Access]] = {}
        """The first pass of each trace whose second is still to come."""

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        lease = super().acquire(chunk, read=read, write=write)
        if self._recorder is None:
            return lease
        return TracedLease(lease, self._recorder, self._recorder.acquired(chunk, read, write))

    def mark(self, trace_id: int) -> None:
        """A pass begins: from here on accesses are recorded, unless the trace is known."""
        self._trace_id = trace_id
        self._recorder = None if trace_id in self._known else AccessRecorder()
        super().mark(trace_id)

    def complete(self) -> None:
        """The pass is complete: what was recorded becomes the trace. Every lease of it was released."""
        if self._recorder is not None:
            self._note(self._trace_id, self._recorder.accesses)
            self._recorder = None

    def _note(self, trace_id: int, accesses: Sequence[Access]) -> None:
        first = self._recorded.pop(trace_id, None)
        if accesses and accesses != first:  # an evaluation of weights that are all here asks for nothing
            self._inner.set_trace(trace_id, accesses)
        if first is None:
            self._recorded[trace_id] = accesses
        else:
            self._known.add(trace_id)

    def abandon(self) -> None:
        """The pass failed: what was recorded is worth nothing."""
        self._recorder = None

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self._known.add(trace_id)
        super().set_trace(trace_id, accesses)


class PoisonLease(Lease):
    """Hands out private copies: what is undefined reads as NaN, and so does everything after the release."""

    def __init__(self, inner: Lease, read: int, write: int) -> None:
        self.chunk = inner.chunk
        self._inner, self._read, self._write = inner, read, write
        self._copies: dict[int, list[torch.Tensor]] = {}

    def wait(self) -> None:
        if self._copies:
            return
        self._inner.wait()
        for kind in kinds_of(self._read | self._write):
            pieces = self._inner.pieces(kind)
            readable = self._read >> kind & 1
            self._copies[kind] = [piece.clone() if readable else _poison(torch.empty_like(piece)) for piece in pieces]

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._copies[kind]

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        if dirty & ~self._write:
            raise RuntimeError(f"chunk {self.chunk}: kinds {dirty:#x} are dirty, but only {self._write:#x} were leased")
        for kind in kinds_of(dirty):
            for target, copy in zip(self._inner.pieces(kind), self._copies[kind], strict=True):
                target.copy_(copy)
        for copies in self._copies.values():
            for copy in copies:
                _poison(copy)
        self._inner.release(dirty=dirty, dead=dead)


def _poison(values: torch.Tensor) -> torch.Tensor:
    """By bytes: integers have no NaN to be filled with."""
    values.view(torch.uint8).fill_(POISON)
    return values


class PoisonStore(TracedStore):
    """The debug mode: a view used after its release, or read before it was written, yields NaN and is seen."""

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        return PoisonLease(super().acquire(chunk, read=read, write=write), read, write)

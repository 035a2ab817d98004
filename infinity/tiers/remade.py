"""A store whose 16-bit weights may be given up where it has their masters: who reads such weights has them made anew.

An update writes weights and never reads them, so that contents which nobody reads before it need neither frames nor a
write to the disk. Whether somebody will read them is foreseen, not known: a wrong guess costs the read of a master, and
no bit, since weights are their masters, rounded.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from infinity.tiers.base import Lease, ShardStore, StoreLayer, spans
from io_daemon.shared.protocol import ObjectKind

WEIGHT, MASTER = ObjectKind.WEIGHT.mask, ObjectKind.MASTER.mask


class RemadeStore(StoreLayer):
    """``remade``: chunks whose weights are their masters, rounded, whenever no lease that writes either is held. Who
    releases weights of such a chunk as dead gives them up, unless another lease on them is out."""

    def __init__(self, inner: ShardStore, remade: Container[int]) -> None:
        super().__init__(inner)
        self._remade = remade
        self._given_up: set[int] = set()
        self._num_out: dict[int, int] = {}
        """Leases on a chunk's weights that are not released yet."""

    def unregister(self, chunks: range) -> None:
        super().unregister(chunks)
        self._given_up.difference_update(chunks)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        if not (read | write) & WEIGHT or chunk not in self._remade:
            return super().acquire(chunk, read=read, write=write)
        makes = bool(read & WEIGHT) and chunk in self._given_up
        if makes:
            read, write = read & ~WEIGHT | MASTER, write | WEIGHT
        lease = super().acquire(chunk, read=read, write=write)
        self._num_out[chunk] = self._num_out.get(chunk, 0) + 1
        return RemadeLease(self, lease, makes=makes)

    def note_released(self, chunk: int, *, dirty: int, dead: int) -> int:
        """A lease on the chunk's weights is about to end. What is dead of what it says is."""
        self._num_out[chunk] -= 1
        if dead & WEIGHT and self._num_out[chunk]:
            dead &= ~WEIGHT
        if dead & WEIGHT:
            self._given_up.add(chunk)
        elif dirty & WEIGHT:
            self._given_up.discard(chunk)
        return dead


class RemadeLease(Lease):
    """``makes``: the weights are made anew once the lease is granted."""

    def __init__(self, store: RemadeStore, inner: Lease, *, makes: bool) -> None:
        self.chunk = inner.chunk
        self._store, self._inner, self._makes = store, inner, makes
        self._made = 0

    def wait(self) -> None:
        self._inner.wait()
        if self._makes:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._round()
            self._makes, self._made = False, WEIGHT

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._inner.pieces(kind)

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        dirty |= self._made
        self._inner.release(dirty=dirty, dead=self._store.note_released(self.chunk, dirty=dirty, dead=dead))

    def _round(self) -> None:
        weights, start = self._inner.pieces(ObjectKind.WEIGHT), 0
        for master in self._inner.pieces(ObjectKind.MASTER):
            for at, weight in spans(weights, start, master.numel()):
                weight.copy_(master[at : at + weight.numel()])
            start += master.numel()

"""A store whose 16-bit weights may be given up where it has their masters: who reads such weights has them made anew.

An update writes weights and never reads them, so that contents which nobody reads before it need neither frames nor a
write to the disk. Whether somebody will read them is foreseen, not known: a wrong guess costs the read of a master, and
no bit, since weights are their masters, rounded.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from infinity.tiers.base import Lease, ShardStore, StoreLayer
from infinity.tiers.inference import outside_inference
from io_daemon.shared.protocol import Access, ObjectKind

WEIGHT, MASTER = ObjectKind.WEIGHT.mask, ObjectKind.MASTER.mask


class RemadeStore(StoreLayer):
    """``remade``: chunks whose weights are their masters, rounded, whenever no lease that writes either is held. Who
    releases weights of such a chunk as dead gives them up, unless another lease on them is out; and so does who writes
    masters alone, which no lease on weights may be out beside."""

    def __init__(self, inner: ShardStore, remade: Container[int]) -> None:
        super().__init__(inner)
        self._remade = remade
        self._given_up: set[int] = set()
        self._num_out: dict[int, int] = {}
        """Leases on a chunk's weights that are not released yet."""

    def is_given_up(self, chunk: int) -> bool:
        """Whether who reads the chunk's weights next has them made."""
        return chunk in self._given_up

    def unregister(self, chunks: range) -> None:
        super().unregister(chunks)
        self._given_up.difference_update(chunks)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        if not (read & WEIGHT | write & (WEIGHT | MASTER)) or chunk not in self._remade:
            return super().acquire(chunk, read=read, write=write)
        buries = makes = False
        if not (read | write) & WEIGHT:
            if self._num_out.get(chunk):
                raise RuntimeError(f"masters of chunk {chunk} are to be written without the weights, which are leased")
            buries = chunk not in self._given_up
            self._given_up.add(chunk)  # from here on: who asks next waits for these masters
            if not buries:
                return super().acquire(chunk, read=read, write=write)
            write |= WEIGHT
        elif read & WEIGHT and chunk in self._given_up:
            makes = True
            read, write = _making(read, write)
        lease = super().acquire(chunk, read=read, write=write)
        self._num_out[chunk] = self._num_out.get(chunk, 0) + 1
        return RemadeLease(self, lease, makes=makes, buries=buries)

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        super().set_trace(trace_id, remade_accesses(accesses, self._remade))

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


def remade_accesses(accesses: Sequence[Access], remade: Container[int]) -> list[Access]:
    """What the store below is asked for in a pass that repeats: of a whole pass, what above it was."""
    given_up: set[int] = set()
    for _ in range(2):  # the first time shows what is given up when a pass begins
        below = []
        for chunk, read, write, dead in accesses:
            if chunk in remade and (read | write) & WEIGHT:
                if read & WEIGHT and chunk in given_up:
                    read, write = _making(read, write)
                if dead & WEIGHT:
                    given_up.add(chunk)
                elif write & WEIGHT:
                    given_up.discard(chunk)
            elif chunk in remade and write & MASTER and chunk not in given_up:
                write, dead = write | WEIGHT, dead | WEIGHT
                given_up.add(chunk)
            below.append(Access(chunk, read, write, dead))
    return below


def _making(read: int, write: int) -> tuple[int, int]:
    """The kinds that a lease reads and writes which makes the weights that it is to read."""
    return read & ~WEIGHT | MASTER, write | WEIGHT


class RemadeLease(Lease):
    """``makes``: the weights are made anew once the lease is granted. ``buries``: they are dead when it ends."""

    def __init__(self, store: RemadeStore, inner: Lease, *, makes: bool, buries: bool) -> None:
        self.chunk = inner.chunk
        self._store, self._inner, self._makes = store, inner, makes
        self._made, self._buried = 0, WEIGHT if buries else 0

    def wait(self) -> None:
        self._inner.wait()
        if self._makes:
            with outside_inference(), torch.no_grad():
                self._inner.round_masters()
            self._makes, self._made = False, WEIGHT

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._inner.pieces(kind)

    def round_masters(self) -> None:
        self._inner.round_masters()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        dirty |= self._made
        dead |= self._buried
        self._inner.release(dirty=dirty, dead=self._store.note_released(self.chunk, dirty=dirty, dead=dead))

"""The store of shards: where this rank's chunks live between uses.

A *chunk* is C elements of one param group's shard; for each object kind (weight, gradient, master
weight, moments) the store keeps that chunk's bytes on some tier. Who calls what, in order:

1. ``register(layouts)`` once (or a few times: staging under ``Init``), before the first step. Space is
   reserved here; what cannot fit raises ``BudgetError`` or ``SwapSpaceError`` now, not later.
2. ``acquire(chunk, read=…, write=…)`` issues a lease and returns at once.
3. ``lease.wait()`` blocks until every kind is resident, then ``lease.pieces(kind)`` gives typed tensor views
   of the chunk's elements, in order, cut at frame boundaries. Kinds acquired for write only hold
   undefined contents; a kind never written reads as zero.
4. ``lease.release(dirty=…, dead=…)``. After it the views must not be touched: under the debug mode a store
   poisons what it may.
5. ``mark(trace_id)`` when a pass begins; ``set_trace`` once the order of a pass is known.

All masks are ``1 << ObjectKind``. Issue and wait are always separate; leases are granted in the order of issue
whenever frames are short, so a caller may hold one lease and have later ones queued without deadlock, as long as
it can finish with what it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Protocol, TypeVar

import torch

from infinity.plan.memory_plan import MemoryPlan
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.protocol import Access, ObjectKind

Item = TypeVar("Item")


def is_beside(device: torch.device) -> bool:
    """Whether the device has memory and a timeline of its own beside the CPU's."""
    return device.type not in ("cpu", "meta")


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Shape of one chunk: ``numel`` elements, and the dtype of each kind it has (by ObjectKind)."""

    numel: int
    dtypes: dict[int, torch.dtype]
    numels: dict[int, int] = field(default_factory=dict)
    """The elements of kinds that have another number of them."""

    def numel_of(self, kind: int) -> int:
        return self.numels.get(kind, self.numel)


class Lease(Protocol):
    chunk: int

    def wait(self) -> None:
        """Block until granted. Raises the store's typed error, never waits for ever."""

    def pieces(self, kind: int) -> list[torch.Tensor]:
        """1-D views in element order; sum of numel equals the chunk's numel."""

    def round_masters(self) -> None:
        """Write the 16-bit weights that the masters round to, through a granted lease that writes both: of the whole
        chunk, whatever of it was stepped. Who writes again asks for ``pieces`` again, of the masters before all."""
        weights, start = self.pieces(ObjectKind.WEIGHT), 0
        for master in self.pieces(ObjectKind.MASTER):
            for at, weight in spans(weights, start, master.numel()):
                weight.copy_(master[at : at + weight.numel()])
            start += master.numel()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        """Give back. ``dirty``: kinds written; ``dead``: kinds whose contents nobody needs again.
        A lease that was never waited for may be released too: it is abandoned."""


class ShardStore(Protocol):
    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        """Chunk ids of the new chunks, consecutive."""

    def unregister(self, chunks: range) -> None: ...

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease: ...

    def mark(self, trace_id: int) -> None: ...

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class StoreLayer(ShardStore):
    """A store above another one, which does whatever the layer does not do itself."""

    def __init__(self, inner: ShardStore) -> None:
        self._inner = inner

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        return self._inner.register(layouts)

    def unregister(self, chunks: range) -> None:
        self._inner.unregister(chunks)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        return self._inner.acquire(chunk, read=read, write=write)

    def mark(self, trace_id: int) -> None:
        self._inner.mark(trace_id)

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self._inner.set_trace(trace_id, accesses)

    def stats(self) -> dict[str, float]:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class HostStore(ShardStore, Protocol):
    """What lies outside the device: the daemon's, or what stands in for it."""

    def tenant_stats(self) -> TenantStats | None:
        """None where there is no daemon."""

    def relieve_by(self, relieve: Callable[[], None]) -> None:
        """``relieve`` gives back leases that are held for no more than the end of a copy: it is called before anybody
        blocks, who may wait for their frames."""

    def reserve(self) -> None:
        """The spare space that the store was opened with is free now: what was registered has its own from here on.
        Raises SwapSpaceError."""


class HostTier(Protocol):
    """Where host stores come from."""

    job: str

    def open(
        self, plan: MemoryPlan, *, job: str, pinned_mask: int, device: torch.device, spare_bytes: int = 0
    ) -> HostStore:
        """A store over an arena of ``plan``; the tier ``cpu`` holds the kinds of ``pinned_mask``.

        Args:
            spare_bytes: disk space that will be free beside what is by the time of ``reserve``.
        """

    def close(self) -> None:
        """No store of it is open any more."""


@contextmanager
def leased(store: ShardStore, chunk: int, *, read: int = 0, write: int = 0) -> Iterator[Lease]:
    """A lease for the length of a block, which begins once the lease is granted.

    What is to be written counts as written when the block ends, and as not written where anything raises: the lease
    is given back either way, since one that is kept holds its frames from everybody for ever."""
    lease = store.acquire(chunk, read=read, write=write)
    try:
        lease.wait()
        yield lease
    except BaseException:
        lease.release()
        raise
    lease.release(dirty=write)


def stream(
    leases: Iterator[tuple[Lease, Item]],
    use: Callable[[Lease, Item], tuple[int, int]],
    *,
    num_held_max: int,
    num_at_once: int = 1,
) -> None:
    """Use leases in the order in which ``leases`` issues them, and release each before more are issued.

    Where something raises, all that were not used are released with nothing written.

    Args:
        leases: issues a lease each time it is asked, with what ``use`` needs beside it.
        use: called with a granted lease; gives the masks of what it has made dirty and dead.
        num_held_max: leases at a time: the one at work, and those ahead.
        num_at_once: so many are released and issued one right behind another, which wakes who grants them once. With
            more than one, no two of ``leases`` may ask for the same chunk.
    """
    held: deque[tuple[Lease, Item]] = deque()
    done: list[tuple[Lease, tuple[int, int]]] = []
    try:
        while True:
            if len(done) == num_at_once or not held:
                _give_back(done)
                held.extend(islice(leases, num_held_max - len(held)))
            if not held:
                return
            lease, item = held[0]
            lease.wait()
            done.append((lease, use(lease, item)))
            held.popleft()
    finally:
        _give_back(done)
        for lease, _ in held:
            lease.release()


def _give_back(done: list[tuple[Lease, tuple[int, int]]]) -> None:
    """Release those that were used; the list is empty then, whatever happens."""
    used, done[:] = list(done), []
    for lease, (dirty, dead) in used:
        lease.release(dirty=dirty, dead=dead)


class ManyPieces(list[torch.Tensor]):
    """Pieces, one or more a parameter, that know where each begins: who goes through thousands of parameters, and looks
    for each from the first piece on, takes their square of looks."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        super().__init__(pieces)
        self.starts = list(accumulate((piece.numel() for piece in self), initial=0))


def spans(pieces: Sequence[torch.Tensor], offset: int, numel: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The parts of ``pieces`` that hold elements [offset, offset + numel), as (elements before it, view)."""
    first = 0
    if isinstance(pieces, ManyPieces):
        first = max(0, bisect_right(pieces.starts, offset) - 1)
        offset -= pieces.starts[first]
    done = 0
    for index in range(first, len(pieces)):
        if done == numel:
            return
        piece = pieces[index]
        if offset < piece.numel():
            taken = min(piece.numel() - offset, numel - done)
            yield done, piece[offset : offset + taken]
            done += taken
            offset = 0
        else:
            offset -= piece.numel()
    if done != numel:
        raise IndexError(f"{numel - done} of {numel} elements lie beyond the pieces")

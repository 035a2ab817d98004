"""A store whose chunks may have work due: who needs such a chunk next has it done, through one lease with their own.

So work that concerns a chunk by itself, as its share of an update does, needs no lease and no transfer beside those of
the chunk's next use, and nobody can see a chunk without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from infinity.errors import EngineStateError
from infinity.tiers.base import Lease, StoreLayer, stream
from infinity.tiers.layers import TracedStore
from infinity.tiers.snapshot import Snapshot, SnapshotStore
from infinity.tiers.under_way import UnderWay

DUE_TRACES: Final = 2
"""A pass that begins with work due, or after chunks were ahead of others, has an id greater by this: it asks for more,
or in another order, than the first of all, which began with nothing and gathered nothing ahead."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is due of one chunk. Masks are ``1 << ObjectKind``."""

    read: int
    write: int
    """Kinds that ``run`` writes."""
    dead: int
    """Kinds that nobody needs once it is done."""
    run: Callable[[Lease], None]
    """Does it, through a granted lease."""
    note: str
    """What an error says that comes before it could be done."""


class DueStore(StoreLayer):
    """``num_ahead``: leases that ``settle`` issues beside the one at work. ``snapshots``: what keeps what these
    chunks were, somewhere below ``inner``. ``under_way``: leases on them that copies hold."""

    def __init__(
        self, inner: TracedStore, snapshots: SnapshotStore, *, num_ahead: int, under_way: UnderWay | None = None
    ) -> None:
        super().__init__(inner)
        self._traced, self._snapshots, self._num_ahead = inner, snapshots, num_ahead
        self._under_way = under_way if under_way is not None else UnderWay()
        self._due: dict[int, Work] = {}
        self._leases: dict[int, DueLease] = {}
        """By chunk, the lease that was acquired to do what is due and was not waited for yet."""
        self._barred: dict[int, str] = {}
        """By chunk, whose it is."""
        self._was_barred = False
        """Whether some pass has barred chunks."""
        self.is_torn = False
        """What was due of a chunk was begun and is not noted as done: done again, it would be done twice."""

    def bar(self, chunks: Iterable[int], whose: str) -> None:
        """Nobody may have these chunks, which are ahead of all others or about to be, until ``lift_bar``."""
        self._barred.update(dict.fromkeys(chunks, whose))

    @contextmanager
    def beyond_bar(self, chunks: Sequence[int], whose: str) -> Iterator[None]:
        """Within, who puts these chunks ahead may have them; after it nobody may."""
        for chunk in chunks:
            self._barred.pop(chunk, None)
        try:
            yield
        finally:
            self.bar(chunks, whose)

    def lift_bar(self) -> None:
        """Every chunk is where the others are."""
        self._was_barred |= bool(self._barred)
        self._barred.clear()

    def is_due(self, chunk: int) -> bool:
        return chunk in self._due

    def postpone(self, chunk: int, work: Work) -> None:
        """The work is due until somebody acquires the chunk and waits for it; nothing else may be due of it."""
        self._due[chunk] = work

    def forget_due(self) -> None:
        """Nothing is due any more, and nothing is done."""
        self._due.clear()

    def settle(self, chunks: Iterable[int] | None = None) -> None:
        """Do what is due, of ``chunks`` or of all in the order in which it was postponed.

        Where it raises, what was not done stays due.
        """
        self._under_way.settle()  # of these the store below has not everything yet
        for held in list(self._leases.values()):
            held.do_now()
        waiting = list(self._due) if chunks is None else [chunk for chunk in chunks if chunk in self._due]
        issued = ((self.acquire(chunk, read=self._due[chunk].read), None) for chunk in waiting)
        stream(issued, lambda _lease, _: (0, 0), num_held_max=1 + self._num_ahead)  # a granted one has done it

    def snapshot(self, masks: Mapping[int, int], when_made: Callable[[], None]) -> Snapshot:
        """Keep these kinds (a mask) of these chunks as they are, after what is due of them; see ``Snapshot``."""
        self._under_way.settle()
        return self._snapshots.take(masks, masks.keys() & self._due.keys(), when_made)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        self._under_way.settle_chunk(chunk)
        if self.is_torn:
            raise EngineStateError(
                "an update of weights was interrupted, and they belong to no step: call destroy(), build the model "
                "anew, and go on from a checkpoint with engine.load_checkpoint()"
            )
        if chunk in self._barred:
            raise EngineStateError(
                f"{self._barred[chunk]} is updated inside backward, and others are not yet: call step() before it is "
                "needed again; if backward itself needs it, as re-entrant checkpoints do, write false for "
                '"io_daemon.update_in_backward"'
            )
        snapshot = self._snapshots.snapshot
        if snapshot is not None and snapshot.is_unmade(chunk, write):
            self.settle([chunk])
        if chunk not in self._due:
            return super().acquire(chunk, read=read, write=write)
        earlier = self._leases.get(chunk)
        if earlier is not None:
            earlier.do_now()
            return super().acquire(chunk, read=read, write=write)
        lease = DueLease(self, chunk, self._due[chunk], read, write)
        self._leases[chunk] = lease
        return lease

    def issue(self, chunk: int, read: int, write: int) -> Lease:
        """A lease of the store below, whatever is due."""
        return super().acquire(chunk, read=read, write=write)

    def note_begun(self) -> None:
        """What is due of a chunk is being done."""
        self.is_torn = True

    def note_done(self, chunk: int) -> None:
        """What was due of the chunk is done."""
        del self._due[chunk], self._leases[chunk]
        self.is_torn = False

    def note_released(self, chunk: int) -> None:
        """What was due of the chunk was done, and is there for others."""
        if self._snapshots.snapshot is not None:
            self._snapshots.snapshot.made(chunk)

    def note_abandoned(self, chunk: int) -> None:
        """The lease that was to do it was given up."""
        del self._leases[chunk]

    def mark(self, trace_id: int) -> None:
        self._under_way.settle()
        super().mark(trace_id + DUE_TRACES if self._due or self._was_barred else trace_id)

    def complete(self) -> None:
        self._under_way.settle()
        self._traced.complete()

    def abandon(self) -> None:
        self._under_way.end_all()
        self._traced.abandon()

    def unregister(self, chunks: range) -> None:
        self._under_way.settle()
        super().unregister(chunks)

    def close(self) -> None:
        self._due.clear()
        self._under_way.forget()
        super().close()


class DueLease(Lease):
    """A lease on a chunk that has work due: ``wait`` does it."""

    def __init__(self, store: DueStore, chunk: int, work: Work, read: int, write: int) -> None:
        self.chunk = chunk
        self._store, self._read, self._write = store, read, write
        self._work: Work | None = work
        self._dirty = self._dead = 0
        self._inner = store.issue(chunk, work.read | read & ~work.write, work.write | write)

    def wait(self) -> None:
        if self._work is None:
            self._inner.wait()
            return
        try:
            self._inner.wait()
        except Exception as error:
            error.add_note(self._work.note)
            raise
        self._do(self._work)

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._inner.pieces(kind)

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        if self._work is not None:
            self._store.note_abandoned(self.chunk)
        self._inner.release(dirty=self._dirty | dirty, dead=self._dead & ~dirty | dead)
        if self._work is None:
            self._store.note_released(self.chunk)

    def do_now(self) -> None:
        """Somebody else needs the chunk while this lease is held ahead: from here on it is one for its own kinds."""
        self.wait()
        self._inner.release(dirty=self._dirty, dead=self._dead)
        self._dirty = self._dead = 0
        self._store.note_released(self.chunk)
        self._inner = self._store.issue(self.chunk, self._read, self._write)

    def _do(self, work: Work) -> None:
        self._store.note_begun()
        work.run(self._inner)
        self._work = None
        self._dirty, self._dead = work.write, work.dead
        self._store.note_done(self.chunk)

"""Chunks as they are at one moment, read by another thread while training goes on: copy on write.

A chunk that is about to change is leased for its reader first: leases on one object are granted in the order of issue,
so that whoever writes it next waits until it was read, and nobody waits for what does not change. No byte is copied for
it, and its reader holds the frames of one chunk at a time beside those that wait to be changed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from typing import Final

import torch

from infinity.errors import EngineStateError
from infinity.tiers.base import Lease, ShardStore, StoreLayer
from io_daemon.shared.patience import Patience

READ_TIMEOUT_S: Final = 120.0
"""A chunk's reader has so long before its writer goes on without it."""


class Snapshot:
    """``waited_s``: seconds that writers have waited for its reader."""

    def __init__(
        self,
        store: ShardStore,
        masks: Mapping[int, int],
        unmade: Set[int],
        *,
        when_made: Callable[[], None],
    ) -> None:
        """
        Args:
            masks: chunk -> the kinds of which it keeps the contents.
            unmade: chunks that have the contents yet to come: ``made`` says when.
            when_made: called when all have them.
        """
        self._store, self._masks, self._when_made = store, masks, when_made
        self._changed = threading.Condition()
        self._unread = set(masks)
        self._unmade = set(unmade)
        self._free = dict.fromkeys(chunk for chunk in reversed(list(masks)) if chunk not in self._unmade)
        """Chunks that are made, and not leased. The last one is read next: what its update has just left in frames, and
        once all are made, what will change first."""
        self._leased: deque[tuple[int, Lease]] = deque()
        """Leases on chunks that are about to change."""
        self._reason = ""
        self.waited_s = 0.0
        if not self._unmade:
            when_made()

    # The reader's thread

    def read_all(self, use: Callable[[Lease], None]) -> None:
        """Call ``use`` with a granted lease on every chunk. Blocks until all were made and read.

        Raises EngineStateError if the snapshot was ended meanwhile.
        """
        while (found := self._next()) is not None:
            chunk, lease = found
            try:
                lease.wait()
                use(lease)
            finally:
                lease.release()
                with self._changed:
                    self._unread.discard(chunk)
                    self._changed.notify_all()

    def _next(self) -> tuple[int, Lease] | None:
        with self._changed:
            while not self._reason:
                if self._leased:
                    return self._leased.popleft()
                if self._free:
                    chunk, _ = self._free.popitem()
                    return chunk, self._store.acquire(chunk, read=self._masks[chunk])
                if not self._unmade:
                    return None
                self._changed.wait()
            raise EngineStateError(self._reason)

    # Those who train

    def made(self, chunk: int) -> None:
        """The chunk has the contents that are to be kept, and nobody's lease on it is held."""
        with self._changed:
            if chunk not in self._unmade:
                return
            self._unmade.discard(chunk)
            self._free[chunk] = None
            if not self._unmade:
                self._free = dict.fromkeys(sorted(self._free, reverse=True))
                self._when_made()
            self._changed.notify_all()

    def is_unmade(self, chunk: int, write: int) -> bool:
        """Whether who writes these kinds would change contents that are to be kept, before they are there."""
        return chunk in self._unmade and bool(write & self._masks[chunk])

    def keeps(self, chunk: int, write: int) -> bool:
        """Somebody is about to ask for a lease that writes these kinds: whether it must ``wait_read`` first."""
        if not write & self._masks.get(chunk, 0):
            return False
        with self._changed:
            if chunk in self._unmade or chunk not in self._unread:
                return False
            if chunk in self._free:
                del self._free[chunk]
                self._leased.append((chunk, self._store.acquire(chunk, read=self._masks[chunk])))
                self._changed.notify_all()
            return True

    def wait_read(self, chunk: int) -> None:
        """Block until the chunk was read. Where that takes too long the snapshot ends, and its reader is told."""
        begun, patience = time.monotonic(), Patience(READ_TIMEOUT_S)
        with self._changed:
            while not (read := chunk not in self._unread) and (slice_s := patience.slice_s()):
                self._changed.wait(slice_s)
        self.waited_s += time.monotonic() - begun
        if not read:
            self.end(f"chunk {chunk} was not written within {READ_TIMEOUT_S:.0f} s, and training went on without it")

    def end(self, reason: str) -> None:
        """Nothing is kept any more. Idempotent."""
        with self._changed:
            self._reason = self._reason or reason
            self._unread.clear()
            self._unmade.clear()
            self._free.clear()
            while self._leased:
                self._leased.popleft()[1].release()
            self._changed.notify_all()


class _WriteLease(Lease):
    """A lease that changes a chunk: the snapshot's is granted before it."""

    def __init__(self, inner: Lease, snapshot: Snapshot, chunk: int, relieve: Callable[[], None]) -> None:
        self.chunk = chunk
        self._inner, self._snapshot, self._relieve = inner, snapshot, relieve

    def wait(self) -> None:
        self._relieve()
        self._snapshot.wait_read(self.chunk)
        self._inner.wait()

    def pieces(self, kind: int) -> list[torch.Tensor]:
        return self._inner.pieces(kind)

    def round_masters(self) -> None:
        self._inner.round_masters()

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        self._inner.release(dirty=dirty, dead=dead)


class SnapshotStore(StoreLayer):
    """A store of whose chunks there may be a snapshot. ``relieve``: as of ``HostStore.relieve_by``, since who reads the
    snapshot waits for frames, too."""

    def __init__(self, inner: ShardStore, relieve: Callable[[], None] = lambda: None) -> None:
        super().__init__(inner)
        self._relieve = relieve
        self.snapshot: Snapshot | None = None

    def take(self, masks: Mapping[int, int], unmade: Set[int], when_made: Callable[[], None]) -> Snapshot:
        """A snapshot in place of the one before, which was read. No lease that writes may be held."""
        self.snapshot = Snapshot(self._inner, masks, unmade, when_made=when_made)
        return self.snapshot

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        waits = self.snapshot is not None and self.snapshot.keeps(chunk, write)
        lease = super().acquire(chunk, read=read, write=write)
        return _WriteLease(lease, self.snapshot, chunk, self._relieve) if waits and self.snapshot is not None else lease

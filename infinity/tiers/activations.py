"""Tensors that wait for backward in the I/O daemon: written behind forward, read ahead of backward in reverse order.

They are a tenant of the daemon's like the shards, with an arena of their own out of the same budget, the same leases
and the same fair queue. What was kept first is needed last, so the daemon's own order of eviction is the right one, and
what is read ahead are the tensors kept just before the one that backward asks for.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import torch

from infinity.errors import EngineStateError
from infinity.tiers.base import ChunkLayout, HostStore, Lease, leased
from io_daemon.shared.protocol import PAGE_BYTES, ObjectKind, align_up

KIND = ObjectKind.STAGING


@dataclass(eq=False)
class _Record:
    """Where one tensor's bytes are."""

    number: int
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    """(chunk, first byte, bytes) of each."""
    leased: deque[Lease] = field(default_factory=deque)
    """Ahead of the read, of its first pieces."""


class Waiting:
    """A tensor's bytes that wait; they are given up when nobody refers to this any more."""

    def __init__(self, store: ActivationStore, record: _Record) -> None:
        self._store, self._record = store, record
        weakref.finalize(self, store.gone.append, record.number).atexit = False

    def read_into(self, values: torch.Tensor) -> None:
        """Copy the bytes to ``values``, uint8 [as many as were put]; as often as asked."""
        self._store.read(self._record, values)


class ActivationStore:
    def __init__(self, store: HostStore, *, frame_bytes: int, num_frames: int) -> None:
        """``store``: this has it alone, over an arena of ``num_frames`` frames of ``frame_bytes``."""
        self._store, self._frame_bytes = store, frame_bytes
        self._num_ahead_max = num_frames // 2
        """Frames leased ahead of their use; the others are for what is read and written now."""
        self._num_ahead = 0
        self._lock = threading.Lock()
        self._records: dict[int, _Record] = {}
        self._num_put = 0
        self._free: dict[int, list[int]] = {}
        """Bytes -> chunks that nobody uses, the last used at the end."""
        self.gone: deque[int] = deque()
        """Records that nobody waits for any more: appending takes no lock, so it can happen anywhere."""
        self.is_closed = False

    @property
    def num_waiting(self) -> int:
        """Tensors that wait now."""
        with self._lock:
            self._take_back()
            return len(self._records)

    def put(self, values: torch.Tensor) -> Waiting:
        """Take the bytes of ``values``, uint8 [any number]. Blocks until there are frames for them.

        Raises:
            SwapSpaceError: the disk has no space for them.
            EngineStateError: the store is closed.
        """
        with self._lock:
            self._check_open()
            self._take_back()
            record = _Record(self._num_put)
            self._num_put += 1
            self._records[record.number] = record
            try:
                self._find_chunks(record, values.numel())
                for chunk, first, numel in record.pieces:
                    with leased(self._store, chunk, write=KIND.mask) as lease:
                        lease.pieces(KIND)[0][:numel].copy_(values[first : first + numel])
            except BaseException:
                self.gone.append(record.number)
                raise
            return Waiting(self, record)

    def read(self, record: _Record, values: torch.Tensor) -> None:
        with self._lock:
            self._check_open()
            self._take_back()
            leases, record.leased = record.leased, deque()
            self._num_ahead -= len(leases)
            try:
                for chunk, first, numel in record.pieces:
                    if not leases:
                        leases.append(self._store.acquire(chunk, read=KIND.mask))
                    if first == 0:
                        self._lease_ahead(record.number)
                    leases[0].wait()
                    values[first : first + numel].copy_(leases[0].pieces(KIND)[0][:numel])
                    leases.popleft().release()
            finally:
                for lease in leases:
                    lease.release()

    def give_back(self) -> None:
        """Let tensors of other sizes have the space in the swap files that nobody waits in."""
        with self._lock:
            self._take_back()
            for chunks in self._free.values():
                for chunk in chunks:
                    self._store.unregister(range(chunk, chunk + 1))
            self._free.clear()

    def close(self) -> None:
        """Idempotent. What still waits is lost, and says so when it is read."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._records.clear()
                self._store.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise EngineStateError(
                "the inputs of checkpointed calls waited in the store of an engine that was destroyed: call backward "
                "before destroy()"
            )

    def _find_chunks(self, record: _Record, num_bytes: int) -> None:
        """Each is the record's at once, so that those found before there are no more go back with it."""
        for first in range(0, num_bytes, self._frame_bytes):
            numel = min(self._frame_bytes, num_bytes - first)
            size = align_up(numel, PAGE_BYTES)
            free = self._free.get(size)
            if free:
                chunk = free.pop()
            else:
                (chunk,) = self._store.register([ChunkLayout(numel=size, dtypes={KIND: torch.uint8})])
            record.pieces.append((chunk, first, numel))

    def _lease_ahead(self, number: int) -> None:
        """Lease what was kept just before."""
        for record in reversed(list(self._records.values())):
            if record.number >= number:
                continue
            for chunk, _, _ in record.pieces[len(record.leased) :]:
                if self._num_ahead >= self._num_ahead_max:
                    return
                record.leased.append(self._store.acquire(chunk, read=KIND.mask))
                self._num_ahead += 1

    def _take_back(self) -> None:
        while self.gone:
            record = self._records.pop(self.gone.popleft(), None)
            if record is None:
                continue
            self._num_ahead -= len(record.leased)
            for lease in record.leased:
                lease.release()
            for chunk, _, numel in record.pieces:
                self._free.setdefault(align_up(numel, PAGE_BYTES), []).append(chunk)

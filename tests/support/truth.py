"""What every object of one tenant must contain, and what its rank sees of it through leases."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from io_daemon.shared.protocol import KINDS_MAX, ChunkSpec, kinds_of
from io_daemon.shared.states import ObjectFlags
from tests.support.fake_disk import ZERO, Contents, FakeMemory, garbage


@dataclass(slots=True, eq=False)
class ModelLease:
    seq: int
    chunk: int
    read_mask: int
    write_mask: int
    granted: bool = False
    seen: dict[int, list[Contents]] = field(default_factory=dict)
    """Contents of the read-only kinds when it was granted: they must not change until it is released."""


class Truth:
    """Every granted lease must show the last dirty version of each kind that it reads, or zeros; a rank that may only
    write scribbles over what it is given."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.leases: dict[int, ModelLease] = {}
        self._versions: dict[int, int] = {}
        """Version that each object must show; 0: zeros."""
        self._next_version = itertools.count(1)

    def add(self, chunks: Iterable[int], specs: Sequence[ChunkSpec]) -> None:
        """They are registered, and born."""
        for chunk, spec in zip(chunks, specs, strict=True):
            for kind, size in enumerate(spec.object_bytes):
                if size:
                    self._versions[chunk * KINDS_MAX + kind] = 0

    def issue(self, seq: int, chunk: int, *, read: int, write: int) -> None:
        self.leases[seq] = ModelLease(seq, chunk, read, write)

    def grant(self, seq: int, born_mask: int) -> None:
        """AssertionError if the lease does not see what it must."""
        lease = self.leases[seq]
        if lease.granted:
            raise AssertionError(f"lease {seq} was granted twice")
        lease.granted = True
        for kind in kinds_of(lease.read_mask):
            object_id = lease.chunk * KINDS_MAX + kind
            version = self._versions[object_id]
            if bool(born_mask >> kind & 1) != (version == 0):
                raise AssertionError(f"object {object_id}: version {version}, born_mask {born_mask:#x}")
            if version == 0:
                self._write(lease, kind, [ZERO] * 4)
            else:
                expected = [(object_id, version, piece) for piece in range(self.memory.records[object_id].num_frames)]
                if self._contents(lease, kind) != expected:
                    raise AssertionError(f"lease {seq} sees {self._contents(lease, kind)}, not {expected}")
            if not lease.write_mask >> kind & 1:
                lease.seen[kind] = self._contents(lease, kind)
        for kind in kinds_of(lease.write_mask & ~lease.read_mask):
            if not self.memory.records[lease.chunk * KINDS_MAX + kind].flags & ObjectFlags.DIRTY:
                self._write(lease, kind, [garbage() for _ in range(4)])

    def release(self, seq: int, *, dirty: int = 0, dead: int = 0) -> ModelLease:
        """The rank writes new versions of the dirty kinds, and is about to release."""
        lease = self.leases.pop(seq)
        for kind, seen in lease.seen.items():
            if self._contents(lease, kind) != seen:
                raise AssertionError(f"kind {kind} of chunk {lease.chunk} changed under read lease {seq}")
        for kind in kinds_of(dirty):
            object_id = lease.chunk * KINDS_MAX + kind
            version = self._versions[object_id] = next(self._next_version)
            self._write(lease, kind, [(object_id, version, piece) for piece in range(4)])
        for kind in kinds_of(dead):
            self._versions[lease.chunk * KINDS_MAX + kind] = 0
        return lease

    def _contents(self, lease: ModelLease, kind: int) -> list[Contents]:
        return [self.memory.contents[frame] for frame in self.memory.frames_of(lease.chunk * KINDS_MAX + kind)]

    def _write(self, lease: ModelLease, kind: int, contents: Sequence[Contents]) -> None:
        for frame, each in zip(self.memory.frames_of(lease.chunk * KINDS_MAX + kind), contents, strict=False):
            self.memory.contents[frame] = each

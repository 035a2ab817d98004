"""The chunks of one tenant: their objects, their extents on disk, and whether the arena can serve them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from io_daemon.errors import BudgetError, SwapSpaceError
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.swap_object import SwapObject
from io_daemon.policy.trace import Geometry
from io_daemon.shared.protocol import (
    FRAMES_PER_OBJECT_MAX,
    KINDS_MAX,
    NO_EXTENT,
    PAGE_BYTES,
    ChunkSpec,
    align_up,
    checksums_per_object,
    kinds_of,
)
from io_daemon.shared.states import ObjectFlags

KINDS_OF: Final = tuple(kinds_of(mask) for mask in range(1 << KINDS_MAX))
"""``kinds_of`` as a table."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One registered chunk. ``objects`` has KINDS_MAX entries, None where the chunk has no such kind."""

    chunk_id: int
    spec: ChunkSpec
    objects: tuple[SwapObject | None, ...]
    kind_mask: int
    file: int
    extent_offset: int
    extent_bytes: int
    retired: bool = False
    """Unregistered while I/O was in flight: its id and its extent are given back when that ends."""

    def present(self) -> list[SwapObject]:
        return [item for item in self.objects if item is not None]

    def select(self, mask: int) -> tuple[SwapObject, ...]:
        """Objects of the kinds in ``mask``, by ascending kind."""
        objects = self.objects
        return tuple([item for kind in KINDS_OF[mask] if (item := objects[kind]) is not None])


class Catalog:
    """Registers chunks over ``extents`` (one allocator per swap file), round robin; checks the frame budget."""

    def __init__(
        self,
        *,
        num_frames: int,
        frame_bytes: int,
        block_bytes: int,
        extents: Sequence[ExtentAllocator],
        chunks_max: int,
    ) -> None:
        if frame_bytes <= 0 or frame_bytes % PAGE_BYTES or block_bytes <= 0 or block_bytes % PAGE_BYTES:
            raise ValueError(f"frame_bytes = {frame_bytes} and block_bytes = {block_bytes} must be whole pages")
        self.num_frames, self.frame_bytes = num_frames, frame_bytes
        self.pinned_frames = 0
        self.demand_frames_max = 0
        """Most frames that one lease can ask for, pinned kinds not counted."""
        self._demands: dict[int, int] = {}
        """How many chunks have how many frames for one lease to ask for: few different numbers."""
        self.chunks: dict[int, Chunk] = {}
        self._checksums = checksums_per_object(frame_bytes, block_bytes)
        self._extents = extents
        self._ids = ExtentAllocator(chunks_max, granule_bytes=1)
        self._kind_masks = np.zeros(chunks_max, dtype=np.uint8)
        self._next_file = 0

    @property
    def usable_frames(self) -> int:
        """Frames that are not reserved for pinned kinds."""
        return self.num_frames - self.pinned_frames

    def num_frames_of(self, object_bytes: int) -> int:
        return -(-align_up(object_bytes, PAGE_BYTES) // self.frame_bytes)

    def swap_bytes_needed(self, specs: Sequence[ChunkSpec]) -> list[int]:
        """Bytes by which each swap file must grow before ``register(specs)`` can succeed."""
        sizes: list[list[int]] = [[] for _ in self._extents]
        for file, spec in zip(self._files(len(specs)), specs, strict=True):
            if extent_bytes := _extent_bytes(spec):
                sizes[file].append(extent_bytes)
        return [allocator.shortfall_bytes(each) for allocator, each in zip(self._extents, sizes, strict=True)]

    def register(self, specs: Sequence[ChunkSpec]) -> list[Chunk]:
        """New chunks with consecutive ids.

        Raises ValueError (a spec that makes no sense, more chunks than chunks_max), BudgetError (too few frames),
        SwapSpaceError (the allocators were not grown first). Nothing has changed then.
        """
        self.check(specs)
        first = self._take_ids(len(specs)) if specs else 0
        offsets: list[int] = []
        files = self._files(len(specs))
        for file, spec in zip(files, specs, strict=True):
            extent_bytes = _extent_bytes(spec)
            offset = self._extents[file].allocate(extent_bytes) if extent_bytes else NO_EXTENT
            if offset is None:
                for done_file, done_spec, done in zip(files, specs, offsets, strict=False):
                    if done != NO_EXTENT:
                        self._extents[done_file].free(done, _extent_bytes(done_spec))
                self._ids.free(first, len(specs))
                raise SwapSpaceError(
                    path=f"swap file {file}",
                    needed_bytes=extent_bytes,
                    free_bytes=self._extents[file].free_bytes,
                    remedy="grow it by swap_bytes_needed() first",
                )
            offsets.append(offset)
        for spec in specs:
            self._count(spec, +1)
        self._next_file += len(specs)
        added = [self._chunk(first + i, spec, files[i], offsets[i]) for i, spec in enumerate(specs)]
        for chunk in added:
            self.chunks[chunk.chunk_id] = chunk
            self._kind_masks[chunk.chunk_id] = chunk.kind_mask
        return added

    def check(self, specs: Sequence[ChunkSpec]) -> None:
        """Raises ValueError or BudgetError where ``register(specs)`` would; changes nothing."""
        for spec in specs:
            self._check_spec(spec)
        if specs:
            self._ids.free(self._take_ids(len(specs)), len(specs))
        self._check_budget(specs)

    def _take_ids(self, count: int) -> int:
        """The first of so many consecutive ids. Raises ValueError."""
        if (first := self._ids.allocate(count)) is None:
            free = f"{self._ids.free_bytes} of the table's {self._ids.capacity_bytes}"
            raise ValueError(f"{count} more chunks need as many places in a row: {free} are free")
        return first

    def remove(self, chunk: Chunk) -> None:
        """Give the chunk's id and extent back; no I/O of it may be in flight."""
        del self.chunks[chunk.chunk_id]
        self._ids.free(chunk.chunk_id, 1)
        if chunk.extent_offset != NO_EXTENT:
            self._extents[chunk.file].free(chunk.extent_offset, chunk.extent_bytes)

    def retire(self, chunk: Chunk) -> None:
        """The chunk is unregistered; ``remove`` follows when its I/O has ended."""
        chunk.retired = True
        self._kind_masks[chunk.chunk_id] = 0
        self._count(chunk.spec, -1)

    def kind_masks(self) -> NDArray[np.uint8]:
        """Kinds of each chunk (uint8[chunks_max]), 0 where there is none. Live: it costs nothing to ask for."""
        return self._kind_masks

    def object_frames(self) -> NDArray[np.uint8]:
        """Frames (uint8[(largest id + 1) * KINDS_MAX]) that each object takes from the usable ones."""
        frames = np.zeros((max(self.chunks, default=-1) + 1) * KINDS_MAX, dtype=np.uint8)
        for chunk in self.chunks.values():
            for item in chunk.present():
                frames[item.object_id] = 0 if item.flags & ObjectFlags.PINNED else item.num_frames
        return frames

    def geometry(self) -> Geometry:
        """Sizes of all chunks, for a trace to carry."""
        absent = ChunkSpec((0,) * KINDS_MAX)
        ids = range(max(self.chunks, default=-1) + 1)
        specs = (self.chunks[i].spec if i in self.chunks and not self.chunks[i].retired else absent for i in ids)
        return Geometry(self.frame_bytes, tuple(specs))

    def _files(self, count: int) -> list[int]:
        num_files = max(1, len(self._extents))
        return [(self._next_file + i) % num_files for i in range(count)]

    def _frames(self, spec: ChunkSpec, mask: int) -> int:
        return sum(self.num_frames_of(size) for kind, size in enumerate(spec.object_bytes) if mask >> kind & 1)

    def _check_spec(self, spec: ChunkSpec) -> None:
        sizes = spec.object_bytes
        if not 0 < len(sizes) <= KINDS_MAX or min(sizes) < 0:  # all zero: a chunk that another tier holds whole
            raise ValueError(f"{spec}: 1 to {KINDS_MAX} sizes, none negative")
        if max(sizes) > FRAMES_PER_OBJECT_MAX * self.frame_bytes:
            raise ValueError(
                f"{spec}: an object takes at most {FRAMES_PER_OBJECT_MAX} frames of {self.frame_bytes} bytes"
            )
        kind_mask = sum(1 << kind for kind, size in enumerate(sizes) if size)
        if spec.pinned_mask & ~kind_mask:
            raise ValueError(f"{spec}: pinned_mask names kinds that the chunk does not have")
        if kind_mask & ~spec.pinned_mask and not self._extents:
            raise ValueError(f"{spec}: kinds that are not pinned need a swap file, and there is none")

    def _count(self, spec: ChunkSpec, change: int) -> None:
        """A chunk comes (+1) or goes (-1)."""
        self.pinned_frames += change * self._frames(spec, spec.pinned_mask)
        demand = self._frames(spec, ~spec.pinned_mask)
        count = self._demands.get(demand, 0) + change
        if count:
            self._demands[demand] = count
        else:
            del self._demands[demand]
        self.demand_frames_max = max(self._demands, default=0)

    def _check_budget(self, specs: Sequence[ChunkSpec]) -> None:
        pinned = self.pinned_frames + sum(self._frames(spec, spec.pinned_mask) for spec in specs)
        demands = (self._frames(spec, ~spec.pinned_mask) for spec in specs)
        demand = max(self.demand_frames_max, max(demands, default=0))
        if pinned + demand > self.num_frames:
            raise BudgetError(
                key="io_daemon.host_budget_bytes",
                budget_bytes=self.num_frames * self.frame_bytes,
                smallest_bytes=(pinned + demand) * self.frame_bytes,
                reason=f"{pinned} frames pinned, {demand} for one chunk at a time, and there are {self.num_frames}",
            )

    def _chunk(self, chunk_id: int, spec: ChunkSpec, file: int, extent_offset: int) -> Chunk:
        objects: list[SwapObject | None] = [None] * KINDS_MAX
        offset = extent_offset
        for kind, size in enumerate(spec.object_bytes):
            if size == 0:
                continue
            pinned = bool(spec.pinned_mask >> kind & 1)
            object_id = chunk_id * KINDS_MAX + kind
            record = SwapObject(
                object_bytes=align_up(size, PAGE_BYTES),
                num_frames=self.num_frames_of(size),
                file=file,
                checksum_index=object_id * self._checksums,
                object_id=object_id,
                chunk=chunk_id,
                kind=kind,
                extent_offset=NO_EXTENT if pinned else offset,
            )
            objects[kind] = record
            if pinned:
                record.pin()
            else:
                offset += record.object_bytes
        kind_mask = sum(1 << kind for kind, item in enumerate(objects) if item is not None)
        return Chunk(chunk_id, spec, tuple(objects), kind_mask, file, extent_offset, _extent_bytes(spec))


def _extent_bytes(spec: ChunkSpec) -> int:
    return sum(
        align_up(size, PAGE_BYTES) for kind, size in enumerate(spec.object_bytes) if not spec.pinned_mask >> kind & 1
    )

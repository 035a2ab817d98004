"""Shards in the I/O daemon: resident in the page-locked arena, or on NVMe, as its policy decides.

The tier ``cpu`` is the same store with its kinds pinned resident. Views are of arena frames, valid while leased.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.tiers.base import ChunkLayout, HostStore, Lease
from infinity.tiers.spinning import spinning
from io_daemon.rank.client import Client
from io_daemon.rank.lease import Grant
from io_daemon.shared.arena import frame_offset
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.protocol import KINDS_MAX, PAGE_BYTES, Access, ChunkSpec, align_up

_log = logging.getLogger(__name__)

CUDA_REGISTER_BYTES_MAX = 1 << 30
RELIEF_AFTER_S = 0.002
"""A grant for which there are frames takes the daemon a tenth of that."""


class DaemonLease(Lease):
    def __init__(self, store: DaemonStore, chunk: int, seq: int) -> None:
        self.chunk = chunk
        self._store, self._seq = store, seq
        self._grant: Grant | None = None

    def wait(self) -> None:
        if self._grant is None:
            self._grant = self._store.granted(self._seq)

    def pieces(self, kind: int) -> list[torch.Tensor]:
        if self._grant is None:
            raise RuntimeError(f"the lease on chunk {self.chunk} was not waited for")
        return self._store.views(self.chunk, kind, self._grant.frames[kind])

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        self._store.client.release(self._seq, dirty=dirty, dead=dead)


class DaemonStore(HostStore):
    def __init__(
        self,
        client: Client,
        *,
        pinned_mask: int,
        device: torch.device,
        spare_bytes: int = 0,
        cuts_spinning: bool = True,
    ) -> None:
        """
        Args:
            client: is attached.
            pinned_mask: kinds of the ``cpu`` tier.
            spare_bytes: as of ``HostTier.open``.
            cuts_spinning: threads of OpenMP leave the daemon their cores once a lease has been waited for.
        """
        self.client = client
        self._cuts_spinning = cuts_spinning
        self._spare_bytes = spare_bytes
        self._pinned_mask = pinned_mask
        self._arena = torch.from_numpy(client.arena.array())
        self._relieve: Callable[[], None] | None = None
        self._layouts: dict[int, ChunkLayout] = {}
        self._frames: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._registration = CudaRegistration(self._arena, client.frame_bytes) if device.type == "cuda" else None

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        specs = [chunk_spec(layout, self._pinned_mask) for layout in layouts]
        chunks = self.client.register(specs, spare_bytes=self._spare_bytes)
        self._layouts.update(zip(chunks, layouts, strict=True))
        return chunks

    def reserve(self) -> None:
        if self._spare_bytes:
            self._spare_bytes = 0
            self.client.reserve()

    def unregister(self, chunks: range) -> None:
        self.client.unregister(chunks)
        for chunk in chunks:
            del self._layouts[chunk]

    def relieve_by(self, relieve: Callable[[], None]) -> None:
        self._relieve = relieve

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        return DaemonLease(self, chunk, self.client.acquire(chunk, read=read, write=write))

    def granted(self, seq: int) -> Grant:
        """Wait for a lease."""
        if self._relieve is not None and not self.client.has_answer(seq, RELIEF_AFTER_S):
            self._relieve()
        stalled_s = self.client.stall_s
        grant = self.client.wait(seq)
        if self._cuts_spinning:
            spinning.note_wait(self.client.stall_s - stalled_s)
        return grant

    def views(self, chunk: int, kind: int, frames: Sequence[int]) -> list[torch.Tensor]:
        """Typed views of an object's frames, the last one cut to the object's numel."""
        layout = self._layouts[chunk]
        dtype, numel = layout.dtypes[kind], layout.numel_of(kind)
        frame_numel = self.client.frame_bytes // dtype.itemsize
        return [
            self._frame(frame, dtype)[: min(frame_numel, numel - piece * frame_numel)]
            for piece, frame in enumerate(frames)
        ]

    def mark(self, trace_id: int) -> None:
        self.client.mark(trace_id)

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self.client.upload_trace(trace_id, accesses)

    def tenant_stats(self) -> TenantStats:
        return self.client.stats()

    def stats(self) -> dict[str, float]:
        return {"stall_seconds": self.client.stall_s}

    def close(self) -> None:
        if self._registration is not None:
            self._registration.end()
        self._frames.clear()
        self._arena = torch.empty(
            0, dtype=torch.uint8, device="cpu"
        )  # whoever keeps the engine does not keep its memory
        self.client.close()

    def _frame(self, frame: int, dtype: torch.dtype) -> torch.Tensor:
        view = self._frames.get((frame, dtype))
        if view is None:
            offset = frame_offset(frame, self.client.frame_bytes)
            view = self._arena[offset : offset + self.client.frame_bytes].view(dtype)
            self._frames[frame, dtype] = view
        return view


def chunk_spec(layout: ChunkLayout, pinned_mask: int) -> ChunkSpec:
    """A chunk as the daemon sees it: whole pages per kind."""
    kind_bytes = [0] * KINDS_MAX
    for kind, dtype in layout.dtypes.items():
        kind_bytes[kind] = align_up(layout.numel_of(kind) * dtype.itemsize, PAGE_BYTES)
    pinned = sum(1 << kind for kind in layout.dtypes if pinned_mask >> kind & 1)
    return ChunkSpec(object_bytes=tuple(kind_bytes), pinned_mask=pinned)


def pieces_of_frames(arena_bytes: int, frame_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of pieces of an arena that hold all of its frames, each whole."""
    step = max(1, CUDA_REGISTER_BYTES_MAX // frame_bytes) * frame_bytes
    return [(start, min(start + step, arena_bytes)) for start in range(frame_offset(0, frame_bytes), arena_bytes, step)]


class CudaRegistration:
    """The arena registered with CUDA, so that copies to and from it are asynchronous DMA: in pieces of whole frames,
    since CUDA refuses a copy that goes beyond one."""

    def __init__(self, arena: torch.Tensor, frame_bytes: int) -> None:
        self._pieces: list[int] = []
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for start, end in pieces_of_frames(arena.numel(), frame_bytes):
            address, piece_bytes = arena.data_ptr() + start, end - start
            status = self._runtime.cudaHostRegister(address, piece_bytes, 0)
            if int(status) != 0:
                _log.warning(
                    "cudaHostRegister of %d bytes of host memory failed with status %s: copies are right, and slow; "
                    "`infinity doctor` says what limits locked memory",
                    piece_bytes,
                    status,
                )
                return
            self._pieces.append(address)

    def end(self) -> None:
        for address in self._pieces:
            self._runtime.cudaHostUnregister(address)
        self._pieces.clear()

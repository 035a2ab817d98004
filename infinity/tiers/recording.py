"""The daemon's place taken by memory, to see what a step asks of it: for ``infinity trace``.

Everything above this store is the engine that trains; it plans for the daemon's arena, and sees objects cut at frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.plan.memory_plan import MemoryPlan
from infinity.tiers.base import ChunkLayout, HostTier, Lease
from infinity.tiers.memory import MemoryStore
from io_daemon.policy.step_trace import ACQUIRE, RELEASE, WAIT, Events, Leases
from io_daemon.shared.metrics import TenantStats
from io_daemon.shared.protocol import Access

Clock = Callable[[], float]
"""Work done so far: seconds, or FLOPs."""


class StepRecorder:
    """The events of one step, and by a clock the work between them; what passes inside the store does not count."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.leases = Leases(chunk=[], read=[], write=[], dirty=[], dead=[])
        self.tail = 0.0
        self._ops: list[str] = []
        self._event_leases: list[int] = []
        self._gaps: list[float] = []
        self._left_at = clock()

    def acquired(self, chunk: int, read: int, write: int) -> int:
        """Number of the new lease."""
        columns = self.leases
        for column, value in zip(vars(columns).values(), (chunk, read, write, 0, 0), strict=True):
            column.append(value)
        return len(columns.chunk) - 1

    def released(self, lease: int, dirty: int, dead: int) -> None:
        self.leases.dirty[lease] = dirty
        self.leases.dead[lease] = dead

    def enter(self, op: str, lease: int) -> None:
        """The store is asked for something."""
        self._gaps.append(max(0.0, self.clock() - self._left_at))
        self._ops.append(op)
        self._event_leases.append(lease)

    def leave(self) -> None:
        """The store is done."""
        self._left_at = self.clock()

    def end(self) -> None:
        """The step is over."""
        self.tail = max(0.0, self.clock() - self._left_at)

    @property
    def events(self) -> Events:
        return Events(ops="".join(self._ops), lease=self._event_leases, gap=self._gaps)

    @property
    def total(self) -> float:
        """All the work of the step."""
        return sum(self._gaps) + self.tail


class RecordingLease(Lease):
    def __init__(self, store: RecordingStore, inner: Lease, number: int) -> None:
        self.chunk = inner.chunk
        self._store, self._inner, self._number = store, inner, number
        self._recorder = store.recorder

    def wait(self) -> None:
        if self._recorder is not None:
            self._recorder.enter(WAIT, self._number)
        self._inner.wait()
        if self._recorder is not None:
            self._recorder.leave()

    def pieces(self, kind: int) -> list[torch.Tensor]:
        """Cut at frame boundaries."""
        (whole,) = self._inner.pieces(kind)
        return list(torch.split(whole, self._store.frame_bytes // whole.element_size()))

    def release(self, *, dirty: int = 0, dead: int = 0) -> None:
        if self._recorder is not None:
            self._recorder.enter(RELEASE, self._number)
            self._recorder.released(self._number, dirty, dead)
        self._inner.release(dirty=dirty)
        if self._recorder is not None:
            self._recorder.leave()


class RecordingStore(MemoryStore):
    """Dead objects keep their memory, as frames would: the next contents cost no page faults."""

    def __init__(self, frame_bytes: int, pinned_mask: int, device: torch.device) -> None:
        super().__init__(device)
        self.frame_bytes = frame_bytes
        self.pinned_mask = pinned_mask
        self.layouts: list[ChunkLayout] = []
        """The layout of every chunk, by its number."""
        self.recorder: StepRecorder | None = None
        """While a step is recorded."""
        self.traces: dict[int, Sequence[Access]] = {}
        """By trace id, what the daemon would have been told."""
        self.trace_id = -1
        """The id of the last pass that began."""

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        self.layouts += layouts
        return super().register(layouts)

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> Lease:
        number = -1
        if self.recorder is not None:
            number = self.recorder.acquired(chunk, read, write)
            self.recorder.enter(ACQUIRE, number)
        lease = RecordingLease(self, super().acquire(chunk, read=read, write=write), number)
        if self.recorder is not None:
            self.recorder.leave()
        return lease

    def mark(self, trace_id: int) -> None:
        self.trace_id = trace_id

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self.traces[trace_id] = list(accesses)

    def tenant_stats(self) -> TenantStats | None:
        return None

    def relieve_by(self, relieve: Callable[[], None]) -> None:
        """Nobody waits for frames here."""

    def reserve(self) -> None:
        """There is no disk."""


class RecordingTier(HostTier):
    """Opens one store, which then is ``store``."""

    job = "trace"

    def __init__(self, device: torch.device) -> None:
        """``device``: the CPU, or meta."""
        self._device = device
        self.plan: MemoryPlan | None = None

    def open(
        self, plan: MemoryPlan, *, job: str, pinned_mask: int, device: torch.device, spare_bytes: int = 0
    ) -> RecordingStore:
        self.plan = plan
        self.store = RecordingStore(plan.frame_bytes, pinned_mask, self._device)
        return self.store

    def close(self) -> None:
        """Nothing was started."""

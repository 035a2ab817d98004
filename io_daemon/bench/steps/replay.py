"""One rank that takes the steps of a trace: real leases of a real daemon, and as much work beside as in training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from io_daemon.bench.steps.other_ranks import OtherRanks
from io_daemon.errors import WorldError
from io_daemon.machine.cpu_load import Load
from io_daemon.policy.step_trace import ACQUIRE, WAIT, Part, StepTrace, Work, work_before
from io_daemon.rank.client import Client
from io_daemon.shared.arena import frame_offset
from io_daemon.shared.protocol import Access, ObjectKind, kinds_of

TRACE_ID: Final = 0
BORN_WRITTEN: Final = ObjectKind.WEIGHT.mask | ObjectKind.MASTER.mask
"""Initial values are written; moments are born zero, gradients come later."""
WORD_BYTES: Final = 8
PLAN_TIMEOUT_S: Final = 120.0
PLAN_POLL_S: Final = 0.02

Bytes = NDArray[np.uint8]


class StepFigures(NamedTuple):
    """One step of the replay."""

    step_s: float
    between_s: float
    """The part of it in which forward and backward worked between two updates."""
    update_s: float
    """The part of it in which the update worked."""
    stall_s: float
    """The part of it that was blocked in waits for leases."""
    update_stall_s: float
    """Of that, in waits for the update's."""
    read_bytes: int
    """Bytes read from NVMe."""
    write_bytes: int


class _Moment(NamedTuple):
    at_s: float
    stalled_s: float


class Replay:
    """``client`` is connected; this attaches it, registers the trace's chunks and writes their initial contents.
    ``others``: likewise connected, for the round trips of the ranks that ``client`` stands for."""

    def __init__(
        self, client: Client, trace: StepTrace, load: Load, swap_dirs: Sequence[str], others: Sequence[Client] = ()
    ) -> None:
        """Raises SwapSpaceError, BudgetError or ConfigError before anything is written."""
        self._client, self._trace, self._load = client, trace, load
        self._accesses = [Access(*row) for row in trace.accesses]
        self._work = work_before(trace)
        self._is_update = trace.update_leases
        client.attach(
            num_frames=trace.num_frames,
            frame_bytes=trace.frame_bytes,
            swap_dirs=swap_dirs,
            chunks_max=len(trace.chunks),
        )
        self._arena = client.arena.array()
        chunks = client.register(trace.specs())
        if chunks != range(len(trace.chunks)):
            raise AssertionError(f"a fresh tenant's chunks are numbered {chunks}")
        self._told = False
        self._others = OtherRanks(others)
        self._write_initial()
        self._stats = client.stats()

    def wait_for_plan(self) -> None:
        """Until the daemon has planned by the order that it was told, in a process beside it. Raises WorldError."""
        deadline = time.monotonic() + PLAN_TIMEOUT_S
        while self._client.stats().num_plans == 0:
            if time.monotonic() > deadline:
                raise WorldError(f"the daemon made no plan within {PLAN_TIMEOUT_S:g} s")
            time.sleep(PLAN_POLL_S)

    def take_step(self) -> StepFigures:
        """After the first one the daemon is told the order, as by a rank in training."""
        trace, leases = self._trace, self._trace.leases
        seqs: dict[int, int] = {}
        views: list[Bytes] = []
        start = before = self._now()
        worked_s = dict.fromkeys(Part, 0.0)
        update_stall_s = 0.0
        self._client.mark(TRACE_ID)
        self._others.mark(TRACE_ID)
        for index, (op, lease) in enumerate(zip(trace.events.ops, trace.events.lease, strict=True)):
            work = self._work[index]
            self._do(work, views, trace.events.lease[index - 1])
            if op == ACQUIRE:
                read, write = leases.read[lease], leases.write[lease]
                seqs[lease] = self._client.acquire(leases.chunk[lease], read=read, write=write)
                self._others.acquire(lease)
            elif op == WAIT:
                views = self._views(lease, self._client.wait(seqs[lease]).frames)
                self._others.wait(lease)
            else:
                self._client.release(seqs.pop(lease), dirty=leases.dirty[lease], dead=leases.dead[lease])
                self._others.release(lease)
            now = self._now()
            stalled_s = now.stalled_s - before.stalled_s
            worked_s[work.part] += now.at_s - before.at_s - stalled_s
            update_stall_s += stalled_s if self._is_update[lease] else 0.0
            before = now
        self._do(self._work[-1], views, -1)
        if not self._told:
            self._client.upload_trace(TRACE_ID, self._accesses)
            self._told = True
        stats_before, self._stats = self._stats, self._client.stats()  # training asks for them once a step, too
        end = self._now()
        return StepFigures(
            step_s=end.at_s - start.at_s,
            between_s=worked_s[Part.BETWEEN],
            update_s=worked_s[Part.UPDATE],
            stall_s=end.stalled_s - start.stalled_s,
            update_stall_s=update_stall_s,
            read_bytes=sum(self._stats.total.bytes_read) - sum(stats_before.total.bytes_read),
            write_bytes=sum(self._stats.total.bytes_written) - sum(stats_before.total.bytes_written),
        )

    def work_alone_s(self) -> float:
        """Seconds of a step's work with nothing beside it. No lease is asked for, the passes go over any frames: call
        it when no more steps are wanted."""
        trace = self._trace
        next_frame = 0
        start_s = time.perf_counter()
        for index, work in enumerate(self._work):
            lease = trace.events.lease[index - 1]
            views: list[Bytes] = []
            if work.share:
                mask = trace.leases.read[lease] | trace.leases.write[lease]
                count = trace.object_frames(trace.leases.chunk[lease], mask)
                frames = [(next_frame + i) % trace.num_frames for i in range(count)]
                next_frame += count
                views = [self._view(frame, trace.frame_bytes) for frame in frames]
            self._do(work, views, lease)
        return time.perf_counter() - start_s

    def _now(self) -> _Moment:
        return _Moment(time.perf_counter(), self._client.stall_s + self._others.stall_s)

    def _write_initial(self) -> None:
        """Write what ``initialize`` would, in bytes that no drive compresses."""
        for chunk, (sizes, _) in enumerate(self._trace.chunks):
            mask = sum(1 << kind for kind, size in enumerate(sizes) if size and BORN_WRITTEN >> kind & 1)
            if not mask:
                continue
            seq = self._client.acquire(chunk, write=mask)
            frames = self._client.wait(seq).frames
            views = [self._view(frame, self._trace.frame_bytes) for kind in kinds_of(mask) for frame in frames[kind]]
            self._load.copy(views, into=True)
            self._client.release(seq, dirty=mask)

    def _do(self, work: Work, views: Sequence[Bytes], lease: int) -> None:
        """The work before an event; ``lease``: whose frames ``views`` are."""
        if work.share:
            parts = [view[: round(work.share * len(view)) // WORD_BYTES * WORD_BYTES] for view in views]
            read, write = self._trace.leases.read[lease], self._trace.leases.write[lease]
            if read and write:
                self._load.update(parts)
            else:
                self._load.copy(parts, into=bool(write))
        if work.flops:
            self._load.compute(work.flops)

    def _views(self, lease: int, frames: dict[int, tuple[int, ...]]) -> list[Bytes]:
        chunk = self._trace.leases.chunk[lease]
        sizes = self._trace.chunks[chunk][0]
        frame_bytes = self._trace.frame_bytes
        return [
            self._view(number, min(frame_bytes, sizes[kind] - piece * frame_bytes))
            for kind in kinds_of(self._trace.leases.read[lease] | self._trace.leases.write[lease])
            for piece, number in enumerate(frames[kind])
        ]

    def _view(self, frame: int, num_bytes: int) -> Bytes:
        offset = frame_offset(frame, self._trace.frame_bytes)
        return self._arena[offset : offset + num_bytes]


def writes_at_most(trace: StepTrace, num_steps: int) -> int:
    """Bytes, were nothing kept in memory: the initial contents, and all that becomes dirty in every step."""
    initial_bytes = step_bytes = 0
    for chunk, (sizes, pinned) in enumerate(trace.chunks):
        streamed = sum(1 << kind for kind in range(len(sizes)) if sizes[kind]) & ~pinned
        initial_bytes += trace.object_bytes(chunk, streamed & BORN_WRITTEN)
    for chunk, dirty in zip(trace.leases.chunk, trace.leases.dirty, strict=True):
        step_bytes += trace.object_bytes(chunk, dirty & ~trace.chunks[chunk][1])
    return initial_bytes + step_bytes * num_steps

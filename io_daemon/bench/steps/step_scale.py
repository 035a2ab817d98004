"""A step trace for a whole node, for another budget, or for less space. Pure.

A trace is one rank's. The ranks of a node hold parts of the same sizes and touch them in the same order, in step, since
collectives hold them together: so they are replayed as one rank whose chunks, frames and work are so many times as
large.

Scaling first makes large chunks smaller, as long as an object stays large against a block, then leaves out chunks,
evenly strided by bytes: every layer keeps its share, and the order and the mix of accesses stay. Arithmetic shrinks
alike, and so does what of the arena is left for objects that stay: the window of the daemon's prefetch does not shrink,
nor does the single lease. An arena of a few leases says little about one of many.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Final

from io_daemon.errors import BudgetError
from io_daemon.policy.step_trace import ACQUIRE, RELEASE, WAIT, Events, Leases, StepTrace
from io_daemon.policy.window import frames_to_plan, window_frames
from io_daemon.shared.protocol import PAGE_BYTES, align_up

LARGEST_LEASES_MIN: Final = 2
"""The arena must hold so many of them: one in use, one on its way in or out."""
LARGEST_LEASES_FINE: Final = 16
"""With room for fewer, the arena says little about a larger one."""
FRAME_BYTES_SHRUNK_MIN: Final = 2 << 20
"""Chunks are not made smaller than this: blocks and round trips do not shrink, and would begin to count."""


def frames_required(trace: StepTrace) -> int:
    """The fewest frames with which the step cannot come to a halt: what is pinned, and the most that the leases up to
    the one waited for hold together; at least two of the largest lease."""
    held: dict[int, int] = {}
    together = largest = 0
    for op, lease in zip(trace.events.ops, trace.events.lease, strict=True):
        if op == ACQUIRE:
            chunk = trace.leases.chunk[lease]
            streamed = (trace.leases.read[lease] | trace.leases.write[lease]) & ~trace.chunks[chunk][1]
            held[lease] = trace.object_frames(chunk, streamed)
            largest = max(largest, held[lease])
        elif op == WAIT:
            together = max(together, sum(frames for other, frames in held.items() if other <= lease))
        elif op == RELEASE:
            del held[lease]
    return trace.pinned_frames + max(together, LARGEST_LEASES_MIN * largest)


def is_fine(trace: StepTrace) -> bool:
    """Whether the arena is large against a single lease."""
    return trace.num_frames - trace.pinned_frames >= LARGEST_LEASES_FINE * _largest_lease(trace)


def _largest_lease(trace: StepTrace) -> int:
    """Frames."""
    leases = trace.leases
    return max(
        trace.object_frames(chunk, (read | write) & ~trace.chunks[chunk][1])
        for chunk, read, write in zip(leases.chunk, leases.read, leases.write, strict=True)
    )


def with_budget(trace: StepTrace, budget_bytes: int) -> StepTrace:
    """The same chunks in arenas of another size, the node's ranks together ``budget_bytes``. Raises BudgetError if the
    step would come to a halt in it."""
    arena_bytes = (budget_bytes - trace.staging_bytes) // trace.ranks_per_node - PAGE_BYTES
    num_frames = min(max(0, arena_bytes) // trace.frame_bytes, _frames_useful(trace))
    required = frames_required(trace)
    if num_frames < required:
        raise BudgetError(
            key="host_budget_bytes",
            budget_bytes=budget_bytes,
            smallest_bytes=trace.staging_bytes + trace.ranks_per_node * (PAGE_BYTES + required * trace.frame_bytes),
            reason=f"this trace's leases need {required} frames of {trace.frame_bytes} bytes at once on each rank",
        )
    return trace.model_copy(update={"num_frames": num_frames, "host_budget_bytes": budget_bytes})


def of_node(trace: StepTrace, *, ahead_bytes: int) -> StepTrace:
    """All ranks of a node as one: ``ranks_per_node`` is 1 afterwards.

    ``ahead_bytes``: that the daemon's prefetch may ready ahead, for every rank; the one gets that once only, and an
    arena that leaves as much for objects that stay as the ranks' together."""
    num_ranks = trace.ranks_per_node
    if num_ranks == 1:
        return trace
    node = with_resized_chunks(trace, num_ranks).model_copy(update={"ranks_per_node": 1})
    return _keeping(node, _frames_kept(trace, trace.num_frames, ahead_bytes), ahead_bytes)


def _frames_useful(trace: StepTrace) -> int:
    return max(trace.num_frames, trace.total_frames + frames_required(trace) - trace.pinned_frames)


def chunks_kept(chunk_bytes: list[int], share: float) -> list[int]:
    """Indices of about ``share`` of the bytes, evenly strided; at least one."""
    kept: list[int] = []
    done = taken = 0
    for index, num_bytes in enumerate(chunk_bytes):
        done += num_bytes
        if share * done - taken >= num_bytes / 2:
            kept.append(index)
            taken += num_bytes
    return kept or [0]


def scaled(trace: StepTrace, share: float, *, ahead_bytes: int) -> tuple[StepTrace, float]:
    """The step of about ``share`` of the state, and the share that it came to, by bytes.

    ``ahead_bytes``: that the daemon's prefetch may ready ahead. It does not shrink, so the arena shrinks by what it
    leaves for objects that stay."""
    if share >= 1:
        return trace, 1.0
    before = trace
    least = min(1.0, FRAME_BYTES_SHRUNK_MIN / trace.frame_bytes)
    trace = with_resized_chunks(trace, max(share, least))
    trace = with_fewer_chunks(trace, share * _state_bytes(before) / _state_bytes(trace))
    scale = _state_bytes(trace) / _state_bytes(before)
    kept_bytes = _frames_kept(before, before.num_frames, ahead_bytes) * before.frame_bytes * scale
    return _keeping(trace, round(kept_bytes / trace.frame_bytes), ahead_bytes), scale


def _keeping(trace: StepTrace, num_kept: int, ahead_bytes: int) -> StepTrace:
    """In the smallest arena with which the daemon plans with ``num_kept`` frames, and the step cannot halt."""
    num_frames = bisect_left(
        range(trace.num_frames + _frames_useful(trace)),
        num_kept,
        lo=frames_required(trace),
        key=lambda num_frames: _frames_kept(trace, num_frames, ahead_bytes),
    )
    return trace.model_copy(update={"num_frames": num_frames})


def _frames_kept(trace: StepTrace, num_frames: int, ahead_bytes: int) -> int:
    """What the daemon plans with of an arena so large."""
    window = window_frames(num_frames, trace.frame_bytes, ahead_bytes)
    return frames_to_plan(num_frames - trace.pinned_frames, window, _largest_lease(trace))


def _state_bytes(trace: StepTrace) -> int:
    return sum(sum(sizes) for sizes, _ in trace.chunks)


def with_resized_chunks(trace: StepTrace, factor: float) -> StepTrace:
    """Every object and frame ``factor`` of its size, in whole pages; work likewise, frames as many as before."""
    if factor == 1:
        return trace
    frame_bytes = align_up(math.ceil(trace.frame_bytes * factor), PAGE_BYTES)
    factor = frame_bytes / trace.frame_bytes
    chunks = [
        ([align_up(math.ceil(size * factor), PAGE_BYTES) for size in sizes], pinned) for sizes, pinned in trace.chunks
    ]
    gap = [before * factor for before in trace.events.gap]
    return trace.model_copy(
        update={
            "frame_bytes": frame_bytes,
            "chunks": chunks,
            "events": trace.events.model_copy(update={"gap": gap}),
            "tail": trace.tail * factor,
        }
    )


def with_fewer_chunks(trace: StepTrace, share: float) -> StepTrace:
    """About ``share`` of the chunks by bytes, and of the work that is not done on a chunk; frames as many as before."""
    if share >= 1:
        return trace
    chunk_bytes = [sum(sizes) for sizes, _ in trace.chunks]
    kept = chunks_kept(chunk_bytes, share)
    scale = sum(chunk_bytes[chunk] for chunk in kept) / sum(chunk_bytes)
    number = {chunk: index for index, chunk in enumerate(kept)}
    leases, lease_number = _leases_of(trace, number)
    return trace.model_copy(
        update={
            "chunks": [trace.chunks[chunk] for chunk in kept],
            "accesses": [(number[a[0]], *a[1:]) for a in trace.accesses if a[0] in number],
            "leases": leases,
            **_events_of(trace, lease_number, scale),
        }
    )


def _leases_of(trace: StepTrace, number: dict[int, int]) -> tuple[Leases, dict[int, int]]:
    rows = [index for index, chunk in enumerate(trace.leases.chunk) if chunk in number]
    columns = {name: [column[row] for row in rows] for name, column in vars(trace.leases).items()}
    columns["chunk"] = [number[chunk] for chunk in columns["chunk"]]
    return trace.leases.model_copy(update=columns), {row: index for index, row in enumerate(rows)}


def _events_of(trace: StepTrace, lease_number: dict[int, int], scale: float) -> dict[str, object]:
    """Work on a lease's frames goes or stays with the lease; all other work is done to the share that stays."""
    ops: list[str] = []
    lease: list[int] = []
    gap: list[float] = []
    pending = 0.0
    held: int | None = None
    for op, number, before in zip(
        [*trace.events.ops, ""], [*trace.events.lease, -1], [*trace.events.gap, trace.tail], strict=True
    ):
        if held is None:
            pending += before * scale
        elif held in lease_number:
            pending += before
        held = number if op == WAIT else None
        if number in lease_number:
            ops.append(op)
            lease.append(lease_number[number])
            gap.append(pending)
            pending = 0.0
    return {"events": Events(ops="".join(ops), lease=lease, gap=gap), "tail": pending}

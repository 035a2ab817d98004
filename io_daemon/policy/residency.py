"""Who should be resident when: from an access trace to a plan. Pure.

Every stretch between two uses of an object is a *gap*. Keeping the object over a gap takes its frames for the
accesses between, and saves the read at the far end. A *span* is a run of gaps from a write to the next one: keeping
all of it saves writing the object back as well. ``plan`` chooses what to keep: frames get a price at each time
(subgradient ascent on the Lagrangian dual of the choice, which also bounds the traffic from below), then gaps and
spans are taken greedily by value for their price while there is room. For equal sizes and no writes that is
Belady's MIN. What is not kept streams: it is written behind at once, dropped when frames are wanted, prefetched.

A plan is advisory: a wrong one costs I/O, never contents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX

USES_MAX: Final = 1 << 15
"""Uses up to which ``plan`` chooses (under a second); with more, all is marked as kept and MIN decides as it comes."""
SLOTS_MAX: Final = 4096
"""Resolution of the room over time: a longer trace is looked at in slots of several accesses."""
PRICE_STEPS: Final = 150
PRICE_ROUNDS: Final = 3


@dataclass(frozen=True, eq=False)
class Plan:
    """Next uses over one trace of L accesses, U uses of objects in it. Object id = chunk * KINDS_MAX + kind."""

    chunk: NDArray[np.uint32]
    read_mask: NDArray[np.uint8]
    write_mask: NDArray[np.uint8]
    use_at: NDArray[np.uint32]
    """[L * KINDS_MAX]: index of the use of that kind at that position; undefined if the access does not touch it."""
    first_use: NDArray[np.int64]
    """[object ids + 1]: the uses of object i are [first_use[i], first_use[i + 1]), in order of position."""
    position: NDArray[np.int64]
    """[U]: of each use in the trace."""
    distance: NDArray[np.int64]
    """[U]: accesses until the next use of the same object, 1 to L; the last use wraps to the first."""
    write_only: NDArray[np.bool_]
    """[U]: the use overwrites the contents unread."""
    next_write_only: NDArray[np.bool_]
    """[U]: the next use of the same object does."""
    kept: NDArray[np.bool_]
    """[U]: the object should stay until its next use."""
    selective: bool
    """``kept`` is a choice that fits the frames."""
    moved_frames: int
    """Frames read and written per pass if the choice is followed; 0 if it is none."""
    bound_frames: float
    """Frames that every policy moves per pass within the same room; 0 if there was no choice to bound."""

    def __len__(self) -> int:
        return len(self.chunk)


class PlanRequest(NamedTuple):
    """All that a plan depends on."""

    trace: Trace
    """Validated; it repeats for ever."""
    object_frames: NDArray[np.uint8]
    """[object ids]: frames that each object takes of those to be shared; 0: none (pinned)."""
    num_frames: int
    """The frames to be shared."""


def plan(request: PlanRequest) -> Plan:
    """A pure function of picklable data, so that it can run in a process of its own."""
    trace, object_frames, num_frames = request
    bits = np.unpackbits((trace.read_mask | trace.write_mask)[:, None], axis=1, bitorder="little")
    position, kind = np.nonzero(bits)
    object_id = trace.chunk[position].astype(np.int64) * KINDS_MAX + kind
    order = np.argsort(object_id, kind="stable")
    object_id, position, kind = object_id[order], position[order], kind[order]
    uses_of = np.bincount(object_id)
    first_use = np.concatenate(([0], np.cumsum(uses_of)))
    following = np.arange(1, len(position) + 1)
    last = first_use[1:][uses_of > 0] - 1
    following[last] = first_use[:-1][uses_of > 0]
    distance = position[following] - position
    distance[last] += len(trace)
    use_at = np.zeros(len(trace) * KINDS_MAX, dtype=np.uint32)
    use_at[position * KINDS_MAX + kind] = np.arange(len(position))
    reads, writes, dies = (
        (column[position] >> kind.astype(np.uint8) & 1).astype(bool)
        for column in (trace.read_mask, trace.write_mask, trace.dead_mask)
    )

    kept = np.ones(len(position), dtype=bool)
    moved_frames, bound_frames = 0, 0.0
    selective = len(position) <= USES_MAX
    if selective:
        frames = object_frames[object_id].astype(np.int64)
        gaps = _Gaps(position, distance, frames, reads[following] & ~dies, ~dies, _spans(first_use, writes, dies))
        kept, moved_frames, bound_frames = _Choice(gaps, writes & ~dies, len(trace), num_frames).make()
    return Plan(
        chunk=trace.chunk,
        read_mask=trace.read_mask,
        write_mask=trace.write_mask,
        use_at=use_at,
        first_use=first_use,
        position=position,
        distance=distance,
        write_only=~reads,
        next_write_only=~reads[following],
        kept=kept,
        selective=selective,
        moved_frames=moved_frames,
        bound_frames=bound_frames,
    )


def _spans(first_use: NDArray[np.int64], writes: NDArray[np.bool_], dies: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index of the span of each gap. A span begins at a write or a death, and may wrap around the trace's end."""
    begins = writes | dies
    span = np.zeros(len(begins), dtype=np.int64)
    next_span = 0
    for begin, end in zip(first_use[:-1].tolist(), first_use[1:].tolist(), strict=True):
        if begin == end:
            continue
        own = np.cumsum(begins[begin:end])
        num_spans = max(int(own[-1]), 1)
        span[begin:end] = next_span + (own - 1) % num_spans
        next_span += num_spans
    return span


@dataclass(frozen=True, eq=False)
class _Gaps:
    """Gap i follows use i."""

    position: NDArray[np.int64]
    distance: NDArray[np.int64]
    frames: NDArray[np.int64]
    saves_read: NDArray[np.bool_]
    """The contents at its start are read at its end."""
    valid: NDArray[np.bool_]
    """There are contents to keep."""
    span: NDArray[np.int64]


class _Choice:
    """Which gaps to keep, so that the fewest frames are moved and there is room at every time."""

    def __init__(self, gaps: _Gaps, dirties: NDArray[np.bool_], num_accesses: int, num_frames: int) -> None:
        self.gaps = gaps
        num_spans = int(gaps.span.max()) + 1
        self.span_frames = np.zeros(num_spans, dtype=np.int64)
        self.span_frames[gaps.span] = gaps.frames
        self.span_saves_write = np.bincount(gaps.span, dirties, num_spans) > 0
        self.num_spans = num_spans
        width = -(-num_accesses // SLOTS_MAX)
        in_use = np.bincount(gaps.position, gaps.frames, num_accesses)
        peaks = np.maximum.reduceat(in_use, np.arange(0, num_accesses, width))
        self.room = num_frames - peaks.astype(np.int64)
        begin = gaps.position + 1
        end = np.maximum(begin, begin + gaps.distance - 1)
        empty = begin == end
        # Slots strictly inside a gap: [begin, end) up to the end of the trace, and [wrap_begin, wrap_end) after it.
        self.begin = np.minimum(begin, num_accesses) // width
        self.end = np.where(empty, self.begin, -(-np.minimum(end, num_accesses) // width))
        self.begin = np.minimum(self.begin, self.end)
        self.wrap_begin = np.maximum(begin - num_accesses, 0) // width
        self.wrap_end = np.where(empty, self.wrap_begin, -(-np.maximum(end - num_accesses, 0) // width))

    def make(self) -> tuple[NDArray[np.bool_], int, float]:
        """Gaps to keep, frames moved then, and the least that any choice moves."""
        gaps = self.gaps
        total = int(gaps.frames @ gaps.saves_read + self.span_frames @ self.span_saves_write)
        prices, saved_max = np.zeros(len(self.room)), float("inf")
        kept = self._take_greedily(prices + 1.0)
        saved = self._saved_frames(kept)
        for _ in range(PRICE_ROUNDS):
            if saved > saved_max - 1.0:
                break  # no choice saves one frame more
            prices, saved_max = self._price(prices, saved)
            priced = self._take_greedily(prices)
            if (saved_priced := self._saved_frames(priced)) > saved:
                kept, saved = priced, saved_priced
        return kept, total - saved, max(0.0, total - saved_max)

    def _gap_prices(self, prices: NDArray[np.float64]) -> NDArray[np.float64]:
        upto: NDArray[np.float64] = np.concatenate(([0.0], np.cumsum(prices)))
        gap_prices: NDArray[np.float64] = (
            upto[self.end] - upto[self.begin] + upto[self.wrap_end] - upto[self.wrap_begin]
        )
        return gap_prices

    def _price(self, prices: NDArray[np.float64], saved_target: int) -> tuple[NDArray[np.float64], float]:
        """Better prices of one frame in each slot, and the upper bound on the frames saved that they prove: with every
        gap and span free to choose at these prices, no choice within the room saves more."""
        gaps, frames = self.gaps, self.gaps.frames.astype(float)
        best_prices, best_bound, pace, stale = prices, float("inf"), 1.0, 0
        for _ in range(PRICE_STEPS):
            gain = np.where(gaps.valid, gaps.saves_read - self._gap_prices(prices), 0.0)
            piecewise = np.bincount(gaps.span, np.maximum(gain, 0.0), self.num_spans)
            whole = np.bincount(gaps.span, gain, self.num_spans) + self.span_saves_write
            as_whole = self.span_saves_write & (whole > piecewise)
            bound = float(self.span_frames @ np.where(as_whole, whole, piecewise) + prices @ np.maximum(self.room, 0))
            stale += 1
            if bound < best_bound:
                best_prices, best_bound, stale = prices, bound, 0
            elif stale >= 5:
                pace, stale = pace / 2, 0
            taken = np.where(gaps.valid & (as_whole[gaps.span] | (gain > 0)), frames, 0.0)
            excess = self._usage(taken) - np.maximum(self.room, 0)
            norm = float(excess @ excess)
            if norm == 0.0 or bound <= saved_target:
                break
            prices = np.maximum(prices + pace * (bound - saved_target) / norm * excess, 0.0)
        return best_prices, best_bound

    def _usage(self, taken: NDArray[np.float64]) -> NDArray[np.float64]:
        """Frames in use in each slot."""
        size = len(self.room) + 1
        change = np.bincount(self.begin, taken, size) - np.bincount(self.end, taken, size)
        change += np.bincount(self.wrap_begin, taken, size) - np.bincount(self.wrap_end, taken, size)
        return np.cumsum(change)[:-1]

    def _saved_frames(self, kept: NDArray[np.bool_]) -> int:
        broken = np.bincount(self.gaps.span, ~kept & self.gaps.valid, self.num_spans) > 0
        writes = self.span_frames @ (self.span_saves_write & ~broken)
        return int(self.gaps.frames @ (kept & self.gaps.saves_read) + writes)

    def _take_greedily(self, prices: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Gaps and whole spans by value for their price, as long as there is room."""
        gaps = self.gaps
        gap_price = np.where(gaps.valid, self._gap_prices(prices), 0.0) + 1e-9
        members: list[list[int]] = [[] for _ in range(self.num_spans)]
        for gap in np.flatnonzero(gaps.valid).tolist():
            members[gaps.span[gap]].append(gap)
        singles = np.flatnonzero(gaps.saves_read & gaps.valid)
        spans = np.flatnonzero(self.span_saves_write)
        # What completing a span adds to keeping those of its gaps that pay by themselves.
        extra = gaps.valid & (gap_price >= gaps.saves_read)
        span_value = np.bincount(gaps.span, extra & gaps.saves_read, self.num_spans) + 1
        span_price = np.bincount(gaps.span, np.where(extra, gap_price, 0.0), self.num_spans) + 1e-9
        value = np.concatenate((1 / gap_price[singles], (span_value / span_price)[spans]))
        candidates = [[gap] for gap in singles.tolist()] + [members[span] for span in spans.tolist()]

        room = self.room.copy()
        kept = np.zeros(len(gaps.position), dtype=bool)
        parts = list(
            zip(*(each.tolist() for each in (self.begin, self.end, self.wrap_begin, self.wrap_end)), strict=True)
        )
        frames = gaps.frames.tolist()
        for index in np.argsort(-value, kind="stable").tolist():
            missing = [gap for gap in candidates[index] if not kept[gap]]
            taken: list[int] = []
            for gap in missing:
                begin, end, wrap_begin, wrap_end = parts[gap]
                now, later, need = room[begin:end], room[wrap_begin:wrap_end], frames[gap]
                if (now.size and now.min() < need) or (later.size and later.min() < need):
                    break
                now -= need
                later -= need
                taken.append(gap)
            if len(taken) == len(missing):
                kept[taken] = True
                continue
            for gap in taken:  # none of them wraps: that is its object's last gap, tried last
                begin, end, _, _ = parts[gap]
                room[begin:end] += frames[gap]
        return kept

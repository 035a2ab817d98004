"""What a tenant's I/O came to: totals, and the last complete step between two MARKs. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from io_daemon.shared.protocol import KINDS_MAX


def _per_kind() -> list[int]:
    return [0] * KINDS_MAX


@dataclass(slots=True)
class Counters:
    """Counts since some start. Lists are indexed by ObjectKind. Every read of contents that exist is one of hit,
    prefetch hit and miss."""

    bytes_read: list[int] = field(default_factory=_per_kind)
    """Bytes of swap-ins whose I/O succeeded."""
    bytes_written: list[int] = field(default_factory=_per_kind)
    hits: int = 0
    """Objects that were resident since an earlier use."""
    prefetch_hits: int = 0
    """Objects whose swap-in prefetch had started, whether or not it had ended."""
    misses: int = 0
    """Objects that had to be swapped in on demand."""
    evictions: int = 0
    """Objects that lost their frames to another."""
    waits: int = 0
    """Leases that were short of frames when they were asked for."""
    rejected: int = 0
    """SQEs answered with BAD_REQUEST."""
    io_errors: int = 0
    """Swap-ins and swap-outs that failed."""

    def copy(self) -> Counters:
        return self - Counters()

    def __sub__(self, earlier: Counters) -> Counters:
        result = Counters()
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(earlier, each.name)
            if isinstance(ours, list):
                setattr(result, each.name, [a - b for a, b in zip(ours, theirs, strict=True)])
            else:
                setattr(result, each.name, ours - theirs)
        return result


class StepCounters:
    """``totals`` since the start, and ``last_step``: what happened between the last two MARKs (None before)."""

    def __init__(self) -> None:
        self.totals = Counters()
        self.last_step: Counters | None = None
        self._at_mark: Counters | None = None

    def roll_over(self) -> None:
        now = self.totals.copy()
        if self._at_mark is not None:
            self.last_step = now - self._at_mark
        self._at_mark = now

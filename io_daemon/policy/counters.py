"""What a tenant's I/O came to. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from io_daemon.shared.protocol import KINDS_MAX


def _per_kind() -> list[int]:
    return [0] * KINDS_MAX


@dataclass(slots=True)
class Counters:
    """Counts since the tenant attached. Lists are indexed by ObjectKind. Every read of contents that exist is one of
    hit, prefetch hit and miss."""

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

"""What one step did: ``engine.io_report()``. Plain data; every count comes from the daemon or from a clock here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from io_daemon.shared.metrics import IoTotals, TenantStats
from io_daemon.shared.protocol import ObjectKind

KindLabels = Mapping[ObjectKind, str]
"""What a report calls each kind that the model has."""


@dataclass(frozen=True, kw_only=True)
class TierTraffic:
    """Bytes between NVMe and the host arena, per object kind (``weight``, ``grad``, ``master``, and the optimizer's
    states under its own names: ``exp_avg``, …)."""

    bytes_read: dict[str, int]
    bytes_written: dict[str, int]
    hits: int
    """Objects that were resident when asked for, prefetched ones included."""
    misses: int
    io_seconds: float
    """The time in which at least one request was under way."""

    @classmethod
    def of(cls, totals: IoTotals, labels: KindLabels) -> TierTraffic:
        return cls(
            bytes_read=_by_kind(totals.bytes_read, labels),
            bytes_written=_by_kind(totals.bytes_written, labels),
            hits=totals.hits + totals.prefetch_hits,
            misses=totals.misses,
            io_seconds=totals.io_s,
        )

    def since(self, earlier: TierTraffic) -> TierTraffic:
        """What came after ``earlier``, both counted from the same start."""
        return TierTraffic(
            bytes_read={kind: count - earlier.bytes_read[kind] for kind, count in self.bytes_read.items()},
            bytes_written={kind: count - earlier.bytes_written[kind] for kind, count in self.bytes_written.items()},
            hits=self.hits - earlier.hits,
            misses=self.misses - earlier.misses,
            io_seconds=self.io_seconds - earlier.io_seconds,
        )

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_read.values()) + sum(self.bytes_written.values())

    @property
    def hit_rate(self) -> float:
        """1.0 where nothing was asked for."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 1.0

    @property
    def bytes_per_second(self) -> float:
        return self.total_bytes / self.io_seconds if self.io_seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Wall-clock seconds of one optimizer step, all its micro-batches together."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    stall_seconds: float = 0.0
    """The part of the above that was blocked on the daemon."""

    def plus(self, **seconds: float) -> StepTimes:
        """The times with so many seconds more of the fields that are named."""
        return StepTimes(**{name: value + seconds.get(name, 0.0) for name, value in asdict(self).items()})

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.update_seconds


@dataclass(frozen=True, kw_only=True)
class IoReport:
    step: int
    """Number of steps done; the report is about the last of them."""
    times: StepTimes
    nvme: TierTraffic | None
    """From the end of the step before to the end of the last one: writes still under way then count to the next.
    None without a daemon, or before the first step."""
    nvme_total: TierTraffic | None
    """Since ``initialize``, the writing of the initial state included."""
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """In the host arena now, per object kind."""
    arena_bytes: int = 0
    swap_bytes: int = 0
    """Space that this rank has reserved on NVMe."""
    stored_as: dict[str, str] = field(default_factory=dict)
    """What the store has of each object kind of a trained parameter: a dtype, or how it is narrowed."""
    page_locked: bool = False
    live_numel_peak: int = 0
    """Largest number of parameters unsharded at once, persistent ones aside."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, derived figures included."""
        plain = asdict(self)
        plain["times"]["seconds"] = self.times.seconds
        for name in ("nvme", "nvme_total"):
            traffic: TierTraffic | None = getattr(self, name)
            if traffic is not None:
                plain[name] |= {"hit_rate": traffic.hit_rate, "bytes_per_second": traffic.bytes_per_second}
        return plain

    @classmethod
    def of(
        cls,
        *,
        step: int,
        times: StepTimes,
        live_numel_peak: int,
        last_step: TierTraffic | None,
        tenant: TenantStats | None,
        labels: KindLabels,
        stored_as: dict[str, str],
    ) -> IoReport:
        if tenant is None:
            return cls(
                step=step,
                times=times,
                nvme=None,
                nvme_total=None,
                stored_as=stored_as,
                live_numel_peak=live_numel_peak,
            )
        return cls(
            step=step,
            times=times,
            nvme=last_step,
            nvme_total=TierTraffic.of(tenant.total, labels),
            resident_bytes=_by_kind(tenant.resident_bytes, labels),
            arena_bytes=tenant.arena_bytes,
            swap_bytes=tenant.swap_bytes,
            stored_as=stored_as,
            page_locked=tenant.page_locked,
            live_numel_peak=live_numel_peak,
        )


def kind_labels(states: Mapping[str, ObjectKind]) -> KindLabels:
    """``states``: the kinds of the optimizer's states, by what it calls them."""
    own = {kind: kind.name.lower() for kind in (ObjectKind.WEIGHT, ObjectKind.GRAD, ObjectKind.MASTER)}
    return own | {kind: label for label, kind in states.items()}


def _by_kind(values: tuple[int, ...], labels: KindLabels) -> dict[str, int]:
    return {label: values[kind] for kind, label in labels.items()}

"""What the running step has taken so far, seconds and bytes, and what the last one took."""

from __future__ import annotations

import time
from typing import Final

import torch

from infinity.report import IoReport, StepTimes, TierTraffic, kind_labels
from infinity.states import StepPhase
from infinity.tiers.base import is_beside
from infinity.weights import transforms
from infinity.weights.sharded_model import ShardedModel
from io_daemon.shared.metrics import TenantStats

_FIELDS: Final = {
    StepPhase.FORWARD: "forward_seconds",
    StepPhase.BACKWARD: "backward_seconds",
    StepPhase.OPTIMIZER: "update_seconds",
}


class StepRecord:
    """Bytes count from here on."""

    def __init__(self, sharded: ShardedModel, waits_for: torch.device | None = None) -> None:
        """``waits_for``: the device that is to have done what a phase has queued when its time is taken; None: none."""
        self._sharded = sharded
        self._waits_for = waits_for if waits_for is not None and is_beside(waits_for) else None
        self._labels = kind_labels(sharded.precision.state_kinds)
        self.times = self._last_times = StepTimes()
        """The running step's."""
        self._began = self._stalled_before = 0.0
        self._traffic: TierTraffic | None = None
        self._last_traffic: TierTraffic | None = None
        self._close_traffic()

    def begin(self) -> None:
        """A phase begins."""
        self._began, self._stalled_before = self._clock(), self._stalled()

    def end(self, phase: StepPhase, *, update_seconds: float) -> None:
        """It is over. ``update_seconds``: the part of it that the update of weights took, which counts as the
        update's: the use of what was due is late, its time is not forward's."""
        seconds = self._clock() - self._began - update_seconds
        stalled = self._stalled() - self._stalled_before
        self.times = self.times.plus(**{_FIELDS[phase]: seconds}, stall_seconds=stalled)
        self.times = self.times.plus(update_seconds=update_seconds)

    def close(self) -> None:
        """The step is over."""
        self._last_times, self.times = self.times, StepTimes()
        self._close_traffic()

    def _clock(self) -> float:
        if self._waits_for is not None:
            torch.accelerator.synchronize(self._waits_for)
        return time.perf_counter()

    @transforms.apart
    def _stalled(self) -> float:
        return self._sharded.store.stats().get("stall_seconds", 0.0)

    def report(self, step: int, live_numel_peak: int) -> IoReport:
        return IoReport.of(
            step=step,
            times=self._last_times,
            live_numel_peak=live_numel_peak,
            last_step=self._last_traffic,
            tenant=self._tenant_stats(),
            labels=self._labels,
            stored_as=self._sharded.precision.stored_as(),
        )

    def _close_traffic(self) -> None:
        tenant = self._tenant_stats()
        if tenant is not None:
            total = TierTraffic.of(tenant.total, self._labels)
            self._last_traffic = None if self._traffic is None else total.since(self._traffic)
            self._traffic = total

    def _tenant_stats(self) -> TenantStats | None:
        host = self._sharded.host_store
        return None if host is None else host.tenant_stats()

"""io_report: the last step's traffic is the difference of totals, from the first step on."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.step_record import StepRecord
from infinity.report import IoReport
from infinity.states import StepPhase
from infinity.weights.sharded_model import ShardedModel
from io_daemon.shared.protocol import ObjectKind


def steps(swap_dir: Path, num_steps: int) -> list[IoReport]:
    offload = {"device": "nvme", "nvme_path": str(swap_dir)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "io_daemon": {"host_budget_bytes": 2 << 20},
    }
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])
    reports = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        reports.append(engine.io_report())
        for _ in range(num_steps):
            engine.backward(engine(torch.ones(1, 400)).sum())
            engine.step()
            reports.append(engine.io_report())
    return reports


def test_what_step_takes_is_all_the_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting in it, too, and not the stepping of weights alone."""
    seconds = [0.0]
    monkeypatch.setattr("infinity.engine.step_record.time.perf_counter", lambda: seconds[0])
    record = StepRecord(cast(ShardedModel, _NoDaemon()))
    for phase, late in ((StepPhase.FORWARD, 2.0), (StepPhase.BACKWARD, 0.0), (StepPhase.OPTIMIZER, 1.0)):
        record.begin()
        seconds[0] += 5.0
        record.end(phase, update_seconds=late)
    times = record.times
    assert (times.forward_seconds, times.backward_seconds, times.update_seconds) == (3.0, 5.0, 7.0)
    assert times.stall_seconds == 3 * 0.5


class _NoDaemon:
    """What a record asks of a model, of which every look finds half a second more that was waited for."""

    def __init__(self) -> None:
        self.precision = self.store = self
        self.state_kinds: dict[str, ObjectKind] = {}
        self.host_store = None
        self._waited = 0.0

    def stats(self) -> dict[str, float]:
        self._waited += 0.5
        return {"stall_seconds": self._waited}


def test_each_step_reports_its_own_traffic(tmp_path: Path) -> None:
    before, *after = steps(tmp_path, 3)
    assert before.nvme is None
    assert before.nvme_total is not None
    assert [report.step for report in after] == [1, 2, 3]
    for report in after:
        assert report.nvme is not None
        assert report.nvme.total_bytes > 0, "16 bytes per parameter do not fit into the budget"
        assert report.times.seconds > 0
        assert 0 <= report.times.stall_seconds <= report.times.seconds
        assert report.nvme.bytes_read["exp_avg"] <= 4 * 4 * 160_400 + 4 * 4096
    totals = [report.nvme_total.total_bytes for report in after if report.nvme_total is not None]
    assert totals == sorted(totals)
    assert after[-1].as_dict()["nvme"]["hit_rate"] <= 1

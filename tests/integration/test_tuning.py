"""From a sweep to training: the section it emits is accepted, and "auto" in a job's config means what it found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import parse_config
from infinity.tiers.connection import DaemonConnection
from io_daemon.bench.sweep import io_daemon_section
from io_daemon.bench.sweep_plan import Cell
from io_daemon.machine.tuning import Tuning, remember
from io_daemon.rank.connection import Connection
from io_daemon.shared.control import Status, StatusRequest

CHOSEN = Cell("posix", 1 << 17, 4)


def nvme_config(swap_dir: Path, section: dict[str, Any]) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(swap_dir)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "io_daemon": {"host_budget_bytes": 64 << 20, **section},
    }


def daemon_settings(config: dict[str, Any]) -> tuple[str, int, int]:
    """Engine, block bytes and queue depth of the daemon that training starts."""
    engine, *_ = infinity.initialize(model=torch.nn.Linear(64, 64), config=config)
    with engine:
        tier = engine._loop.tier
        if not isinstance(tier, DaemonConnection):
            raise AssertionError(config)
        connection, _ = Connection.open(str(tier.socket_path), timeout_s=10.0)
        try:
            answer, _ = connection.request(StatusRequest(), Status, timeout_s=10.0)
        finally:
            connection.close()
    return answer.daemon.devices[0].engine, answer.daemon.block_bytes, answer.daemon.queue_depth


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_STATE_DIR", str(tmp_path / "state"))
    remember([tmp_path], Tuning(engine="posix", block_bytes=CHOSEN.bs, queue_depth=CHOSEN.iodepth))


@pytest.mark.parametrize("section", [{}, {"engine": "auto", "block_size": "auto", "queue_depth": "auto"}])
def test_auto_is_what_the_sweep_found(section: dict[str, Any], tmp_path: Path) -> None:
    assert daemon_settings(nvme_config(tmp_path, section)) == CHOSEN


def test_a_setting_of_ones_own_wins(tmp_path: Path) -> None:
    section = {"engine": "require:posix", "block_size": 65536, "queue_depth": 2}
    assert daemon_settings(nvme_config(tmp_path, section)) == ("posix", 65536, 2)


def test_the_emitted_section_is_accepted_and_used(tmp_path: Path) -> None:
    config = nvme_config(tmp_path, io_daemon_section([tmp_path], CHOSEN))
    assert parse_config(config).io_daemon.block_size == CHOSEN.bs
    assert daemon_settings(config) == CHOSEN

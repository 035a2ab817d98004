"""Engines that are started and destroyed one after the other leave nothing: no files, threads, processes or objects."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity.deepspeed as deepspeed

WARM = 2
"""Engines after which everything is there that stays: imports, caches, torch's threads."""
OBJECTS_MAX = 200
"""What caches of torch and Python may grow by, beside some 10,000 objects of an engine."""
ANONYMOUS_MAX = 4 << 20
"""Of the C heap; an engine's arena alone has 32 MiB."""


def _train(tier: str, directory: Path, ends: str) -> None:
    place = {"device": tier, "nvme_path": str(directory)}
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": zero
            | ({} if tier == "none" else {"offload_param": place, "offload_optimizer": place}),
            "io_daemon": {"host_budget_bytes": 32 << 20},
        },
    )[0]
    for number in range(2):
        loss = engine(torch.ones(4, 64)).pow(2).mean()
        engine.backward(loss) if number else loss.backward()
        engine.step()
    if ends == "destroyed":
        engine.destroy()


def _held() -> dict[str, int]:
    gc.collect()
    own = Path("/proc/self")
    maps = (own / "maps").read_text()
    return {
        "files": len(os.listdir(own / "fd")),
        "threads": len(os.listdir(own / "task")),
        "children": len((own / "task" / str(os.getpid()) / "children").read_text().split()),
        "arenas": maps.count("infinity-") + maps.count("memfd:"),
    }


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("ends", ["destroyed", "collected"])
@pytest.mark.parametrize(
    ("tier", "count"),
    [
        ("none", 6),
        ("nvme", 3),  # each starts a daemon of its own
        pytest.param("none", 50, marks=pytest.mark.slow),
        pytest.param("nvme", 50, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_nothing_is_left_of_engines_that_ended(tier: str, count: int, ends: str, tmp_path: Path) -> None:
    for _ in range(WARM):
        _train(tier, tmp_path, ends)
    held, num_objects, anonymous = _held(), len(gc.get_objects()), _anonymous_bytes()
    for _ in range(count):
        _train(tier, tmp_path, ends)
    assert _held() == held
    assert len(gc.get_objects()) - num_objects < OBJECTS_MAX
    assert _anonymous_bytes() - anonymous < ANONYMOUS_MAX
    assert not list(tmp_path.iterdir())

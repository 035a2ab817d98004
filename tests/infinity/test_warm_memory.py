"""Steady steps touch no new memory, what is live bounds it, and its end gives it back."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.weights.heap import return_freed
from tests.infinity.tiers.test_pool import anonymous_bytes

WIDTH, DEPTH = 1024, 8
LAYER_BYTES = WIDTH * WIDTH * 2
PAGE_BYTES = 4096
NOISE_BYTES = 8 << 20
"""Of Python, torch and the C heap, beside 17 MB of weights."""


pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(tier: str, directory: Path, live_numel: int = 0) -> Engine:
    offload = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    zero = {
        "stage": 3,
        "stage3_max_live_parameters": live_numel,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        "offload_param": offload,
        "offload_optimizer": offload,
    }
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        "io_daemon": {"host_budget_bytes": 1 << 30},
    }
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    return infinity.initialize(model=model, config=config)[0]


def train(engine: Engine, num_steps: int) -> None:
    for step in range(num_steps):
        inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        engine.backward(engine(inputs).square().mean())
        engine.step()


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settled_bytes() -> int:
    gc.collect()
    return_freed()
    return anonymous_bytes()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_steady_step_faults_on_next_to_nothing(tier: str, tmp_path: Path) -> None:
    with engine_of(tier, tmp_path) as engine:
        train(engine, 6)  # until this process has seen every frame that is used
        before = page_faults()
        train(engine, 8)
        per_step = (page_faults() - before) / 8
    # all layers come and go, twice a step; a host may take pages of its guests in between, which fault once more
    assert per_step < DEPTH * LAYER_BYTES / PAGE_BYTES / 2


def test_the_pool_grows_to_what_is_live_and_no_further(tmp_path: Path) -> None:
    with engine_of("nvme", tmp_path, live_numel=2 * WIDTH * WIDTH) as engine:
        before = settled_bytes()
        train(engine, 6)
        grown = settled_bytes() - before
    assert grown < 3 * LAYER_BYTES + NOISE_BYTES


@pytest.mark.parametrize("end", ["destroy", "empty_partition_cache"])
def test_memory_of_gradients_in_memory_goes_back_at(end: str, tmp_path: Path) -> None:
    """They have died: only their pages were kept warm for the next ones."""
    engine_of("none", tmp_path).destroy()
    before = settled_bytes()
    engine = engine_of("none", tmp_path, live_numel=1 << 30)
    train(engine, 3)
    engine(torch.zeros(2, WIDTH).bfloat16())
    held = settled_bytes()
    getattr(engine, end)()
    assert held - settled_bytes() > 2 * DEPTH * LAYER_BYTES - NOISE_BYTES, "weights that were live, and gradients"
    engine.destroy()
    assert settled_bytes() - before < NOISE_BYTES, "though the engine is still there"


@pytest.mark.parametrize("end", ["destroy", "offload_states", "empty_partition_cache"])
def test_memory_goes_back_at(end: str, tmp_path: Path) -> None:
    engine_of("nvme", tmp_path).destroy()  # what the first engine of a process imports stays
    before = settled_bytes()
    engine = engine_of("nvme", tmp_path, live_numel=1 << 30)
    settled = settled_bytes()
    train(engine, 3)
    engine(torch.zeros(2, WIDTH).bfloat16())  # a training forward leaves the weights where they are
    held = settled_bytes()
    assert held - settled > DEPTH * LAYER_BYTES - NOISE_BYTES
    if end == "offload_states":
        engine.zero_grad()
    getattr(engine, end)()
    assert held - settled_bytes() > DEPTH * LAYER_BYTES - NOISE_BYTES
    engine.destroy()
    assert settled_bytes() - before < NOISE_BYTES

"""The demo's training run: a configuration from the model's size, then one record a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import infinity
from infinity.commands.demo.model import ByteGPT
from infinity.commands.demo.text import windows
from infinity.report import IoReport

MIB = 1 << 20
BUDGET_SHARE = 3
"""The host budget is at most one part in three of the model's state."""
STATE_BYTES_PER_PARAMETER = {torch.float32: 12, torch.bfloat16: 14}
"""Weight, fp32 master weight where the weight is 16-bit, and two fp32 moments; gradients come on top."""
LAYER_NUMEL = 13_000_000
"""A little more than one layer: what is gathered ahead, and the measure of what may be unsharded at once."""
PROBE_ROWS, PROBE_REPEATS = 512, 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    swap_dir: Path
    dtype: torch.dtype
    num_steps: int
    batch: int = 8
    sequence: int = 64
    learning_rate: float = 6e-4
    warm_up_steps: int = 20
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    index: int
    loss: float
    """Nats a byte."""
    seconds: float
    tokens_per_s: float
    resident_bytes: int
    nvme_bytes: int
    """Space that is reserved for the state on NVMe."""
    read_bytes: int
    written_bytes: int
    hit_rate: float
    stall_s: float

    @property
    def read_gb_s(self) -> float:
        return self.read_bytes / self.seconds / 1e9

    @property
    def written_gb_s(self) -> float:
        return self.written_bytes / self.seconds / 1e9


def faster_dtype() -> torch.dtype:
    """bf16 or fp32, whichever multiplies this model's matrices faster here: many CPUs have no bf16 arithmetic."""
    if torch.accelerator.is_available():
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        rows, matrix = (
            torch.ones(PROBE_ROWS, 1024, dtype=dtype, device="cpu"),
            torch.ones(4096, 1024, dtype=dtype, device="cpu"),
        )
        F.linear(rows, matrix)
        started = time.perf_counter()
        for _ in range(PROBE_REPEATS):
            F.linear(rows, matrix)
        seconds[dtype] = time.perf_counter() - started
    return min(seconds, key=lambda dtype: seconds[dtype])


def state_bytes(num_parameters: int, dtype: torch.dtype) -> int:
    """What Adam keeps between steps."""
    return num_parameters * STATE_BYTES_PER_PARAMETER[dtype]


def host_budget_bytes(num_parameters: int, dtype: torch.dtype) -> int:
    """The largest whole number of MiB within the share."""
    return state_bytes(num_parameters, dtype) // BUDGET_SHARE // MIB * MIB


def count_parameters(settings: Settings) -> int:
    with torch.device("meta"):
        model = ByteGPT(sequence=settings.sequence)
    return sum(parameter.numel() for parameter in model.parameters())


def engine_config(settings: Settings, budget_bytes: int, socket: Path) -> dict[str, Any]:
    """``socket``: of a daemon that serves the settings' directory."""
    offload = {"device": "nvme", "nvme_path": str(settings.swap_dir)}
    return {
        "train_micro_batch_size_per_gpu": settings.batch,
        "bf16": {"enabled": settings.dtype is torch.bfloat16},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": settings.learning_rate, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_max_lr": settings.learning_rate,
                "warmup_num_steps": settings.warm_up_steps,
                "warmup_type": "linear",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": LAYER_NUMEL,
            "stage3_max_live_parameters": 3 * LAYER_NUMEL,
            "stage3_max_reuse_distance": 2 * LAYER_NUMEL,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"socket": str(socket), "host_budget_bytes": budget_bytes},
    }


def train(
    settings: Settings, text: torch.Tensor, config: dict[str, Any], on_step: Callable[[StepRecord], None]
) -> None:
    """Train from construction to the last step; the engine and its swap files are gone afterwards."""
    torch.manual_seed(settings.seed)
    with infinity.Init(config_dict_or_path=config):
        model = ByteGPT(sequence=settings.sequence)
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = windows(text, batch=settings.batch, sequence=settings.sequence, seed=settings.seed)
    try:
        before = engine.io_report()
        for index in range(settings.num_steps):
            started = time.perf_counter()
            loss = engine(next(batches).to(engine.device))
            engine.backward(loss)
            engine.step()
            value, seconds = float(loss.detach()), time.perf_counter() - started
            after = engine.io_report()
            on_step(_record(index, value, seconds, settings, before, after))
            before = after
    finally:
        engine.destroy()


def _record(
    index: int, loss: float, seconds: float, settings: Settings, before: IoReport, after: IoReport
) -> StepRecord:
    """One step's share of the totals since ``initialize``."""
    if before.nvme_total is None or after.nvme_total is None:
        raise RuntimeError("the engine trains without a daemon")
    old, new = before.nvme_total, after.nvme_total
    asked = new.hits + new.misses - old.hits - old.misses
    return StepRecord(
        index=index,
        loss=loss,
        seconds=seconds,
        tokens_per_s=settings.tokens_per_step / seconds,
        resident_bytes=sum(after.resident_bytes.values()),
        nvme_bytes=after.swap_bytes,
        read_bytes=sum(new.bytes_read.values()) - sum(old.bytes_read.values()),
        written_bytes=sum(new.bytes_written.values()) - sum(old.bytes_written.values()),
        hit_rate=(new.hits - old.hits) / asked if asked else 1.0,
        stall_s=after.times.stall_seconds,
    )

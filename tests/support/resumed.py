"""A small training that is saved and gone on with: every kind of state that a checkpoint holds is in use."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

import infinity

ROWS = 4


class Model(nn.Module):
    """Dropout, running statistics, a frozen layer, a shared weight, a weight in channels-last order, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.norm = nn.BatchNorm1d(96)
        self.image = nn.Parameter(torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last))
        self.tied = nn.Linear(96, 16, bias=False)
        self.again = nn.Linear(96, 16)
        self.again.weight = self.tied.weight
        self.scratch: torch.Tensor
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        self.scratch += 1
        h = torch.dropout(self.norm(self.frozen(torch.tanh(self.first(x)))), 0.1, self.training)
        h = h * self.image.mean(0).reshape(-1)
        out: torch.Tensor = self.tied(h) + self.again(h) + self.scratch.sum().to(h.dtype) * 1e-3
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def config_of(
    tier: str = "none", precision: str = "fp32", stage: int = 3, swap_dir: object = None, **more: Any
) -> dict[str, Any]:
    device = {"device": tier, **({"nvme_path": str(swap_dir)} if tier == "nvme" else {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 30}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 16384,
            **({"offload_param": device} if stage == 3 else {}),
            "offload_optimizer": device,
        },
        "fp16": {"enabled": precision == "fp16", "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1},
        "bf16": {"enabled": precision == "bf16"},
        "io_daemon": {"host_budget_bytes": 1 << 24, "block_size": 65536},
    }
    return {**config, **more}


def started(config: dict[str, Any], seed: int = 0, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return infinity.initialize(model=Model(), config=config, **arguments)[0]


def train(engine: Any, num_steps: int) -> list[float]:
    """The losses of ``num_steps`` steps on batches that all generators draw."""
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for _ in range(num_steps * engine.gradient_accumulation_steps()):
        batch = torch.randn(ROWS, 16) + random.random() + np.random.random()
        loss = engine(batch.to(dtype)).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def everything_of(engine: Any) -> dict[str, torch.Tensor]:
    """Weights, master weights, states and buffers, by name."""
    found = {f"weight {name}": value for name, value in engine.full_state_dict().items() if torch.is_tensor(value)}
    found |= {f"master {name}": value for name, value in engine.full_master_state_dict().items()}
    for name, param in engine.module.named_parameters():
        for state in engine.optimizer.rule.states if param.requires_grad else ():
            value = infinity.utils.safe_get_full_optimizer_state(param, state)
            if value is not None:
                found[f"{state} {name}"] = value
    found |= {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    return found


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    if left.keys() != right.keys():
        raise AssertionError(f"other names: {sorted(left.keys() ^ right.keys())}")
    return [name for name, value in left.items() if not torch.equal(value, right[name])]

"""How much disk space training needs: its state's, also where the model was built under ``Init`` on the same disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import SwapSpaceError
from tests.conftest import MountTmpfs
from tests.support.reference import differing_bits

WIDTH, DEPTH = 512, 4
NUMEL = DEPTH * WIDTH * WIDTH
STAGED_BYTES, STATE_BYTES = 4 * NUMEL, 16 * NUMEL
SLACK = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(self.get_parameter("layers.0.weight").dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.float().square().mean()


def config_of(directory: Path | None) -> dict[str, Any]:
    offload = {"device": "none"} if directory is None else {"device": "nvme", "nvme_path": str(directory)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": WIDTH * WIDTH,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": 4 << 20},
    }


def losses(directory: Path | None, *, num_steps: int = 3) -> torch.Tensor:
    config = config_of(directory)
    torch.manual_seed(0)
    with infinity.Init(config_dict_or_path=config):
        model = Net()
    engine, *_ = infinity.initialize(model=model, config=config)
    found = []
    try:
        for step in range(num_steps):
            loss = engine(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)))
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
    finally:
        engine.destroy()
    return torch.stack(found)


def test_a_model_built_under_init_needs_the_space_of_its_state_and_no_more(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs(STATE_BYTES + SLACK)  # which what was staged leaves before the rest of the state comes
    assert SLACK < STAGED_BYTES
    assert differing_bits(losses(disk), losses(None)) == 0
    assert not list(disk.iterdir())


def test_a_disk_that_is_too_small_is_told_before_anything_is_taken_over(mount_tmpfs: MountTmpfs) -> None:
    disk = mount_tmpfs(STATE_BYTES - SLACK)
    config = config_of(disk)
    with infinity.Init(config_dict_or_path=config):
        model = Net()
    with pytest.raises(SwapSpaceError) as caught:
        infinity.initialize(model=model, config=config)
    assert STATE_BYTES <= caught.value.needed_bytes < STATE_BYTES + SLACK
    assert caught.value.free_bytes < STATE_BYTES
    assert str(disk) in caught.value.path

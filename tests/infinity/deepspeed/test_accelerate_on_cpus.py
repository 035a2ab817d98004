"""Accelerate asks for no backend where it sees no GPU, and would count one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip("accelerate")

COUNTING = """
import json
import infinity.deepspeed as deepspeed
deepspeed.install()
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from infinity.errors import ConfigError

config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False}
seen = []
for counted in (None, None, 1):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(config)))
    if counted is not None:
        AcceleratorState._shared_state["num_processes"] = counted
    model = torch.nn.Linear(4, 2)
    try:
        _, _, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters()), DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=2)
        )
        firsts = [batch[0, 0].item() for batch in loader]
        seen.append([accelerator.num_processes, accelerator.process_index, *firsts])
    except ConfigError as error:
        seen.append(str(error))
    accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=True)
print(json.dumps(seen))
"""


def test_it_is_told_the_backend_and_shares_the_data_out(tmp_path: Path) -> None:
    """Where it starts torch.distributed itself, where that runs already, and where it counts others all the same."""
    ended = run_ranks(COUNTING, tmp_path, num_ranks=2)
    for rank, (started, found, refused) in enumerate(each.answer for each in ended):
        assert started == found == [2, rank, 8.0 * rank, 16 + 8.0 * rank]
        assert refused.startswith("accelerator.num_processes = 1: there are 2 ranks, ")
        assert 'InitProcessGroupKwargs(backend="gloo")' in refused

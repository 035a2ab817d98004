"""Random numbers are the script's: whatever it calls, and whatever is imported then, draws none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import quiet_environment

SCRIPT = """
import json, random, sys
import numpy as np
import torch
import infinity

swap, saved = sys.argv[1:]

def drawn():
    return [str(random.getstate()), str(np.random.get_state()), str(torch.get_rng_state().tolist())]

model = torch.nn.Linear(16, 16)
place = {"device": "nvme", "nvme_path": swap}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    "io_daemon": {"host_budget_bytes": 1 << 24},
}
if "terminal" in saved:
    sys.stderr.isatty = lambda: True
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
before = drawn()
engine = infinity.initialize(model=model, config=config)[0]
engine.backward(engine(torch.ones(2, 16)).square().mean())
engine.step()
engine.save_checkpoint(saved)
engine.save_checkpoint(saved, asynchronous=True)
engine.load_checkpoint(saved, load_module_only=True)
engine.save_16bit_model(saved)
infinity.load_pretrained(engine, saved)
engine.io_report()
engine.destroy()
print(json.dumps([one == other for one, other in zip(before, drawn())]))
"""


@pytest.mark.parametrize("shown", ["nowhere", "on a terminal"])
def test_an_engine_draws_nothing(shown: str, tmp_path: Path) -> None:
    """In a process that has imported nothing before: rich draws when it is imported."""
    swap = tmp_path / "swap"
    swap.mkdir()
    words = [sys.executable, "-c", SCRIPT, str(swap), str(tmp_path / shown)]
    done = subprocess.run(words, env=quiet_environment(), capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == [True, True, True], done.stderr

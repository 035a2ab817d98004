"""The caller's autocast keeps a cast of every weight until it ends; of a sharded model it keeps none."""

from __future__ import annotations

import subprocess
import sys

from tests.support.forkserver import REPOSITORY

SCRIPT = """
import os, torch, infinity
from torch import nn
from infinity.weights import autocast
from infinity.weights.heap import return_freed

WIDTH, DEPTH = 1024, 12
torch.set_num_threads(1)
model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
config["io_daemon"] = {"update": "in_step"}  # or a forward would free the gradients of the step before
engine = infinity.initialize(model=model, config=config)[0]
x = torch.randn(2, WIDTH)

def resident():
    return_freed()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def growth():
    before = resident()
    with torch.autocast("cpu", torch.bfloat16):
        output = engine(x)
        grown = resident() - before
    engine.backward(output.float().sum())
    engine.step()
    return grown

growth()
ours = growth()
autocast.CastOnce.empty = lambda self: None
print(ours, growth(), 2 * WIDTH * WIDTH * DEPTH)
"""


def test_after_forward_no_casts_are_left() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, kept, all_casts = map(int, done.stdout.split())
    assert kept > 0.8 * all_casts, "what torch would keep is seen here"
    assert ours < 0.2 * all_casts
    print(f"{ours / 2**20:.1f} MiB of {all_casts / 2**20:.1f} MiB of casts stay, without us {kept / 2**20:.1f} MiB")

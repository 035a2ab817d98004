"""Scripts that end as users' scripts do: nothing is printed at exit, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.forkserver import REPOSITORY

HEAD = """
    import torch, infinity
    from torch import nn
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {
        "stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
        "offload_param": OFFLOAD, "offload_optimizer": OFFLOAD}, "io_daemon": {"host_budget_bytes": 64 << 20}}
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    engine, optimizer, _, _ = infinity.initialize(model=model, config=config)
    loss = engine(torch.ones(2, 32)).square().mean()
    engine.backward(loss)
    engine.step()
"""

ENDINGS = {
    "forgets_destroy": "",
    "destroys": "engine.destroy()",
    "destroys_twice": "engine.destroy(); engine.destroy()",
    "drops_the_engine": "del engine, optimizer",
    "keeps_everything_in_a_function": "import sys; sys.kept = [engine, model, loss, model[0].weight]",
    "keeps_a_graph": "kept = engine(torch.ones(2, 32))",
    "exits_in_the_middle": "engine(torch.ones(2, 32)); raise SystemExit(0)",
}


def run(ending: str, swap_dir: Path | None) -> subprocess.CompletedProcess[str]:
    offload = {"device": "none"} if swap_dir is None else {"device": "nvme", "nvme_path": str(swap_dir)}
    script = textwrap.dedent(HEAD).replace("OFFLOAD", repr(offload)) + ENDINGS[ending]
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)


QUICK = ("forgets_destroy", "keeps_a_graph")


@pytest.mark.parametrize("ending", [pytest.param(e, marks=[] if e in QUICK else pytest.mark.slow) for e in ENDINGS])
def test_nothing_is_printed(ending: str) -> None:
    done = run(ending, None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["forgets_destroy", "drops_the_engine", "destroys"])
def test_nothing_is_left_on_disk(ending: str, tmp_path: Path) -> None:
    done = run(ending, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [path for path, _, files in os.walk(tmp_path) if files]
    running = subprocess.run(["pgrep", "-f", f"swap-dir {tmp_path}"], capture_output=True, text=True, check=False)
    assert running.stdout == ""

"""Saving and loading beside ``torch.save`` and ``torch.load`` of the same bytes, and the memory that it takes.

``python -m benchmarks.checkpoint --swap-dir DIR``: a model whose fp32 weights and AdamW states are four times the host
budget, all of it on NVMe. What is saved is synced, and dropped from the page cache before it is loaded. The peak is a
sum of PSS over the process tree; exit code 0 if saving and loading add to the engine at rest, arena included, no more
than 15% of the interpreter's own and the largest parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from benchmarks.side import keep_results
from infinity.commands.demo.footprint import FootprintSampler, process_tree, pss_bytes

MIB = 1 << 20
WIDTH = 1024
STATE_PER_BUDGET = 4
BYTES_PER_PARAM = 12
BASELINE_SHARE = 0.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", required=True, help="for swap files and checkpoints")
    parser.add_argument("--budget-mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=arguments.swap_dir) as name:
        figures = measure(Path(name), arguments.budget_mib * MIB, arguments.rounds)
    print(json.dumps(figures, indent=2))
    keep_results("checkpoint", figures)
    raise SystemExit(0 if figures["peak_pss_bytes"] <= figures["limit_bytes"] else 1)


def measure(directory: Path, budget_bytes: int, rounds: int) -> dict[str, Any]:
    """All figures of one run: rounds of ours, then, when the engine has given its memory back, of torch's."""
    baseline = _pss()
    engine, swap = _engine(directory, budget_bytes), directory / "swap"
    idle = _pss()
    seconds: dict[str, list[float]] = {"save": [], "load": [], "torch.save": [], "torch.load": []}
    sampler = FootprintSampler(os.getpid(), swap).start()
    for _ in range(rounds):
        seconds["save"].append(_timed(lambda: engine.save_checkpoint(directory / "saved", tag="x")))
        _drop_cache(directory / "saved" / "x")
        seconds["load"].append(_timed(lambda: engine.load_checkpoint(directory / "saved")))
    peak = sampler.stop().peak_pss
    num_params = sum(param.numel() for param in engine.module.parameters())
    engine.destroy()
    state = {kind: torch.randn(num_params) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    for _ in range(rounds):
        seconds["torch.save"].append(_timed(lambda: _torch_save(state, directory / "torch.pt")))
        _drop_cache(directory)
        seconds["torch.load"].append(_timed(lambda: torch.load(directory / "torch.pt")))
    num_bytes = num_params * BYTES_PER_PARAM
    largest = WIDTH * WIDTH * 4
    return {
        "state_bytes": num_bytes,
        "budget_bytes": budget_bytes,
        "baseline_pss_bytes": baseline,
        "idle_pss_bytes": idle,
        "peak_pss_bytes": peak,
        "limit_bytes": idle + int(baseline * BASELINE_SHARE) + largest,
        "gb_per_s": {what: round(num_bytes / statistics.median(took) / 1e9, 3) for what, took in seconds.items()},
        "seconds": {what: [round(each, 3) for each in took] for what, took in seconds.items()},
    }


def _engine(directory: Path, budget_bytes: int) -> Any:
    """An engine of a deep model of equal layers, whose states have been written once."""
    swap = directory / "swap"
    swap.mkdir()
    nvme = {"device": "nvme", "nvme_path": str(swap)}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "io_daemon": {"host_budget_bytes": budget_bytes},
    }
    num_layers = STATE_PER_BUDGET * budget_bytes // (BYTES_PER_PARAM * WIDTH * (WIDTH + 1))
    with infinity.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    engine = infinity.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()
    return engine


def _torch_save(state: object, path: Path) -> None:
    torch.save(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _drop_cache(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _pss() -> int:
    return sum(pss_bytes(pid) for pid in process_tree(os.getpid()))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

"""Saving and loading beside ``torch.save`` and ``torch.load`` of the same bytes and beside DeepSpeed, the memory that
they take, and what a save that goes on beside training costs the training.

``python -m benchmarks.checkpoint --swap-dir DIR``: a model whose fp32 weights and AdamW states are four times the host
budget, all of it on NVMe; torch and DeepSpeed (ZeRO-3) have theirs in memory. All take turns in one run. What is saved
is synced within the time that counts, and dropped from the page cache before it is loaded. The peak is a sum of PSS
over the process tree; exit code 0 if saving and loading add to the engine at rest, arena included, no more than 15% of
the interpreter's own and the largest parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from benchmarks.deepspeed_venv import environment_of, prepare_venv
from benchmarks.files_on_disk import drop_cache, sync
from benchmarks.place import add_directory
from benchmarks.side import Side, keep_results
from infinity.commands.demo.footprint import FootprintSampler, process_tree, pss_bytes
from infinity.files.direct import BLOCK_BYTES, BlockWriter, open_direct, read_block
from infinity.files.pieces import bytes_of
from io_daemon.command.scratch import scratch_directory

MIB = 1 << 20
WIDTH = 1024
STATE_PER_BUDGET = 4
BYTES_PER_PARAM = 12
BASELINE_SHARE = 0.15
READS_AHEAD = 4
STEPS_BESIDE = 6
"""Steps with a save beside them, and as many without."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser)
    parser.add_argument("--budget-mib", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepspeed-venv", type=Path, help="made where it is not there; without it, no DeepSpeed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory:
        figures = measure(directory, arguments.budget_mib * MIB, arguments.rounds, arguments.deepspeed_venv)
    print(json.dumps(figures, indent=2))
    keep_results("checkpoint", figures)
    raise SystemExit(0 if figures["peak_pss_bytes"] <= figures["limit_bytes"] else 1)


def measure(directory: Path, budget_bytes: int, rounds: int, deepspeed_venv: Path | None) -> dict[str, Any]:
    """All figures of one run: memory with the engine alone, then times in turns, then the save beside training."""
    baseline = _pss()
    num_layers = STATE_PER_BUDGET * budget_bytes // (BYTES_PER_PARAM * WIDTH * (WIDTH + 1))
    engine, swap, saved = _engine(directory, budget_bytes, num_layers), directory / "swap", directory / "saved"
    idle = _pss()
    sampler = FootprintSampler(os.getpid(), swap).start()
    for _ in range(2):
        engine.save_checkpoint(saved, tag="x")
        engine.load_checkpoint(saved)
    peak = sampler.stop().peak_pss
    beside = _beside_training(engine, directory / "late", rounds)
    num_params = sum(param.numel() for param in engine.module.parameters())
    num_bytes = num_params * BYTES_PER_PARAM
    seconds: dict[str, list[float]] = {"save": [], "load": [], "torch.save": [], "torch.load": []}
    state = {kind: torch.randn(num_params) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    with ExitStack() as stack:
        theirs = None
        if deepspeed_venv is not None:
            theirs = stack.enter_context(_deepspeed(deepspeed_venv, directory, num_layers))
            theirs.ready()
        for number in range(rounds + 1):
            took = {"save": _timed(lambda: engine.save_checkpoint(saved, tag="x"))}
            drop_cache(saved)
            took["load"] = _timed(lambda: engine.load_checkpoint(saved))
            took["torch.save"] = _timed(lambda: _torch_save(state, directory / "torch.pt"))
            drop_cache(directory / "torch.pt")
            took["torch.load"] = _timed(lambda: torch.load(directory / "torch.pt"))
            took["copy"] = _timed(lambda: _copy(directory / "torch.pt", directory / "copy"))
            if theirs is not None:
                (took["DeepSpeed save"],) = theirs.take_steps(1, measured=False)["seconds"]
                (took["DeepSpeed load"],) = theirs.take_steps(1, measured=False)["seconds"]
            if number:  # the first one makes files where there are none
                for what, each in took.items():
                    seconds.setdefault(what, []).append(each)
    engine.destroy()
    largest = WIDTH * WIDTH * 4
    return {
        "state_bytes": num_bytes,
        "budget_bytes": budget_bytes,
        "page_cache": "synced within the time of a save, dropped before a load",
        "baseline_pss_bytes": baseline,
        "idle_pss_bytes": idle,
        "peak_pss_bytes": peak,
        "limit_bytes": idle + int(baseline * BASELINE_SHARE) + largest,
        "gb_per_s": {what: round(num_bytes / statistics.median(took) / 1e9, 3) for what, took in seconds.items()},
        "seconds": {what: [round(each, 3) for each in took] for what, took in seconds.items()},
        "beside_training": beside,
    }


def _beside_training(engine: Any, directory: Path, rounds: int) -> dict[str, Any]:
    """Steps with and without a save beside them, in turns; and how long training stood still for it."""

    def steps() -> float:
        def run() -> None:
            for _ in range(STEPS_BESIDE):
                engine.backward(engine(torch.ones(1, WIDTH, device=engine.device)).square().mean())
                engine.step()

        return _timed(run)

    alone, beside, held_up = [], [], []
    steps()
    for _ in range(rounds):
        alone.append(steps())
        begun = time.perf_counter()
        engine.save_checkpoint(directory, tag="x", asynchronous=True)
        work = engine._loop.background.work
        call = time.perf_counter() - begun
        beside.append(call + steps())
        engine.wait_for_checkpoint()
        held_up.append(work.held_up_s)
    step = statistics.median(alone) / STEPS_BESIDE
    return {
        "step_seconds": round(step, 3),
        "held_up_seconds": [round(each, 4) for each in held_up],
        "held_up_share_of_a_step": round(statistics.median(held_up) / step, 4),
        f"seconds_of_{STEPS_BESIDE}_steps_alone": [round(each, 3) for each in alone],
        f"seconds_of_{STEPS_BESIDE}_steps_with_it": [round(each, 3) for each in beside],
        "share_of_a_step_in_all": round((statistics.median(beside) - statistics.median(alone)) / step, 3),
    }


def _deepspeed(venv: Path, directory: Path, num_layers: int) -> Side:
    place = directory / "deepspeed"
    place.mkdir()
    words = ["--directory", str(place), "--width", str(WIDTH), "--num-layers", str(num_layers)]
    python = prepare_venv(venv)
    return Side(
        "DeepSpeed",
        python=python,
        module="benchmarks.deepspeed_checkpoint",
        arguments=words,
        swap_dir=place,
        log=directory / "deepspeed.log",
        environment=environment_of(python),
        sampled=False,
    )


def _engine(directory: Path, budget_bytes: int, num_layers: int) -> Any:
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
    with infinity.Init(config_dict_or_path=config):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    engine = infinity.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(1, WIDTH, device=engine.device)).square().mean())
    engine.step()
    return engine


def _torch_save(state: object, path: Path) -> None:
    torch.save(state, path)
    sync(path)


def _copy(source: Path, target: Path) -> None:
    """Past the page cache and synced, reads ahead of the writes as a save has them."""
    target.unlink(missing_ok=True)
    descriptor, writer = open_direct(source, os.O_RDONLY), BlockWriter(target)
    with ThreadPoolExecutor(READS_AHEAD) as readers:
        begins = iter(range(0, source.stat().st_size, BLOCK_BYTES))
        ahead = deque(
            readers.submit(read_block, descriptor, begin, begin + BLOCK_BYTES) for begin in islice(begins, READS_AHEAD)
        )
        while ahead:
            writer.append(bytes_of(ahead.popleft().result()))
            ahead.extend(
                readers.submit(read_block, descriptor, begin, begin + BLOCK_BYTES) for begin in islice(begins, 1)
            )
    writer.finish()
    writer.close()
    os.close(descriptor)


def _pss() -> int:
    return sum(pss_bytes(pid) for pid in process_tree(os.getpid()))


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()

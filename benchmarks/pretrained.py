"""Memory of weights that come from files and go to files, against the budget and at two sizes of one model.

``python -m benchmarks.pretrained --dir DIR``: GPTs of 0.3 and 1.2 billion parameters, whose bf16 safetensors are made
on the spot; then, in a process of its own, ``load_pretrained`` of a model on the meta device, ``initialize``,
``load_pretrained`` into the engine, ``save_16bit_model``, ``save_checkpoint``, ``load_checkpoint``, ``infinity
export``, and ``infinity import-deepspeed`` of a ZeRO-1 checkpoint of the same model. Printed is the peak of the sum of
PSS over the process and its daemon in each phase. Exit code 0 if no phase takes more than the budget, the largest
parameter in fp32, and 1.15 times what the process has after its imports, and the weights that come out are those that
went in. Imports are those of any training: torch imports a third of itself (its compiler) when the first optimizer is
made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import infinity
from benchmarks.gpt import GPT, GPTShape
from benchmarks.place import add_directory
from benchmarks.side import keep_results
from infinity.commands.cli import main as command
from infinity.commands.demo.footprint import process_tree, pss_of
from infinity.engine import Engine
from infinity.files.directory import WeightsDirectory
from infinity.files.entry import Entry
from infinity.files.export import Export
from io_daemon.command.scratch import scratch_directory

MIB = 1 << 20
SIZES = {"small": GPTShape(d_model=1536, num_layers=10), "large": GPTShape(d_model=2048, num_layers=24)}
SAMPLE_S = 0.2


def pss_now(above: int = 0) -> tuple[int, int]:
    """PSS of this process, and of all its children together; one that ends meanwhile counts nothing."""
    own, *children = pss_of(process_tree(os.getpid()), above).values()
    return own, sum(children)


class Peaks:
    """Samples this process and its children in a thread; a peak for each phase."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self._peak = (0, 0)
        self._lock = threading.Lock()
        """A sample that began in one phase is not the next one's."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            with self._lock:
                self._peak = max(self._peak, pss_now(above=sum(self._peak)), key=sum)

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        with self._lock:
            self._peak, begun = pss_now(), time.monotonic()
        result = work()
        peak, seconds = self._peak, time.monotonic() - begun
        self.phases[phase] = {"peak_pss_bytes": sum(peak), "of_it_the_daemon": peak[1], "seconds": seconds}
        return result

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def make_weights(shape: GPTShape, directory: Path) -> None:
    """Seeded values, each parameter made alone."""
    with torch.device("meta"):
        model = GPT(shape)
    entries = {name: Entry(dtype=torch.bfloat16, shape=tuple(p.shape)) for name, p in model.named_parameters()}
    with Export(directory, entries, max_shard_bytes=500_000_000) as export:
        for number, (name, entry) in enumerate(entries.items()):
            generator = torch.Generator().manual_seed(number)
            export.write(name, 0, (torch.randn(entry.numel, generator=generator) * 0.02).bfloat16())
        export.publish()


def make_deepspeed_checkpoint(shape: GPTShape, directory: Path) -> None:
    """What ZeRO-1 writes of one rank: fp32 weights and AdamW's moments, each of them one vector, of zeros."""
    with torch.device("meta"):
        shapes = OrderedDict((name, param.shape) for name, param in GPT(shape).named_parameters())
    place = directory / "global_step1"
    place.mkdir(parents=True)
    (directory / "latest").write_text(place.name)
    numel = sum(each.numel() for each in shapes.values())
    weights, *moments = (
        torch.from_file(str(directory / f"vector{number}"), shared=True, size=numel) for number in range(3)
    )
    state = {0: {"step": torch.tensor(1.0), **dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))}}
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}]
    optimizer = {
        "zero_stage": 1,
        "loss_scaler": None,
        "partition_count": [1],
        "base_optimizer_state": {"state": state, "param_groups": groups},
        "single_partition_of_fp32_groups": [weights],
    }
    common = {"ds_version": "0.19.8", "ds_config": {}}
    torch.save({"optimizer_state_dict": optimizer, **common}, place / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    model: dict[str, Any] = {
        "module": OrderedDict(),
        "buffer_names": [],
        "param_shapes": [shapes],
        "frozen_param_shapes": {},
    }
    counters: dict[str, Any] = {
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 1,
        "global_samples": 1,
        "skipped_steps": 0,
    }
    torch.save({**model, **counters, **common}, place / "mp_rank_00_model_states.pt")
    for vector in directory.glob("vector*"):
        vector.unlink()


def config_of(directory: Path, budget_mib: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(directory / "swap")}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
        "io_daemon": {"host_budget_bytes": budget_mib * MIB},
    }


def worker(shape: GPTShape, directory: Path, budget_mib: int) -> dict[str, Any]:
    """All phases of one size."""
    peaks = Peaks()
    peaks.run("imports", lambda: time.sleep(1.0))
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(8, 8))])
    peaks.run("imports with an optimizer", lambda: time.sleep(1.0))
    settings = config_of(directory, budget_mib)
    with torch.device("meta"):
        model = GPT(shape)
    weights = directory / "weights"

    def start() -> Engine:
        infinity.load_pretrained(model, weights)
        return infinity.initialize(model=model, config=settings)[0]

    engine = peaks.run("load (meta), initialize", start)
    peaks.run("load (engine)", lambda: infinity.load_pretrained(engine, weights))
    peaks.run("save_16bit_model", lambda: engine.save_16bit_model(directory / "saved", max_shard_size="500MB"))
    peaks.run("save_checkpoint", lambda: engine.save_checkpoint(str(directory / "checkpoints")))
    peaks.run("load_checkpoint", lambda: engine.load_checkpoint(str(directory / "checkpoints")))
    engine.destroy()
    words = ["export", str(directory / "checkpoints"), str(directory / "exported"), "--dtype", "bf16", "--json"]
    peaks.run("infinity export", lambda: command(words))
    for each in ("checkpoints", "swap"):
        shutil.rmtree(directory / each)
    words = ["import-deepspeed", str(directory / "deepspeed"), str(directory / "imported"), "--json"]
    peaks.run("infinity import-deepspeed", lambda: command(words))
    peaks.close()
    return {
        "parameters": shape.numel,
        "largest_bytes": 4 * max(p.numel() for p in model.parameters()),
        "phases": peaks.phases,
        "same_weights": all(same(weights, directory / name) for name in ("saved", "exported")),
    }


def same(one: Path, other: Path) -> bool:
    """Whether both directories have the same weights; in pieces."""
    left, right = WeightsDirectory(one), WeightsDirectory(other)
    return set(left.entries) == set(right.entries) and all(
        torch.equal(left.read(name, first, numel), right.read(name, first, numel))
        for name, entry in left.entries.items()
        for first in range(0, entry.numel, MIB)
        if (numel := min(MIB, entry.numel - first))
    )


def measure(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with scratch_directory("infinity-bench-", arguments.dir) as directory:
        (directory / "swap").mkdir()
        make_weights(SIZES[size], directory / "weights")
        make_deepspeed_checkpoint(SIZES[size], directory / "deepspeed")
        command_line = [sys.executable, "-P", "-m", "benchmarks.pretrained", "--worker", size, "--dir", str(directory)]
        command_line += ["--host-budget-mib", str(arguments.host_budget_mib)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        ended = subprocess.run(command_line, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    base = found["phases"]["imports with an optimizer"]["peak_pss_bytes"]
    found["allowed_bytes"] = int(1.15 * base) + arguments.host_budget_mib * MIB + found["largest_bytes"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser, "--dir")
    parser.add_argument("--host-budget-mib", type=int, default=512)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--worker", choices=tuple(SIZES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(worker(SIZES[arguments.worker], arguments.dir, arguments.host_budget_mib)))
        return 0
    results = {size: measure(size, arguments) for size in arguments.sizes}
    keep_results("pretrained", {"host_budget_mib": arguments.host_budget_mib, **results})
    failed = False
    for found in results.values():
        allowed = found["allowed_bytes"]
        budget = arguments.host_budget_mib
        print(f"{found['parameters']:,} parameters, budget {budget} MiB, allowed {allowed / 1e6:.0f} MB")
        for phase, figures in found["phases"].items():
            peak, daemon = figures["peak_pss_bytes"], figures["of_it_the_daemon"]
            failed |= peak > allowed
            note = "  TOO MUCH" * (peak > allowed)
            print(f"  {phase:26} {peak / 1e6:7.0f} MB (daemon {daemon / 1e6:.0f}) {figures['seconds']:6.1f} s{note}")
        if not found["same_weights"]:
            print("  weights that came out differ from those that went in")
        failed |= not found["same_weights"]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

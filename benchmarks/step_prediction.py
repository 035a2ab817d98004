"""Does ``io-daemon bench step`` predict a training step? The 168M-parameter GPT at two host budgets.

``python -m benchmarks.step_prediction --swap-dir DIR``: for each budget, ``infinity trace`` records the step in memory,
then training from NVMe and the replay of the trace take turns on the same disk. Each prediction is held against the
training turns just before and after it, so that a disk that changes its pace meets both; the median counts.
Exit code 0 if it lies within 15% at every budget.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.engine_worker import engine_config
from benchmarks.gpt import GPT, GPTShape, token_batch
from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from benchmarks.side import REPOSITORY, Side, keep_results, spread
from io_daemon.bench.result import StepResult
from io_daemon.bench.steps.step import run_step
from io_daemon.bench.steps.step_settings import StepSettings
from io_daemon.command.scratch import scratch_directory

MIB: Final = 1 << 20
BUDGETS_MIB: Final = (512, 1024)
WARM_UP_STEPS: Final = 4
ERROR_MAX: Final = 0.15
LEARNING_RATE: Final = 1e-4


def traced_model() -> tuple[nn.Module, torch.Tensor]:
    """The factory that ``infinity trace`` calls."""
    shape = GPTShape()
    torch.manual_seed(0)
    return GPT(shape), token_batch(shape, step=0)


def record_trace(directory: Path, budget_mib: int, threads: int) -> Path:
    config = directory / "config.json"
    config.write_text(
        json.dumps(
            engine_config(
                str(directory), host_budget_bytes=budget_mib * MIB, learning_rate=LEARNING_RATE, device="nvme"
            )
        )
    )
    path = directory / f"gpt-168m-{budget_mib}.json.gz"
    command = [sys.executable, "-P", "-m", "infinity", "trace", "--config", str(config), "--threads", str(threads)]
    command += ["--model", "benchmarks.step_prediction:traced_model", "--out", str(path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
    return path


def measure_budget(arguments: argparse.Namespace, directory: Path, budget_mib: int) -> dict[str, Any]:
    """Train and replay in turns."""
    trace = record_trace(directory, budget_mib, arguments.threads)
    train_dir, replay_dir = directory / "train", directory / "replay"
    for path in (train_dir, replay_dir):
        path.mkdir(exist_ok=True)
    options = ["--swap-dir", str(train_dir), "--num-layers", str(GPTShape().num_layers)]
    options += ["--threads", str(arguments.threads), "--seed", "0", "--learning-rate", str(LEARNING_RATE)]
    options += ["--host-budget-bytes", str(budget_mib * MIB)]
    settings = StepSettings(directories=(replay_dir,), trace=str(trace), steps=arguments.steps_per_round)
    predictions: list[StepResult] = []
    with Side(
        f"training, {budget_mib} MiB",
        python=sys.executable,
        module="benchmarks.engine_worker",
        arguments=options,
        swap_dir=train_dir,
        log=directory / "worker.log",
    ) as side:
        side.ready()
        side.take_steps(WARM_UP_STEPS, measured=False)
        side.take_steps(arguments.steps_per_round, measured=True)
        for _ in range(arguments.rounds):
            predictions.append(run_step(settings))
            side.take_steps(arguments.steps_per_round, measured=True)
    measured_s = statistics.median(side.seconds)
    predicted_s = statistics.median(second for prediction in predictions for second in prediction.steps_s)
    report = side.answers[-1]["io_report"]
    turns_s = [statistics.median(answer["seconds"]) for answer in side.answers]
    ratios = [
        prediction.step_s / statistics.mean(around)
        for prediction, around in zip(predictions, pairwise(turns_s), strict=True)
    ]
    return {
        "host_budget_bytes": budget_mib * MIB,
        "measured": spread(side.seconds),
        "predicted": spread([second for prediction in predictions for second in prediction.steps_s]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ratio_of_medians": predicted_s / measured_s,
        "measured_times": [answer["io_report"]["times"] for answer in side.answers],
        "measured_bytes": {
            way: sum(report["nvme"][f"bytes_{name}"].values()) for way, name in (("read", "read"), ("write", "written"))
        },
        "predictions": [json.loads(prediction.model_dump_json()) for prediction in predictions],
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="bench step against training: 168M parameters, bf16, nvme/nvme, in turns")
    for column in (
        "host budget MiB",
        "",
        "step s (min to max)",
        "stall s",
        "read GB",
        "written GB",
        "predicted / measured",
    ):
        table.add_column(column, justify="right")
    for budget in results["budgets"]:
        measured, predicted = budget["measured"], budget["predicted"]
        prediction = budget["predictions"][-1]
        stall_s = statistics.median(times["stall_seconds"] for times in budget["measured_times"])
        table.add_row(
            f"{budget['host_budget_bytes'] / MIB:.0f}",
            "trained",
            f"{measured['median_s']:.2f} ({measured['min_s']:.2f} to {measured['max_s']:.2f})",
            f"{stall_s:.2f}",
            f"{budget['measured_bytes']['read'] / 1e9:.2f}",
            f"{budget['measured_bytes']['write'] / 1e9:.2f}",
            "",
        )
        table.add_row(
            "",
            "predicted",
            f"{predicted['median_s']:.2f} ({predicted['min_s']:.2f} to {predicted['max_s']:.2f})",
            f"{prediction['stall_s']:.2f}",
            f"{prediction['read_bytes'] / 1e9:.2f}",
            f"{prediction['write_bytes'] / 1e9:.2f}",
            f"{budget['ratio']:.3f} ({min(budget['ratios']):.2f} to {max(budget['ratios']):.2f})",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser)
    parser.add_argument("--host-budget-mib", type=int, nargs="+", default=list(BUDGETS_MIB))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps-per-round", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory:
        results: dict[str, Any] = {
            "threads": arguments.threads,
            "budgets": [measure_budget(arguments, directory, mib) for mib in arguments.host_budget_mib],
            "machine": describe_machine(directory),
        }
    keep_results("step_prediction", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 130))
    return 0 if all(abs(budget["ratio"] - 1) <= ERROR_MAX for budget in results["budgets"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Step time with the update done when weights are next used, beside the same engine with the update in ``step``.

``python -m benchmarks.update_times --swap-dir DIR``: the 168M-parameter GPT in bf16, batch 1, sequence 64, on NVMe, at
several host budgets; one run, steps alternated. The losses of both must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpt import GPTShape
from benchmarks.machine import describe_machine
from benchmarks.side import Side, keep_results, spread

MIB = 1 << 20
WARM_UP_STEPS = 4
"""The first begins with no update due, the plan of the second is followed from the third or fourth on."""
UPDATES = ("on_use", "in_step")


def measure_budget(arguments: argparse.Namespace, budget_mib: int, directory: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = []
        for update in UPDATES:
            swap_dir = directory / f"{update}-{budget_mib}"
            swap_dir.mkdir()
            words = {
                "--swap-dir": swap_dir,
                "--num-layers": arguments.num_layers,
                "--seed": arguments.seed,
                "--learning-rate": 1e-4,
                "--threads": arguments.threads,
                "--host-budget-bytes": budget_mib * MIB,
                "--update": update,
            }
            side = Side(
                update,
                python=sys.executable,
                module="benchmarks.engine_worker",
                arguments=[str(word) for pair in words.items() for word in pair],
                swap_dir=swap_dir,
                log=directory / f"{update}-{budget_mib}.log",
            )
            sides.append(stack.enter_context(side))
        for side in sides:
            side.ready()
        for side in sides:
            side.take_steps(WARM_UP_STEPS, measured=False)
        for number in range(arguments.rounds):
            for side in sides if number % 2 else sides[::-1]:
                side.take_steps(arguments.steps_per_round, measured=True)
    losses = [[loss for answer in side.answers for loss in answer["losses"]] for side in sides]
    nvme = {side.name: side.answers[-1]["io_report"]["nvme"] for side in sides}
    return {
        "host_budget_mib": budget_mib,
        "times": {side.name: spread(side.seconds) for side in sides},
        "paired_ratio": spread([a / b for a, b in zip(sides[0].seconds, sides[1].seconds, strict=True)]),
        "nvme_bytes": {
            name: {way: sum(io[way].values()) for way in ("bytes_read", "bytes_written")} for name, io in nvme.items()
        },
        "peak_pss_bytes": {side.name: side.footprint.as_json()["peak_pss_bytes"] for side in sides},
        "same_losses": losses[0] == losses[1],
        "seconds": {side.name: side.seconds for side in sides},
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{results['parameters']:,} parameters, bf16, nvme/nvme, steps alternated in one run")
    for column in ("MiB", "on use s", "in step s", "ratio (min, p90)", "GB moved", "peak PSS GB", "losses"):
        table.add_column(column, justify="right")
    for row in results["budgets"]:
        times, ratio = row["times"], row["paired_ratio"]
        moved = {name: sum(ways.values()) / 1e9 for name, ways in row["nvme_bytes"].items()}
        table.add_row(
            str(row["host_budget_mib"]),
            *(f"{times[name]['median_s']:.2f}" for name in UPDATES),
            f"{ratio['median_s']:.2f} ({ratio['min_s']:.2f}, {ratio['p90_s']:.2f})",
            " / ".join(f"{moved[name]:.2f}" for name in UPDATES),
            " / ".join(f"{row['peak_pss_bytes'][name] / 1e9:.2f}" for name in UPDATES),
            "same bits" if row["same_losses"] else "[red]differ",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk")
    parser.add_argument("--host-budget-mib", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=2)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=arguments.swap_dir) as name:
        directory = Path(name)
        results = {
            "parameters": GPTShape(num_layers=arguments.num_layers).numel,
            "machine": describe_machine(directory),
            "seed": arguments.seed,
            "threads": arguments.threads,
            "budgets": [measure_budget(arguments, budget, directory) for budget in arguments.host_budget_mib],
        }
    keep_results("update_times", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 130))
    return 0 if all(row["same_losses"] for row in results["budgets"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())

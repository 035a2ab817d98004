"""The engine where everything fits, beside a plain torch loop with the same optimizer and fp32 master weights.

``python -m benchmarks.in_memory --swap-dir DIR``: the 168M-parameter GPT in bf16, batch 1, sequence 64, in memory, in
the arena, and on NVMe with a budget that holds all; one run, steps alternated. Beside the times stands what the kernel
counted of a step: page faults, CPU seconds in user code and in the kernel, sleeps. All losses must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

SIDES = ("plain", "none", "cpu", "nvme")
WARM_UP_STEPS = 4


def start(name: str, arguments: argparse.Namespace, directory: Path) -> Side:
    swap_dir = directory / name
    swap_dir.mkdir()
    words: dict[str, Any] = {
        "--num-layers": arguments.num_layers,
        "--seed": arguments.seed,
        "--learning-rate": 1e-4,
        "--threads": arguments.threads,
        "--swap-dir": swap_dir,
    }
    if name != "plain":
        words |= {"--host-budget-bytes": arguments.host_budget_mib << 20, "--device": name}
    return Side(
        name,
        python=sys.executable,
        module="benchmarks.torch_worker" if name == "plain" else "benchmarks.engine_worker",
        arguments=[str(word) for pair in words.items() for word in pair],
        swap_dir=swap_dir,
        log=directory / f"{name}.log",
        sampled=arguments.memory,
    )


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = [stack.enter_context(start(name, arguments, directory)) for name in arguments.sides]
        for side in sides:
            side.ready()
            side.take_steps(WARM_UP_STEPS, measured=False)
        for number in range(arguments.rounds):
            for side in sides if number % 2 else sides[::-1]:
                side.take_steps(arguments.steps_per_round, measured=True)
    plain = sides[0]
    losses = [[loss for answer in side.answers for loss in answer["losses"]] for side in sides]
    return {
        "same_losses": all(other == losses[0] for other in losses),
        "sides": {side.name: figures(side, plain) for side in sides},
    }


def figures(side: Side, plain: Side) -> dict[str, Any]:
    costs = [cost for answer in side.answers for cost in answer["costs"]]
    return {
        "times": spread(side.seconds),
        "ratio": spread([a / b for a, b in zip(side.seconds, plain.seconds, strict=True)]),
        "costs": {name: statistics.median(cost[name] for cost in costs) for name in costs[0]},
        "peak_pss_bytes": side.footprint.as_json()["peak_pss_bytes"],
        "seconds": side.seconds,
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{results['parameters']:,} parameters, bf16, everything fits, steps alternated in one run")
    for column in ("", "s", "ratio (min, p90)", "page faults", "user s", "system s", "sleeps", "peak PSS GB"):
        table.add_column(column, justify="right")
    for name, side in results["sides"].items():
        ratio, costs = side["ratio"], side["costs"]
        table.add_row(
            name,
            f"{side['times']['median_s']:.2f}",
            f"{ratio['median_s']:.2f} ({ratio['min_s']:.2f}, {ratio['p90_s']:.2f})",
            f"{costs['page_faults']:,.0f}",
            *(f"{costs[kind]:.2f}" for kind in ("user_s", "system_s")),
            f"{costs['sleeps']:,.0f}",
            f"{side['peak_pss_bytes'] / 1e9:.2f}",
        )
    console.print(table)
    console.print("losses: the same bits" if results["same_losses"] else "[red]losses differ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk")
    parser.add_argument("--host-budget-mib", type=int, default=4096)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=2)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=SIDES, help="the first is what the others are beside"
    )
    parser.add_argument("--memory", action="store_true", help="sample PSS too, which slows what is sampled")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=arguments.swap_dir) as name:
        directory = Path(name)
        results = {
            "parameters": GPTShape(num_layers=arguments.num_layers).numel,
            "machine": describe_machine(directory),
            "seed": arguments.seed,
            "threads": arguments.threads,
            **measure(arguments, directory),
        }
    keep_results("in_memory", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 130))
    return 0 if results["same_losses"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

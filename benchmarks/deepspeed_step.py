"""Step time against DeepSpeed's own NVMe offload: one model, one disk, one run, steps alternated.

``python -m benchmarks.deepspeed_step --swap-dir DIR``: the 168M-parameter GPT in bf16, batch 1, sequence 64, parameters
and optimizer on NVMe on both sides. DeepSpeed gets sub-groups of 2e7 elements, 16 buffers and its pipelined swapper.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.deepspeed_venv import prepare_venv
from benchmarks.gpt import GPTShape
from benchmarks.machine import describe_machine
from benchmarks.side import Side, keep_results, spread

MIB = 1 << 20
WARM_UP_STEPS = 3
"""DeepSpeed prefetches from its third step on, the engine plans after its first."""
BYTES_ON_DISK_PER_PARAMETER = 14
"""bf16 weight, fp32 master weight and two moments."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_sides(arguments: argparse.Namespace, directory: Path, stack: ExitStack) -> list[Side]:
    """Ours first. Each has its own swap directory on the same disk."""
    common = ["--num-layers", str(arguments.num_layers), "--seed", str(arguments.seed), "--learning-rate", "1e-4"]
    deepspeed_python = str(arguments.deepspeed_python or prepare_venv(arguments.deepspeed_venv))
    sides = []
    for name, python, module, own in (
        (
            "infinity",
            sys.executable,
            "benchmarks.engine_worker",
            ["--threads", str(arguments.threads), "--host-budget-bytes", str(arguments.host_budget_mib * MIB)],
        ),
        (
            "deepspeed",
            deepspeed_python,
            "benchmarks.deepspeed_worker",
            ["--threads", str(arguments.deepspeed_threads)],
        ),
    ):
        swap_dir = directory / name
        swap_dir.mkdir()
        environment = {
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
        }
        side = Side(
            name,
            python=python,
            module=module,
            arguments=["--swap-dir", str(swap_dir), *common, *own],
            swap_dir=swap_dir,
            log=directory / f"{name}.log",
            environment=environment,
        )
        sides.append(stack.enter_context(side))
    return sides


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = GPTShape(num_layers=arguments.num_layers)
    with tempfile.TemporaryDirectory(prefix="infinity-bench-", dir=arguments.swap_dir) as name, ExitStack() as stack:
        directory = Path(name)
        machine = describe_machine(directory)
        sides = start_sides(arguments, directory, stack)
        for side in sides:
            side.ready()
        for side in sides:
            side.take_steps(WARM_UP_STEPS, measured=False)
        for _ in range(arguments.rounds):
            for side in sides:
                side.take_steps(arguments.steps_per_round, measured=True)
    ours, theirs = sides
    times = {side.name: spread(side.seconds) for side in sides}
    pairs = [a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return {
        "model": {"parameters": shape.numel, **vars(shape)},
        "batch": 1,
        "dtype": "bf16",
        "seed": arguments.seed,
        "threads": {"infinity": arguments.threads, "deepspeed": arguments.deepspeed_threads},
        "host_budget_bytes": arguments.host_budget_mib * MIB,
        "state_bytes_on_disk": shape.numel * BYTES_ON_DISK_PER_PARAMETER,
        "state_over_ram": shape.numel * BYTES_ON_DISK_PER_PARAMETER / machine["ram_bytes"],
        "machine": machine,
        "times": times,
        "ratio_of_medians": times["infinity"]["median_s"] / times["deepspeed"]["median_s"],
        "paired_ratio": spread(pairs),
        "footprints": {side.name: side.footprint.as_json() for side in sides},
        "seconds": {side.name: side.seconds for side in sides},
        "losses": {side.name: [x for answer in side.answers for x in answer["losses"]] for side in sides},
        "io_report": ours.answers[-1]["io_report"],
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{results['model']['parameters']:,} parameters, bf16, nvme/nvme, steps alternated in one run")
    for column in ("", "median s", "min", "p90", "max", "steps", "peak PSS GB", "direct / buffered swap files"):
        table.add_column(column, justify="right")
    for name, times in results["times"].items():
        footprint = results["footprints"][name]
        table.add_row(
            name,
            *(f"{times[key]:.2f}" for key in ("median_s", "min_s", "p90_s", "max_s")),
            str(times["num_steps"]),
            f"{footprint['peak_pss_bytes'] / 1e9:.2f}",
            f"{footprint['direct_files']} / {footprint['buffered_files']}",
        )
    machine = results["machine"]
    directory = machine["directories"][0]
    disk = directory["device"]["name"] if directory["device"] else "unknown"
    console.print(table)
    console.print(
        f"infinity / deepspeed: {results['ratio_of_medians']:.3f} (medians). Disk {disk} "
        f"({directory['filesystem']}), state {results['state_bytes_on_disk'] / 1e9:.2f} GB = "
        f"{results['state_over_ram']:.2f} x RAM, {machine['num_cores']} cores, threads "
        f"{results['threads']}, seed {results['seed']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swap-dir", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the disk")
    parser.add_argument("--deepspeed-python", type=Path, help="Python of an environment that has DeepSpeed")
    parser.add_argument(
        "--deepspeed-venv",
        type=Path,
        default=Path("out/deepspeed-venv"),
        help="created with DeepSpeed if it is missing",
    )
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=2)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=max(1, cores - 1), help="ours: one core is the daemon's")
    parser.add_argument("--deepspeed-threads", type=int, default=cores, help="DeepSpeed's (default: every core)")
    parser.add_argument("--host-budget-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure(arguments)
    keep_results("deepspeed_step", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 130))
    return 0 if results["ratio_of_medians"] <= 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Memory and traffic of training out of core, against the budget it was given, at two depths of one model.

``python -m benchmarks.memory --swap-dir DIR``: the 168M-parameter GPT in bf16, batch 1, sequence 64, parameters and
optimizer on NVMe, 512 MiB of host budget; then the same with twice the layers. Exit code 0 if the sum of PSS stays
below the limit, is flat in the model's size, every open swap file has O_DIRECT, and the bytes that the kernel counts
agree with the engine's own report.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpt import GPTShape
from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from benchmarks.side import Side, keep_results, spread
from infinity.commands.demo.footprint import DeviceBytes, process_tree
from io_daemon.command.scratch import scratch_directory

MIB = 1 << 20
WARM_UP_STEPS = 2
PEAK_PSS_MAX = 1_500_000_000
"""DeepSpeed needs 5.7 GB for the same model."""
DEPTH_RATIO_MAX = 1.10
BYTES_ERROR_MAX = 0.01
SAMPLES_PER_SECOND_MIN = 5.0


def reported_bytes(report: dict[str, Any]) -> DeviceBytes:
    """What ``io_report()`` says was read from and written to NVMe since ``initialize``."""
    total = report["nvme_total"]
    return DeviceBytes(sum(total["bytes_read"].values()), sum(total["bytes_written"].values()))


def relative_error(measured: int, reported: int) -> float:
    return abs(measured - reported) / max(reported, 1)


def measure_depth(arguments: argparse.Namespace, num_layers: int) -> dict[str, Any]:
    """Train one model and return its figures."""
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory:
        swap_dir = directory / "swap"
        swap_dir.mkdir()
        options = ["--swap-dir", str(swap_dir), "--num-layers", str(num_layers), "--threads", str(arguments.threads)]
        options += ["--seed", str(arguments.seed), "--learning-rate", "1e-4"]
        options += ["--host-budget-bytes", str(arguments.host_budget_mib * MIB)]
        with Side(
            f"{num_layers} layers",
            python=sys.executable,
            module="benchmarks.engine_worker",
            arguments=options,
            swap_dir=swap_dir,
            log=directory / "worker.log",
        ) as side:
            side.ready()
            warm = side.take_steps(WARM_UP_STEPS, measured=False)
            pids = process_tree(side.pid)
            kernel_before, reported_before = DeviceBytes.of(pids), reported_bytes(warm["io_report"])
            last = side.take_steps(arguments.steps, measured=True)
            kernel = DeviceBytes.of(pids) - kernel_before
            reported = reported_bytes(last["io_report"]) - reported_before
        files_left = sorted(str(path) for path in swap_dir.rglob("*") if path.is_file())
        machine = describe_machine(directory)
    return {
        "num_layers": num_layers,
        "parameters": GPTShape(num_layers=num_layers).numel,
        "times": spread(side.seconds),
        "footprint": side.footprint.as_json(),
        "kernel_bytes": vars(kernel),
        "reported_bytes": vars(reported),
        "read_error": relative_error(kernel.read, reported.read),
        "written_error": relative_error(kernel.written, reported.written),
        "files_left": files_left,
        "io_report": side.answers[-1]["io_report"],
        "machine": machine,
    }


def shortcomings(results: dict[str, Any]) -> list[str]:
    """What does not hold, one sentence each."""
    found = []
    for depth in results["depths"]:
        name, footprint = f"{depth['num_layers']} layers", depth["footprint"]
        if footprint["peak_pss_bytes"] > PEAK_PSS_MAX:
            found.append(f"{name}: peak PSS {footprint['peak_pss_bytes']:,} bytes is above {PEAK_PSS_MAX:,}")
        if footprint["buffered_files"] or not footprint["direct_files"]:
            found.append(
                f"{name}: {footprint['direct_files']} swap files with O_DIRECT, {footprint['buffered_files']} without"
            )
        if footprint["samples_per_second"] < SAMPLES_PER_SECOND_MIN:
            found.append(f"{name}: only {footprint['samples_per_second']} samples a second")
        errors = {direction: depth[f"{direction}_error"] for direction in ("read", "written")}
        found += [
            f"{name}: bytes {direction} differ from the kernel's by {error:.2%}"
            for direction, error in errors.items()
            if error > BYTES_ERROR_MAX
        ]
        if depth["files_left"]:
            found.append(f"{name}: files left in the swap directory: {depth['files_left']}")
    if results["peak_ratio"] > DEPTH_RATIO_MAX:
        found.append(f"twice the layers take {results['peak_ratio']:.3f} x the memory, more than {DEPTH_RATIO_MAX}")
    return found


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"bf16, batch 1, sequence 64, nvme/nvme, host budget {results['host_budget_bytes'] / MIB:.0f} MiB"
    )
    for column in ("parameters", "peak PSS MB", "Cached +MB", "Shmem +MB", "read GB/step", "written GB/step"):
        table.add_column(column, justify="right")
    for column in ("kernel vs report", "O_DIRECT", "step s"):
        table.add_column(column, justify="right")
    for depth in results["depths"]:
        footprint, steps = depth["footprint"], depth["times"]["num_steps"]
        table.add_row(
            f"{depth['parameters']:,}",
            f"{footprint['peak_pss_bytes'] / 1e6:.0f}",
            f"{footprint['cached_growth_bytes'] / 1e6:.0f}",
            f"{footprint['shmem_growth_bytes'] / 1e6:.0f}",
            f"{depth['kernel_bytes']['read'] / steps / 1e9:.2f}",
            f"{depth['kernel_bytes']['written'] / steps / 1e9:.2f}",
            f"{depth['read_error']:.2%} / {depth['written_error']:.2%}",
            f"{footprint['direct_files']} of {footprint['direct_files'] + footprint['buffered_files']}",
            f"{depth['times']['median_s']:.2f}",
        )
    console.print(table)
    for depth in results["depths"]:
        for process, size in depth["footprint"]["peak_pss_bytes_by_process"].items():
            console.print(
                f"  {depth['num_layers']} layers at the peak: {size / 1e6:7.0f} MB  {process}", highlight=False
            )
    console.print(
        f"peak with twice the layers / peak: {results['peak_ratio']:.3f}. Sampled "
        f"{results['depths'][0]['footprint']['samples_per_second']} times a second, sum of PSS of the rank and all its "
        f"descendants; seed {results['seed']}, {results['threads']} threads"
    )
    for sentence in results["shortcomings"]:
        console.print(f"[red]{sentence}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser)
    parser.add_argument("--num-layers", type=int, default=12, help="of the smaller model")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--host-budget-mib", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    depths = [measure_depth(arguments, factor * arguments.num_layers) for factor in (1, 2)]
    peaks = [depth["footprint"]["peak_pss_bytes"] for depth in depths]
    results: dict[str, Any] = {
        "host_budget_bytes": arguments.host_budget_mib * MIB,
        "seed": arguments.seed,
        "threads": arguments.threads,
        "depths": depths,
        "peak_ratio": peaks[1] / peaks[0],
    }
    results["shortcomings"] = shortcomings(results)
    keep_results("memory", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 130))
    return 1 if results["shortcomings"] else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What several ranks of a node read and write a step beside one rank alone, with the same host budget for the node.

``python -m benchmarks.ranks --swap-dir DIR``: the 168M-parameter GPT in bf16, parameters and optimizer on NVMe, one
micro-batch a rank, under ``infinity run``. Each rank has its shards, so that all together should move what one does,
beside gradients and weights that are there on every rank at a time. Exit code 0 if the sum is at most 1.1 times one
rank's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any, Final

from benchmarks.engine_worker import engine_config
from benchmarks.machine import describe_machine
from benchmarks.memory import reported_bytes
from benchmarks.place import add_directory
from benchmarks.side import keep_results, spread
from io_daemon.command.scratch import scratch_directory

MIB: Final = 1 << 20
WARM_UP_STEPS: Final = 2
RATIO_MAX: Final = 1.1


def worker(arguments: argparse.Namespace) -> None:
    """One rank: takes its steps, and leaves its figures in a file of its own."""
    import torch

    import infinity
    from benchmarks.gpt import GPT, GPTShape, token_batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, shape = int(os.environ["RANK"]), GPTShape(d_model=1024, num_layers=arguments.num_layers, sequence=64)
    config = engine_config(
        str(arguments.swap_dir / "swap"),
        host_budget_bytes=arguments.host_budget_mib * MIB,
        learning_rate=1e-4,
        device="nvme",
    )
    with infinity.Init(config_dict_or_path=config):
        model = GPT(shape)
    with infinity.initialize(model=model, config=config)[0] as engine:
        steps = []
        for index in range(WARM_UP_STEPS + arguments.steps):
            before, begun = reported_bytes(engine.io_report().as_dict()), time.monotonic()
            loss = engine(token_batch(shape, step=index, batch=1, seed=rank).to(engine.device))
            engine.backward(loss)
            engine.step()
            seconds, moved = time.monotonic() - begun, reported_bytes(engine.io_report().as_dict()) - before
            steps.append({"seconds": seconds, "bytes_read": moved.read, "bytes_written": moved.written})
    (arguments.swap_dir / f"rank{rank}.json").write_text(json.dumps(steps[WARM_UP_STEPS:]))


def run_ranks(num_ranks: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ranks' bytes a step, and the step of the slowest."""
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory:
        (directory / "swap").mkdir()
        words = [sys.executable, "-P", "-m", "infinity", "run", "--nproc-per-node", str(num_ranks), __file__]
        words += ["--worker", "--swap-dir", str(directory), "--num-layers", str(arguments.num_layers)]
        words += ["--steps", str(arguments.steps), "--host-budget-mib", str(arguments.host_budget_mib)]
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=arguments.timeout)
        ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    found: dict[str, Any] = {
        way: median(sum(figures) for figures in zip(*([step[way] for step in steps] for steps in ranks), strict=True))
        for way in ("bytes_read", "bytes_written")
    }
    return {"seconds": spread([max(step["seconds"] for step in steps) for steps in zip(*ranks, strict=True)]), **found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_directory(parser)
    parser.add_argument("--host-budget-mib", type=int, default=512, help="of the node, whatever the number of ranks")
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="that count, after two that do not")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="how often the two take turns")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    runs: dict[int, list[dict[str, Any]]] = {1: [], arguments.ranks: []}
    for _ in range(arguments.rounds):
        for num_ranks, found in runs.items():
            found.append(run_ranks(num_ranks, arguments))
    moved = {n: median(run["bytes_read"] + run["bytes_written"] for run in found) for n, found in runs.items()}
    ratio = moved[arguments.ranks] / moved[1]
    figures = {"machine": describe_machine(arguments.swap_dir), "host_budget_mib": arguments.host_budget_mib}
    figures |= {"runs": {str(n): found for n, found in runs.items()}, "bytes_a_step": moved, "ratio": ratio}
    keep_results("ranks", figures)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for num_ranks, found in runs.items():
            seconds = median(run["seconds"]["median_s"] for run in found)
            print(
                f"{num_ranks} rank{'s' * (num_ranks > 1)}: {moved[num_ranks] / 1e9:.2f} GB and {seconds:.2f} s a step"
            )
        print(f"ratio of bytes {ratio:.3f}, at most {RATIO_MAX}")
    return int(ratio > RATIO_MAX)


if __name__ == "__main__":
    sys.exit(main())

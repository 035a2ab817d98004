"""``infinity plan``: what a step will cost at several host budgets, before anybody trains.

For each budget the step is traced as ``infinity trace`` does it, and replayed on the disk that will be used, through a
real daemon, by ``io-daemon bench step``: nothing is extrapolated from a data sheet. It runs as a process of its own,
since what trains never imports what measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from infinity.commands.demo.footprint import pss_bytes
from infinity.commands.trace_command import StepOfModel, say, traced
from infinity.errors import BudgetError, ConfigError, WorldError
from infinity.plan.precision import Precision
from infinity.plan.stage import StagePolicy
from io_daemon.command.console import open_console
from io_daemon.command.outcome import EXIT_FAULT, EXIT_OK, EXIT_USAGE
from io_daemon.command.output_files import check_output
from io_daemon.command.scratch import scratch_directory
from io_daemon.policy.step_trace import SUFFIX, save
from io_daemon.rank.process import own_pidfd
from io_daemon.shared.metrics import size_text

BENCH_STEP: Final = (sys.executable, "-P", "-m", "io_daemon", "bench", "step")
DAEMON_BYTES: Final = 40_000_000
"""Memory of a daemon aside from its arenas: its interpreter and tables."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step costs this node."""

    memory_bytes: int
    """Peak PSS over the node's processes without the model's activations: arenas, weights in use, interpreters."""
    step_s: float
    stall_s: float
    """The part of it that waits for the disk."""
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    host_budget_bytes: int
    cost: Cost | None = None
    refused: str | None = None
    """Why training would refuse the budget."""


def plan(parsed: argparse.Namespace) -> int:
    """``parsed``: see ``infinity.commands.cli``. The exit code is 1 if no budget can be trained with."""
    if not os.access(parsed.swap_dir, os.W_OK | os.X_OK):
        raise ConfigError(
            "swap-dir", parsed.swap_dir, "name a directory that can be written, on the disk to train from"
        )
    if parsed.compute_tflops is not None and not (parsed.meta or parsed.model_params):
        remedy = "is divided into FLOPs, which are counted with --meta: add it, or leave this out"
        raise ConfigError("compute-tflops", parsed.compute_tflops, remedy)
    if parsed.plot is not None:
        _need_matplotlib(parsed.plot)
        check_output("plot", parsed.plot)
    interpreter_bytes, budgets = pss_bytes(os.getpid()), sorted(set(parsed.host_budget_bytes))
    found = []
    with scratch_directory("infinity-plan-") as directory:
        for number, budget in enumerate(budgets, start=1):
            say(f"host budget {size_text(budget)}, {number} of {len(budgets)}")
            found.append(_predict(parsed, budget, interpreter_bytes, directory))
    if parsed.plot is not None:
        _plot(found, parsed.plot)
    if parsed.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        _show(found)
    return EXIT_OK if any(each.cost for each in found) else EXIT_FAULT


def _predict(parsed: argparse.Namespace, budget: int, interpreter_bytes: int, directory: Path) -> Prediction:
    try:
        step, trace = traced(argparse.Namespace(**{**vars(parsed), "host_budget_bytes": budget}))
    except BudgetError as error:
        return Prediction(host_budget_bytes=budget, refused=str(error))
    path = directory / f"trace-{budget}{SUFFIX}"
    save(trace, path)
    of_a_rank = trace.num_frames * trace.frame_bytes + interpreter_bytes + _beside_arena(step)
    memory_bytes = trace.ranks_per_node * of_a_rank + trace.staging_bytes + DAEMON_BYTES
    del step, trace  # the replay needs the memory that the model had
    result = _replay(parsed, path)
    measured = {name: result[name] for name in ("step_s", "stall_s", "read_bytes", "write_bytes")}
    return Prediction(host_budget_bytes=budget, cost=Cost(memory_bytes=memory_bytes, **measured))


def _beside_arena(step: StepOfModel) -> int:
    """Bytes of a rank's full-size weights in use, and of gradients: those that stay, and one group's on their way."""
    precision, layout = Precision.of(step.config), step.layout
    groups = [(members, sum(param.numel() for param in members.params)) for members in layout.members]
    live = sum(numel for _, numel in groups)
    if StagePolicy.of(step.config).shards_weights:
        live = min(live, max(step.config.zero_optimization.stage3_max_live_parameters, *(n for _, n in groups)))
    weights = max(numel * members.dtype.itemsize for members, numel in groups)
    for members, numel in sorted(groups, key=lambda group: -group[0].dtype.itemsize):  # the widest may be the live ones
        weights += members.dtype.itemsize * min(numel, live)
        live -= min(numel, live)
    on_their_way = 4 * max((numel for members, numel in groups if members.trainable), default=0)
    if not layout.gradients_stay(step.config, precision):
        return weights + on_their_way
    gradients = precision.gradient.itemsize * layout.gradients_numel
    # of one micro-batch they take turns with weights
    return (weights + gradients if step.config.accumulates else max(weights, gradients)) + on_their_way


def _replay(parsed: argparse.Namespace, trace: Path) -> dict[str, Any]:
    """The result of ``io-daemon bench step`` as JSON. Raises ConfigError or WorldError if there is none."""
    words = [*BENCH_STEP, "--trace", str(trace), "--json", "--steps", str(parsed.steps), "--size", str(parsed.size)]
    if parsed.compute_tflops is not None:
        words += ["--compute-tflops", str(parsed.compute_tflops)]
    with own_pidfd() as pidfd:  # it ends with this process, also where that is killed
        words += ["--parent-pidfd", str(pidfd), str(parsed.swap_dir)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False, pass_fds=(pidfd,))
    if ended.returncode:
        problem = f"io-daemon bench step ended with {ended.returncode}, see above"
        if ended.returncode == EXIT_USAGE:
            raise ConfigError("the replay", parsed.swap_dir, problem)
        raise WorldError(problem)
    result: dict[str, Any] = json.loads(ended.stdout)["result"]
    return result


def _show(found: Sequence[Prediction]) -> None:
    table = Table("host budget", "s/step", "of it waiting", "read", "written", "memory")
    for each in found:
        budget, cost = size_text(each.host_budget_bytes), each.cost
        if cost is None:
            table.add_row(budget, "-", "-", "-", "-", "-")
            continue
        sizes = (cost.read_bytes, cost.write_bytes, cost.memory_bytes)
        table.add_row(budget, f"{cost.step_s:.2f}", f"{cost.stall_s / cost.step_s:.0%}", *map(size_text, sizes))
    open_console().print(table)
    for each in found:
        if each.refused is not None:
            print(f"{size_text(each.host_budget_bytes)}: {each.refused}")
    print("memory is without the activations of the model")


def _need_matplotlib(path: Path) -> None:
    """Raises ConfigError unless it is there and writes such files: the picture comes after minutes."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plot", "matplotlib", 'is not installed: pip install "infinity[plot]"') from error
    kinds = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(
            "plot", str(path), f"is no name of a picture: let it end in one of .{', .'.join(sorted(kinds))}"
        )


def _plot(found: Sequence[Prediction], path: Path) -> None:
    """Step time and bytes moved against the budget."""
    from matplotlib.figure import Figure

    costs = [(each.host_budget_bytes / 2**30, each.cost) for each in found if each.cost is not None]
    budgets = [budget for budget, _ in costs]
    figure = Figure(figsize=(7, 4), layout="constrained")
    times = figure.subplots()
    times.plot(budgets, [cost.step_s for _, cost in costs], "o-", color="#0072b2", label="step")
    times.plot(budgets, [cost.stall_s for _, cost in costs], "o--", color="#d55e00", label="of it waiting for the disk")
    times.set_xlabel("host budget, GiB")
    times.set_ylabel("seconds")
    times.set_ylim(bottom=0)
    moved = times.twinx()
    gigabytes = [(cost.read_bytes + cost.write_bytes) / 1e9 for _, cost in costs]
    moved.plot(budgets, gigabytes, "s:", color="#009e73", label="read and written")
    moved.set_ylabel("GB a step")
    moved.set_ylim(bottom=0)
    lines = [*times.get_lines(), *moved.get_lines()]
    times.legend(lines, [str(line.get_label()) for line in lines])
    figure.savefig(path)

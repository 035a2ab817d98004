"""Step time and memory of training, side by side in one run: plain torch, DeepSpeed, and this engine at its budgets.

``python -m benchmarks.compare --swap-dir DIR [CONTENDER ...]``: a GPT (168M parameters in bf16, batch 1, sequence 64)
takes steps in each contender's process by turns, so that a machine that changes its pace meets all of them. Memory is
sampled in runs of their own afterwards, since sampling slows a process down. Beside every budget stands its *floor*: a
plain torch step while the bare reactor moves the bytes that the budget's step moved. Beside the times stands what the
kernel counted of a step: page faults, and CPU seconds of the contender's own process. Contenders that do not fit into
memory together are compared in several runs, each with ``torch`` among them. ``--like compare_clipped`` repeats what is
kept under that name, with its contenders and settings, on the machine at hand. Exit code 0 if the losses of all that
compute with as many threads in the same way, which DeepSpeed does not, are the same bits.

{contenders}
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import contenders
from benchmarks.contenders import PLAIN, SEARCHED, DeepSpeedSetting, contender, is_lossless, is_on_nvme_here, start
from benchmarks.gpt import GPTShape
from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from benchmarks.reactor_bandwidth import Target
from benchmarks.side import RESULTS, Side, keep_results, spread
from benchmarks.worker_options import DTYPES
from io_daemon._native import ENGINES
from io_daemon.command.scratch import scratch_directory
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH

WARM_UP_STEPS: Final = 4
"""The first begins with no update due, and a plan is followed from the third or fourth on; DeepSpeed prefetches from
its third."""
SAMPLED_STEPS: Final = 3
DEFAULT: Final = (PLAIN, "deepspeed-nvme", "nvme-512", "nvme-1024")
FLOOR_FILE_BYTES: Final = 2 << 30
STATE_BYTES: Final = {"bf16": 14, "fp32": 12}
"""A parameter's weight, fp32 master weight where that is another, and two moments."""


class Floor:
    """A plain torch step, and beside it the reactor alone moving so many bytes: what no engine can undercut."""

    def __init__(self, plain: Side, target: Target, moved: Mapping[str, int]) -> None:
        self._plain, self._target, self._moved = plain, target, moved
        self.seconds: list[float] = []

    def take_step(self) -> None:
        self._plain.begin_steps(1)
        moving_s = self._target.move(self._moved["bytes_read"], self._moved["bytes_written"])
        self.seconds.append(max(moving_s, self._plain.end_steps(measured=False)["seconds"][0]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = GPTShape(d_model=arguments.d_model, num_layers=arguments.num_layers, sequence=arguments.sequence)
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory, _bar() as progress:
        setting, searched = DeepSpeedSetting(arguments.sub_group_numel, arguments.buffer_count), {}
        if arguments.search_deepspeed:
            searched = search(arguments, directory, progress)
            setting = min(searched, key=lambda each: searched[each]["median_s"])
        found, floors = take_turns(arguments, directory, setting, progress)
        footprints = {word: sample(word, arguments, directory, setting, progress) for word in arguments.contenders}
        machine = describe_machine(directory)
    return {
        "model": {"parameters": shape.numel, **vars(shape)},
        "batch": arguments.batch,
        "gradient_clipping": arguments.clipping,
        "dtype": arguments.dtype,
        "seed": arguments.seed,
        "threads": {"infinity": arguments.threads, "others": arguments.plain_threads},
        "state_bytes": STATE_BYTES[arguments.dtype] * shape.numel,
        "state_over_ram": STATE_BYTES[arguments.dtype] * shape.numel / machine["ram_bytes"],
        "machine": machine,
        "deepspeed": {"setting": vars(setting), "searched": [{**vars(each), **searched[each]} for each in searched]},
        "contenders": {word: {**found[word], "footprint": footprints[word]} for word in arguments.contenders},
        "floors": floors,
        "same_losses": same_losses(arguments, found),
    }


def take_turns(
    arguments: argparse.Namespace, directory: Path, setting: DeepSpeedSetting, progress: Progress
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Figures of every contender, and the floor of every budget."""
    with ExitStack() as stack:
        sides = [
            stack.enter_context(start(word, arguments, directory, setting, sampled=False))
            for word in arguments.contenders
        ]
        for side in sides:
            side.ready()
        for side in progress.track(sides, description="warming up"):
            side.take_steps(WARM_UP_STEPS, measured=False)
            side.take_steps(1, measured=True)
        by_word = {side.name: side for side in sides}
        floors: dict[str, Floor] = {}
        if PLAIN in by_word:
            on_nvme = [side for side in sides if is_on_nvme_here(side.name)]
            target = _target(directory, stack) if on_nvme else None
            floors = {side.name: Floor(by_word[PLAIN], target, moved(side)) for side in on_nvme if target is not None}
        for side in sides:  # what a budget's step moves is known: the rest counts
            side.seconds.clear()
            side.answers.clear()
        turns: list[Callable[[], object]] = [
            *(lambda side=side: side.take_steps(arguments.steps_per_turn, measured=True) for side in sides),
            *(floor.take_step for floor in floors.values() for _ in range(arguments.steps_per_turn)),
        ]
        for number in progress.track(range(arguments.rounds), description="taking turns"):
            first = number % len(turns)
            for turn in turns[first:] + turns[:first]:
                turn()
    return {side.name: figures(side) for side in sides}, {
        word: {"times": spread(floor.seconds), "ratio": paired(by_word[word].seconds, floor.seconds)}
        for word, floor in floors.items()
    }


def figures(side: Side) -> dict[str, Any]:
    """Times, the losses of all steps and, of this engine, what a step moved and waited for."""
    costs = [cost for answer in side.answers for cost in answer["costs"]]
    found: dict[str, Any] = {
        "times": spread(side.seconds),
        "seconds": side.seconds,
        "losses": side.losses,
        "costs": {name: statistics.median(cost[name] for cost in costs) for name in costs[0]},
    }
    report = side.answers[-1].get("io_report")
    if report is not None and report["nvme"] is not None:
        stalls = [answer["io_report"]["times"]["stall_seconds"] for answer in side.answers]
        found |= {"stall_s": spread(stalls)["median_s"], "nvme_bytes": moved(side), "io_report": report}
    return found


def same_losses(arguments: argparse.Namespace, found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether this engine's lossless contenders, and ``torch`` where it has as many threads, have the same losses."""
    plain = (PLAIN,) if arguments.threads == arguments.plain_threads else ()
    losses = [each["losses"] for word, each in found.items() if is_lossless(word) or word in plain]
    num_steps = min(map(len, losses), default=0)  # the floors are steps of the plain loop's, too
    return all(other[:num_steps] == losses[0][:num_steps] for other in losses)


def moved(side: Side) -> dict[str, int]:
    """Bytes of the contender's last step."""
    io = side.answers[-1]["io_report"]["nvme"]
    return {way: sum(io[way].values()) for way in ("bytes_read", "bytes_written")}


def search(
    arguments: argparse.Namespace, directory: Path, progress: Progress
) -> dict[DeepSpeedSetting, dict[str, float]]:
    """DeepSpeed's step times with each of its settings, one after the other."""
    found = {}
    for setting in progress.track(SEARCHED, description="searching DeepSpeed's best setting"):
        with start("deepspeed-nvme", arguments, directory, setting, sampled=False) as side:
            side.ready()
            side.take_steps(WARM_UP_STEPS, measured=False)
            side.take_steps(SAMPLED_STEPS, measured=True)
        found[setting] = spread(side.seconds)
    return found


def sample(
    word: str, arguments: argparse.Namespace, directory: Path, setting: DeepSpeedSetting, progress: Progress
) -> dict[str, Any]:
    """Peak memory of the contender alone, over all its processes."""
    task = progress.add_task(f"memory of {word}", total=None)
    with start(word, arguments, directory, setting, sampled=True) as side:
        side.ready()
        side.take_steps(WARM_UP_STEPS + SAMPLED_STEPS, measured=False)
    progress.update(task, total=1, completed=1)
    return side.footprint.as_json()


def paired(seconds: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of steps of the same rounds."""
    return spread([a / b for a, b in zip(seconds, others, strict=True)])


def show(results: dict[str, Any], console: Console) -> None:
    words = results["contenders"]
    table = Table(title=f"{results['model']['parameters']:,} parameters, {results['dtype']}, steps taken by turns")
    references = [word for word in (PLAIN, "deepspeed-nvme") if word in words]
    columns = ["", "median s", "min", "p90", *(f"x {word}" for word in references)]
    columns += ["x floor", "stall", "GB read", "written", "CPU s", "page faults", "peak PSS GB", "direct / buffered"]
    for column in columns:
        table.add_column(column, justify="right")
    for word, each in words.items():
        footprint, io, floor = each["footprint"], each.get("nvme_bytes"), results["floors"].get(word)
        ratios = (paired(each["seconds"], words[other]["seconds"])["median_s"] for other in references)
        table.add_row(
            word,
            *(f"{each['times'][key]:.2f}" for key in ("median_s", "min_s", "p90_s")),
            *(f"{ratio:.2f}" for ratio in ratios),
            f"{floor['ratio']['median_s']:.2f}" if floor else "",
            f"{each['stall_s'] / each['times']['median_s']:.0%}" if "stall_s" in each else "",
            *(f"{io[way] / 1e9:.2f}" if io else "" for way in ("bytes_read", "bytes_written")),
            f"{each['costs']['user_s'] + each['costs']['system_s']:.2f}",
            f"{each['costs']['page_faults']:,.0f}",
            f"{footprint['peak_pss_bytes'] / 1e9:.2f}",
            f"{footprint['direct_files']} / {footprint['buffered_files']}",
        )
    console.print(table)
    if not results["same_losses"]:
        console.print("[red]losses differ")
    machine = results["machine"]
    place = machine["directories"][0]
    console.print(
        f"disk {place['device']['name'] if place['device'] else 'unknown'} ({place['filesystem']}), state "
        f"{results['state_bytes'] / 1e9:.2f} GB = {results['state_over_ram']:.2f} x RAM, {machine['num_cores']} cores, "
        f"threads {results['threads']}, clipping {results['gradient_clipping']}, seed {results['seed']}; ratios are "
        f"medians over pairs of steps; DeepSpeed at {results['deepspeed']['setting']}",
        highlight=False,
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Seconds of every step and peak memory, one row a contender. Needs matplotlib."""
    from matplotlib.figure import Figure

    words = list(results["contenders"])
    labels = [word.replace("+", "\n+") for word in words]  # a key a line
    figure = Figure(figsize=(9, 1.2 + 0.25 * sum(1 + label.count("\n") for label in labels)), layout="constrained")
    times, memory = figure.subplots(1, 2, sharey=True)
    for row, word in enumerate(words):
        each = results["contenders"][word]
        colour = "#d55e00" if word == PLAIN or word.startswith("deepspeed") else "#0072b2"
        times.barh(row, each["times"]["median_s"], height=0.6, color=colour, alpha=0.35)
        times.plot(each["seconds"], [row] * len(each["seconds"]), "o", color=colour, markersize=3)
        memory.barh(row, each["footprint"]["peak_pss_bytes"] / 1e9, height=0.6, color=colour, alpha=0.6)
        floor = results["floors"].get(word)
        if floor:
            times.plot([floor["times"]["median_s"]] * 2, [row - 0.4, row + 0.4], color="#1f2328", linewidth=1.5)
    times.set_yticks(range(len(words)), labels, fontsize=7)
    times.invert_yaxis()
    times.set_xlabel("seconds a step (bar: median, line: floor)")
    memory.set_xlabel("peak PSS of all processes, GB")
    figure.savefig(path, format=path.suffix.lstrip(".") or "svg")


def _target(directory: Path, stack: ExitStack) -> Target:
    path = directory / "floor"
    with path.open("wb") as file:
        file.truncate(FLOOR_FILE_BYTES)
    options = argparse.Namespace(
        file_bytes=FLOOR_FILE_BYTES, block_bytes=BLOCK_BYTES, queue_depth=QUEUE_DEPTH, engine=ENGINES[0]
    )
    target = Target(path, options)
    stack.callback(target.close)
    target.fill()
    return target


def _bar() -> Progress:
    return Progress(console=Console(stderr=True), transient=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").format(contenders=contenders.__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("contenders", nargs="*", type=contender, default=list(DEFAULT), metavar="CONTENDER")
    add_directory(parser)
    parser.add_argument("--d-model", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--clipping", type=float, default=0.0, help="largest norm of the gradients (default: any)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="fp32 for a CPU without products in bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-turn", type=int, default=2)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="ours (default: every core)")
    parser.add_argument("--plain-threads", type=int, default=cores, help="the others' (default: every core)")
    parser.add_argument("--deepspeed-python", type=Path, help="Python of an environment that has DeepSpeed")
    parser.add_argument(
        "--deepspeed-venv", type=Path, default=Path("out/deepspeed-venv"), help="created if it is missing"
    )
    parser.add_argument("--search-deepspeed", action="store_true", help="try several of its settings, take the best")
    parser.add_argument("--sub-group-numel", type=int, default=DeepSpeedSetting.sub_group_numel, help="DeepSpeed's")
    parser.add_argument("--buffer-count", type=int, default=DeepSpeedSetting.buffer_count, help="DeepSpeed's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="scratch", help="of the files under benchmarks/results")
    parser.add_argument("--plot", action="store_true", help="a picture beside the figures (matplotlib)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--like", metavar="NAME", help="defaults are the settings of a file under benchmarks/results")
    like = parser.parse_known_args()[0].like
    if like is not None:
        parser.set_defaults(**settings_of(json.loads((RESULTS / f"{like}.json").read_text())))
    return parser.parse_args()


def settings_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a run was given, by its results."""
    shape, threads = results["model"], results["threads"]
    return {
        "contenders": list(results["contenders"]),
        **{name: shape[name] for name in ("d_model", "num_layers", "sequence")},
        "batch": results["batch"],
        "clipping": results["gradient_clipping"],
        "dtype": results["dtype"],
        "threads": threads["infinity"],
        "plain_threads": threads["others"],
        "seed": results["seed"],
    }


def main() -> int:
    arguments = parse()
    results = measure(arguments)
    keep_results(arguments.name, results)
    if arguments.plot:
        plot(results, RESULTS / f"{arguments.name}.svg")
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 150))
    return 0 if results["same_losses"] else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""``infinity demo``: options, set-up, training under a progress display, summary and picture."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from infinity.commands.demo.footprint import FootprintSampler
from infinity.commands.demo.progress import TrainingProgress
from infinity.commands.demo.summary import LOSS_RATIO_MAX, as_table, summarise
from infinity.commands.demo.text import standard_library_text, unigram_entropy_nats
from infinity.commands.demo.training import (
    Settings,
    StepRecord,
    count_parameters,
    engine_config,
    faster_dtype,
    host_budget_bytes,
    state_bytes,
    train,
)
from io_daemon.command.console import open_console
from io_daemon.command.options import parse_path
from io_daemon.command.output_files import check_output
from io_daemon.command.scratch import scratch_directory
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.rank.process import DaemonProcess

NUM_STEPS = 48
DESCRIPTION = (
    "Train a small GPT on the text of Python's standard library, with its optimizer state on NVMe and less host memory "
    "than that state takes; draw the loss and the traffic. Exit code 1 if the model did not learn."
)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0 if the model learned: the mean loss of the last ten steps lies below the text's unigram entropy and
    at no more than 0.7 of that of the first ten."""
    parser = argparse.ArgumentParser(prog="infinity demo", description=DESCRIPTION)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"optimizer steps (default {NUM_STEPS})")
    parser.add_argument(
        "--swap-dir", type=parse_path, help="where the swap files go (default: the temporary directory)"
    )
    parser.add_argument(
        "--out", type=parse_path, default=Path("out/infinity-demo.png"), help="the picture (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON; progress goes to stderr")
    arguments = parser.parse_args(words)
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    _check_places(arguments)
    with scratch_directory("infinity-demo-", arguments.swap_dir) as swap_dir:
        return _run(arguments, swap_dir)


def _check_places(arguments: argparse.Namespace) -> None:
    """Raises ConfigError: the picture comes after minutes, and may not be what fails then."""
    if arguments.swap_dir is not None:
        check_swap_dir(arguments.swap_dir)
    with contextlib.suppress(OSError):  # it is told below
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    check_output("out", arguments.out)


def _run(arguments: argparse.Namespace, swap_dir: Path) -> int:
    console = open_console(stderr=arguments.json)
    settings = Settings(swap_dir=swap_dir, dtype=faster_dtype(), num_steps=arguments.steps)
    text = standard_library_text()
    entropy = unigram_entropy_nats(text)
    num_parameters = count_parameters(settings)
    budget_bytes = host_budget_bytes(num_parameters, settings.dtype)
    console.print(
        f"{num_parameters:,} parameters ({settings.dtype}) on {len(text):,} bytes of Python's standard library: "
        f"{state_bytes(num_parameters, settings.dtype) / 1e6:,.0f} MB of state, "
        f"{budget_bytes / 1e6:,.0f} MB of memory for it, the rest in {swap_dir}",
        soft_wrap=True,
    )
    records: list[StepRecord] = []
    sampler = FootprintSampler(os.getpid(), swap_dir).start()
    try:
        # a daemon of its own: one that runs here for others does not serve a directory that was made just now
        with (
            DaemonProcess(swap_dirs=[swap_dir]) as daemon,
            TrainingProgress(console, settings.num_steps) as progress,
        ):

            def on_step(record: StepRecord) -> None:
                records.append(record)
                progress.show(record)

            train(settings, text, engine_config(settings, budget_bytes, daemon.socket), on_step)
    finally:
        footprint = sampler.stop()
    summary = summarise(settings, num_parameters, records, unigram_entropy=entropy, footprint=footprint)

    console.print(as_table(summary))
    if find_spec("matplotlib") is None:
        console.print("no picture without matplotlib: pip install 'infinity[plot]'")
    else:
        from infinity.commands.demo.plot import save_plot  # only now: matplotlib takes memory that is not training's

        save_plot(arguments.out, records, footprint.timeline, summary)
        console.print(f"picture: {arguments.out}")
    if arguments.json:
        print(json.dumps({**asdict(summary), "learned": summary.learned, "losses": [r.loss for r in records]}))
    if not summary.learned:
        console.print(
            "not learned: the mean loss of the last steps is not below the unigram entropy, or above "
            f"{LOSS_RATIO_MAX} x the mean of the first",
            style="red",
        )
    return 0 if summary.learned else 1

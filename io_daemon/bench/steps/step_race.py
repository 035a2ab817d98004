"""Several settings take the same training step in turns: with which of them is it the shortest?

Each has a private daemon over the same directories and a rank that replays one trace, all alive at once; a turn is one
step of each. The arithmetic of forward and backward is left out, so that what differs between the settings is not
hidden behind it; passes over memory (the update, copies of weights and gradients) stay.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from io_daemon.bench.run import Observer
from io_daemon.bench.steps.replay import Replay, writes_at_most
from io_daemon.bench.steps.room import arena_room_bytes, disk_room_bytes
from io_daemon.bench.steps.step_scale import scaled
from io_daemon.bench.sweep_plan import Cell
from io_daemon.command.units import block_text
from io_daemon.config import DaemonSettings
from io_daemon.machine.cpu_load import AcceleratorLoad, CpuLoad
from io_daemon.policy.step_trace import StepTrace, load
from io_daemon.policy.window import ahead_bytes
from io_daemon.rank.client import Client
from io_daemon.rank.process import DaemonProcess

TRACE: Final = "gpt-168m"
"""This is, of those that ship, the one whose scaled arena holds the most leases."""
STATE_BYTES_MIN: Final = 64 << 20
"""The state of one replay: below, a step is a few dozen leases long."""
STATE_S: Final = 0.2
"""The drive moves the state in so long. A step moves up to twice the state."""
WARM_UP_STEPS: Final = 2
"""One without a plan, one that follows it."""
TURNS_MAX: Final = 7
TURNS_MIN, TURNS_S = 3, 15.0
"""On a slow drive: so many at least, and none begins later."""


class StepRace(NamedTuple):
    steps_s: dict[Cell, list[float]]
    """One a turn: entries of the same index were taken one after another."""
    trace: str
    state_bytes: int
    """The state of each."""
    seconds: float
    """Starting and ending included."""
    written_bytes: int


class Runner(NamedTuple):
    """One setting and the step that it takes."""

    cell: Cell
    trace: StepTrace


def runners_of(cells: Sequence[Cell], *, num_directories: int, size_bytes: int, bw_bytes: float) -> list[Runner]:
    """All together take ``size_bytes`` of the disks at most; a step takes less than a second at ``bw_bytes`` a second.

    The arena differs with the window of the daemon's prefetch, as much as in training: what stays in it is equal."""
    full = load(TRACE)
    state_bytes = min(size_bytes // len(cells), max(STATE_BYTES_MIN, round(STATE_S * bw_bytes)))
    runners = []
    for cell in cells:
        ahead = ahead_bytes(cell.iodepth, cell.bs, num_directories)
        trace, _ = scaled(full, state_bytes / full.swap_bytes, ahead_bytes=ahead)
        runners.append(Runner(cell, trace))
    return runners


def race_problem(
    runners: Sequence[Runner], directories: Sequence[Path], *, size_bytes: int, write_limit_bytes: int
) -> str | None:
    """Why they cannot race: how to help it; None: they can. Raises ConfigError for an unfit directory."""
    if size_bytes < len(runners) * STATE_BYTES_MIN:
        return f"--size is too small for {len(runners)} times a step of {block_text(STATE_BYTES_MIN)} of state"
    if sum(runner.trace.swap_bytes for runner in runners) > disk_room_bytes(directories):
        return "the disks have too little free space for it"
    if sum(runner.trace.num_frames * runner.trace.frame_bytes for runner in runners) > arena_room_bytes():
        return "too little memory is free for it: lower --size"
    if race_writes_at_most(runners) > write_limit_bytes:
        return "--write-limit leaves too little for it"
    return None


def race_writes_at_most(runners: Sequence[Runner]) -> int:
    """Bytes, all together."""
    return sum(writes_at_most(runner.trace, WARM_UP_STEPS + TURNS_MAX) for runner in runners)


def run_race(runners: Sequence[Runner], directories: Sequence[Path], observer: Observer) -> StepRace:
    """Raises SwapSpaceError, DeviceIOError, DaemonLostError; leaves no file and no daemon behind."""
    begin = time.monotonic()
    with ExitStack() as stack:
        num_threads = max(1, len(os.sched_getaffinity(0)) - 1)  # one core is the daemon's
        work = AcceleratorLoad(stack.enter_context(CpuLoad(num_threads)), math.inf)
        clients, replays = [], []
        observer.phase(f"preparing {len(runners)} replays of a training step", len(runners))
        for number, (cell, trace) in enumerate(runners):
            daemon = stack.enter_context(_daemon(cell, directories))
            client = stack.enter_context(Client.connect(str(daemon.socket), job=f"bench-{os.getpid()}", rank=number))
            clients.append(client)
            replays.append(Replay(client, trace, work, client.swap_dirs))
            observer.progress(number + 1)
        steps_s = _take_turns(replays, observer)
        written_bytes = sum(sum(client.stats().total.bytes_written) for client in clients)
    return StepRace(
        {runner.cell: times for runner, times in zip(runners, steps_s, strict=True)},
        TRACE,
        runners[0].trace.swap_bytes,
        time.monotonic() - begin,
        written_bytes,
    )


def order_of_turn(turn: int, num_runners: int) -> list[int]:
    """There and back, beginning elsewhere each time: nobody always comes first, or after the same one."""
    there = [(turn // 2 + place) % num_runners for place in range(num_runners)]
    return there if turn % 2 == 0 else there[::-1]


def _take_turns(replays: Sequence[Replay], observer: Observer) -> list[list[float]]:
    """Seconds of every step of every replay."""
    observer.phase("settling", 0)
    for replay in replays:
        replay.take_step()
    for replay in replays:
        replay.wait_for_plan()
        replay.take_step()
    observer.phase("a training step with each finalist", TURNS_MAX * len(replays))
    steps_s: list[list[float]] = [[] for _ in replays]
    last_begin = time.monotonic() + TURNS_S
    for turn in range(TURNS_MAX):
        if turn >= TURNS_MIN and time.monotonic() > last_begin:
            break
        for index in order_of_turn(turn, len(replays)):
            steps_s[index].append(replays[index].take_step().step_s)
            observer.progress(sum(map(len, steps_s)))
    return steps_s


def _daemon(cell: Cell, directories: Sequence[Path]) -> DaemonProcess:
    values = {"engine": f"require:{cell.engine}", "block_size": cell.bs, "queue_depth": cell.iodepth}
    return DaemonProcess(swap_dirs=directories, options=DaemonSettings.model_validate(values).options())

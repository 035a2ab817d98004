"""The least traffic that any policy needs for a step, as a linear program, beside what the plan and the daemon move.

``python -m benchmarks.lower_bound --swap-dir DIR``: for each host budget the step of the 168M-parameter GPT is traced;
the bound is the optimum of the program below (HiGHS), with every object as divisible as water, once for the whole arena
and once for what is left of it beside the frames that stream (the prefetch window and one lease); the plan's figure is
the policy's own for the latter; the daemon's is counted while it replays the trace on the disk. Exit code 0 if the
daemon moves at most 5 % more than the second bound at every budget.

Between two uses of an object lies a *gap*, and x in [0, 1] is the part of the object that stays over it. A part that
stays need not be read at the far end. A version that stays from its write until it is overwritten or dead need not be
written back, y <= x of each of its gaps. At every access the parts that stay and the objects in use fit the frames.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from benchmarks.side import keep_results
from benchmarks.step_prediction import record_trace
from io_daemon.bench.steps.step import run_step
from io_daemon.bench.steps.step_settings import StepSettings
from io_daemon.command.scratch import scratch_directory
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.step_trace import StepTrace, load
from io_daemon.policy.window import ahead_bytes, frames_to_plan, window_frames
from io_daemon.shared.protocol import KINDS_MAX, kinds_of

MIB: Final = 1 << 20
EXCESS_MAX: Final = 0.05


def least_moved_frames(trace: StepTrace, num_frames: int) -> float:
    """Frames read and written per step by the best policy there is with ``num_frames`` to share, if they could be
    divided."""
    object_frames = frames_of(trace)
    length = len(trace.accesses)
    uses: dict[int, list[tuple[int, bool, bool, bool]]] = defaultdict(list)
    room = np.full(length, float(num_frames))
    for position, (chunk, read, write, dead) in enumerate(trace.accesses):
        for kind in kinds_of(read | write):
            item = chunk * KINDS_MAX + kind
            if object_frames[item]:
                uses[item].append((position, bool(read >> kind & 1), bool(write >> kind & 1), bool(dead >> kind & 1)))
                room[position] -= object_frames[item]
    program = _Program(length)
    total = sum(_add_object(program, int(object_frames[item]), of_item) for item, of_item in uses.items())
    return total - program.most_saved(room)


def _add_object(program: _Program, frames: int, uses: list[tuple[int, bool, bool, bool]]) -> int:
    """Put one object into the program; the frames that it moves if nothing of it ever stays."""
    count, moved = len(uses), 0
    gaps: list[int | None] = []
    for number, (position, _, _, dead) in enumerate(uses):
        follower = uses[(number + 1) % count]
        distance = follower[0] - position + (program.length if number + 1 == count else 0)
        saves_read = follower[1] and not dead
        moved += frames * saves_read
        gaps.append(None if dead else program.add_gap(position, distance, frames, saved=frames * saves_read))
    for number, (_, _, written, dead) in enumerate(uses):
        if not written or dead:
            continue
        version: list[int] = []
        for step in range(count):
            gap = gaps[(number + step) % count]
            if gap is None:
                break
            version.append(gap)
            if uses[(number + step + 1) % count][2]:
                break
        moved += frames
        program.add_version(version, frames)
    return moved


class _Program:
    """Largest saving over the parts that stay."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._saved: list[float] = []
        self._frames: list[int] = []
        self._spans: list[tuple[int, int]] = []
        """(position, distance) of a gap."""
        self._versions: list[tuple[list[int], int]] = []

    def add_gap(self, position: int, distance: int, frames: int, *, saved: int) -> int:
        self._spans.append((position, distance))
        self._frames.append(frames)
        self._saved.append(float(saved))
        return len(self._spans) - 1

    def add_version(self, gaps: list[int], frames: int) -> None:
        self._versions.append((gaps, frames))

    def most_saved(self, room: np.ndarray[Any, np.dtype[np.float64]]) -> float:
        """Columns: gaps, versions, frames that stay at each access. The last are defined by their changes."""
        num_gaps, num_versions, length = len(self._spans), len(self._versions), self.length
        levels = num_gaps + num_versions
        changes: list[tuple[int, int, float]] = []
        for gap, ((position, distance), frames) in enumerate(zip(self._spans, self._frames, strict=True)):
            if distance <= 1:
                continue
            begin, end = position + 1, position + distance  # strictly between the two uses
            changes += [(begin, gap, -float(frames))] if begin < length else []
            changes += [(end, gap, float(frames))] if end < length else []
            if end > length:  # it reaches into the next step, which is this one again
                begin = max(begin - length, 0)
                if begin < end - length:
                    changes += [(begin, gap, -float(frames)), (end - length, gap, float(frames))]
        for position in range(length):
            changes.append((position, levels + position, 1.0))
            if position:
                changes.append((position, levels + position - 1, -1.0))
        row, column, value = zip(*changes, strict=True)
        columns = levels + length
        equal = coo_matrix((value, (row, column)), shape=(length, columns)).tocsr()
        pairs = [(version, gap) for version, (gaps, _) in enumerate(self._versions) for gap in gaps]
        rows = np.arange(len(pairs))
        first = [num_gaps + version for version, _ in pairs]
        second = [gap for _, gap in pairs]
        data = np.concatenate((np.ones(len(pairs)), -np.ones(len(pairs))))
        below = coo_matrix(
            (data, (np.concatenate((rows, rows)), np.concatenate((first, second)))), shape=(len(pairs), columns)
        ).tocsr()
        gain = np.zeros(columns)
        gain[:num_gaps] = self._saved
        gain[num_gaps:levels] = [frames for _, frames in self._versions]
        bounds = [(0.0, 1.0)] * levels + [(0.0, max(0.0, float(most))) for most in room]
        found = linprog(
            -gain,
            A_ub=below,
            b_ub=np.zeros(len(pairs)),
            A_eq=equal,
            b_eq=np.zeros(length),
            bounds=bounds,
            method="highs",
        )
        if not found.success:
            raise RuntimeError(f"no optimum: {found.message}")
        return float(-found.fun)


def frames_of(trace: StepTrace) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Frames of each object that is not pinned, by chunk * KINDS_MAX + kind."""
    found = np.zeros(len(trace.chunks) * KINDS_MAX, np.uint8)
    for chunk, (sizes, pinned) in enumerate(trace.chunks):
        for kind, size in enumerate(sizes):
            if not pinned >> kind & 1:
                found[chunk * KINDS_MAX + kind] = -(-size // trace.frame_bytes)
    return found


def frames_to_share(trace: StepTrace, num_devices: int = 1) -> tuple[int, int]:
    """Frames that are not pinned; and those of them that a plan may fill, beside what streams."""
    pinned = sum(
        -(-size // trace.frame_bytes)
        for sizes, mask in trace.chunks
        for kind, size in enumerate(sizes)
        if mask >> kind & 1
    )
    usable = trace.num_frames - pinned
    ahead = ahead_bytes(QUEUE_DEPTH, BLOCK_BYTES, num_devices)
    frames = frames_of(trace)
    largest = max(
        sum(int(frames[chunk * KINDS_MAX + kind]) for kind in kinds_of(read | write))
        for chunk, read, write, _ in trace.accesses
    )
    return usable, frames_to_plan(usable, window_frames(trace.num_frames, trace.frame_bytes, ahead), largest)


def measure_budget(arguments: argparse.Namespace, directory: Path, budget_mib: int) -> dict[str, Any]:
    path = record_trace(directory, budget_mib, arguments.threads)
    trace = load(str(path))
    frame_bytes = trace.frame_bytes
    shared, beside = frames_to_share(trace)
    chosen = plan(PlanRequest(trace.access_trace(), frames_of(trace), beside))
    replayed = run_step(StepSettings(directories=(directory,), trace=str(path), steps=arguments.steps))
    return {
        "host_budget_mib": budget_mib,
        "num_frames": trace.num_frames,
        "bound_bytes": least_moved_frames(trace, shared) * frame_bytes,
        "bound_beside_window_bytes": least_moved_frames(trace, beside) * frame_bytes,
        "planned_bytes": chosen.moved_frames * frame_bytes,
        "replayed_bytes": replayed.read_bytes + replayed.write_bytes,
    }


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="GB of a step of a 168M-parameter GPT, read and written")
    for column in (
        "MiB",
        "least, whole arena",
        "least beside window",
        "planned",
        "replayed",
        "planned / least",
        "replayed / least",
    ):
        table.add_column(column, justify="right")
    for row in results["budgets"]:
        names = ("bound_bytes", "bound_beside_window_bytes", "planned_bytes", "replayed_bytes")
        sizes = [row[name] for name in names]
        ratios = [size / max(1.0, sizes[1]) for size in sizes[2:]]
        cells = [f"{size / 1e9:.2f}" for size in sizes] + [f"{ratio:.3f}" for ratio in ratios]
        table.add_row(str(row["host_budget_mib"]), *cells)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser)
    parser.add_argument("--host-budget-mib", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with scratch_directory("infinity-bench-", arguments.swap_dir) as directory:
        results: dict[str, Any] = {
            "machine": describe_machine(directory),
            "budgets": [measure_budget(arguments, directory, mib) for mib in arguments.host_budget_mib],
        }
    keep_results("lower_bound", results)
    if arguments.json:
        print(json.dumps(results, indent=2, default=str))
    else:
        show(results, Console(width=None if sys.stdout.isatty() else 120))
    rows = results["budgets"]
    return 0 if all(row["replayed_bytes"] <= (1 + EXCESS_MAX) * row["bound_beside_window_bytes"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

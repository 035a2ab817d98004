"""What a ring costs between two processes, called from Python.

``python -m benchmarks.ring_latency``: µs per entry (a) while both sides are awake: streamed (many entries under way),
and handed over (one under way: push, transfer, pop; half of a round trip); (b) while both sleep in between: a round
trip through a socket pair. The other process echoes. A round gives the median over its entries (streamed: over parts),
so that one during which somebody else had the core does not count as awake; printed is the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from rich.console import Console
from rich.table import Table

from io_daemon._native import CompletionRing, Region, SubmissionRing

NUM_ENTRIES: Final = 1024
STREAM_ENTRIES: Final = 250
CQ_OFFSET: Final = 1 << 16
REGION_BYTES: Final = 1 << 18
DEADLINE_MS: Final = 30_000
AWAKE, ASLEEP, END = 0, 1, 2
"""Opcodes: how the echo waits for the entry after this one, or that there is none."""
AWAKE_TARGET_US: Final = 2.0


def machine() -> str:
    """Rings know no disk; what matters to them is the processor, and who else wants it."""
    return f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


class Rings(NamedTuple):
    sq: SubmissionRing
    cq: CompletionRing


def attach(memory: int, wake: int, *, create: bool) -> Rings:
    """``wake``: this side's end of the socket pair by which the two wake each other."""
    region = Region(memory, REGION_BYTES)
    return Rings(
        SubmissionRing(region, 0, NUM_ENTRIES, wake, create=create),
        CompletionRing(region, CQ_OFFSET, NUM_ENTRIES, wake, create=create),
    )


def echo(rings: Rings) -> None:
    """The other process: answers every entry until told to end."""
    opcode = ASLEEP
    while opcode != END:
        if opcode == ASLEEP and rings.sq.wait(DEADLINE_MS) != 0:
            raise TimeoutError("no entry to echo")
        while (entry := rings.sq.pop()) is None:
            pass
        seq, opcode = entry[:2]
        while not rings.cq.push(seq, 0, 0, 0, 0, 0, 0, 0, 0, 0):
            pass


@contextmanager
def echo_process() -> Iterator[Rings]:
    memory = os.memfd_create("ring-latency", 0)
    os.truncate(memory, REGION_BYTES)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    rings = attach(memory, ours.fileno(), create=True)
    fds = (memory, theirs.fileno())
    command = [sys.executable, "-m", "benchmarks.ring_latency", "--echo", *map(str, fds)]
    process = subprocess.Popen(command, pass_fds=fds)
    try:
        yield rings
        rings.sq.push(0, END, 0, 0, 0, 0, 0)
        process.wait(DEADLINE_MS / 1000)
    finally:
        process.kill()
        process.wait()
        os.close(memory)
        ours.close()
        theirs.close()


def stream(rings: Rings, num_entries: int) -> float:
    """Seconds per entry with many under way, while the other process pops and answers: median over parts."""
    pop, push = rings.cq.pop, rings.sq.push
    taken: list[float] = []
    for _ in range(num_entries // STREAM_ENTRIES):
        num_popped, begin = 0, time.perf_counter()
        for seq in range(STREAM_ENTRIES):
            push(seq, AWAKE, 0, 0, 0, 0, 0)
            num_popped += pop() is not None
        while num_popped < STREAM_ENTRIES:
            num_popped += pop() is not None
        taken.append((time.perf_counter() - begin) / STREAM_ENTRIES)
    return statistics.median(taken)


def hand_over(rings: Rings, num_entries: int) -> float:
    """Seconds for one entry to get from one awake process to the other: half of a round trip."""
    pop, push, now = rings.cq.pop, rings.sq.push, time.perf_counter
    taken = [0.0] * num_entries
    for seq in range(num_entries):
        begin = now()
        push(seq, AWAKE, 0, 0, 0, 0, 0)
        while pop() is None:
            pass
        taken[seq] = now() - begin
    return statistics.median(taken) / 2


def sleep_and_wake(rings: Rings, num_entries: int) -> float:
    """Seconds of a round trip in which each side sleeps until the other one wakes it."""
    taken = [0.0] * num_entries
    for seq in range(num_entries):
        begin = time.perf_counter()
        rings.sq.push(seq, ASLEEP, 0, 0, 0, 0, 0)
        if rings.cq.wait(DEADLINE_MS) != 0:
            raise TimeoutError("the other process does not answer")
        rings.cq.pop()
        taken[seq] = time.perf_counter() - begin
    return statistics.median(taken)


def measure(rings: Rings, run: Callable[[Rings, int], float], num_entries: int, num_rounds: int) -> list[float]:
    """µs of every round, after one that does not count."""
    return [run(rings, num_entries) * 1e6 for _ in range(num_rounds + 1)][1:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=20_000, help="per round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--echo", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.echo:
        echo(attach(*options.echo, create=False))
        return 0
    with echo_process() as rings:
        rounds = {
            "awake, handed over": measure(rings, hand_over, options.entries, options.rounds),
            "awake, streamed": measure(rings, stream, options.entries, options.rounds),
            "asleep, round trip": measure(rings, sleep_and_wake, options.entries // 10, options.rounds),
        }
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    met = medians["awake, handed over"] <= AWAKE_TARGET_US
    if options.json:
        print(json.dumps({"machine": machine(), "median_us": medians, "rounds_us": rounds, "met": met}))
        return 0 if met else 1
    table = Table("ring", "median µs", "best", "worst", title=machine())
    for name, values in rounds.items():
        table.add_row(name, f"{medians[name]:.2f}", f"{min(values):.2f}", f"{max(values):.2f}")
    Console().print(table)
    print(f"awake push + pop ≤ {AWAKE_TARGET_US} µs: {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

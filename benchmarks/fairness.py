"""What a small tenant keeps of its bandwidth and latency while another tenant writes as fast as it can.

``python -m benchmarks.fairness``: one daemon; a small rank reads chunks that are not resident, one lease after the
other; a large one, in a process of its own, keeps many write leases open. Turns alternate, alone and beside, in one
run, so that a disk that changes its pace meets both. Prints the small rank's bandwidth and latency in both, and their
ratios turn by turn: the bandwidth kept is the median ratio, likewise the stretch of the p99.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from io_daemon.command.scratch import scratch_directory
from io_daemon.rank.client import Client
from io_daemon.rank.process import DaemonProcess
from io_daemon.shared.protocol import ChunkSpec, ObjectKind

WEIGHT: Final = ObjectKind.WEIGHT.mask
FRAME_BYTES: Final = 1 << 20
SMALL_FRAMES: Final = 8
SMALL_CHUNKS: Final = 96
LARGE_FRAMES: Final = 96
LARGE_CHUNKS: Final = 512
SETTLE_S: Final = 0.3
"""From the writer's start or end to the next turn: its writes reach the device, or run out."""


def attach(socket: str, job: str, num_frames: int, num_chunks: int) -> tuple[Client, range]:
    client = Client.connect(socket, job=job, rank=0)
    client.attach(num_frames=num_frames, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="auto")
    return client, client.register([ChunkSpec((FRAME_BYTES,))] * num_chunks)


def use(client: Client, chunk: int, *, read: int = 0, write: int = 0) -> float:
    """One lease, from its acquire to its release; seconds until it was granted."""
    start = time.perf_counter()
    seq = client.acquire(chunk, read=read, write=write)
    client.wait(seq)
    waited_s = time.perf_counter() - start
    client.release(seq, dirty=write)
    return waited_s


def write_on_and_off(socket: str, num_leases: int, verb: str, going: Event, ended: Event) -> None:
    """The large rank: ``num_leases`` leases open at any time while ``going`` is set."""
    masks = {"write": 0, "read": WEIGHT, "update": WEIGHT}[verb], 0 if verb == "read" else WEIGHT
    client, chunks = attach(socket, "large", LARGE_FRAMES, LARGE_CHUNKS)
    with client:
        for chunk in chunks:
            use(client, chunk, write=WEIGHT)
        turn = 0
        ended.set()
        while going.wait() and not ended.is_set():
            leases: deque[int] = deque()
            while going.is_set():
                while len(leases) < num_leases:
                    leases.append(client.acquire(chunks[turn % LARGE_CHUNKS], read=masks[0], write=masks[1]))
                    turn += 1
                client.wait(leases[0])
                client.release(leases.popleft(), dirty=masks[1])
            for seq in leases:
                client.release(seq)


@contextmanager
def large_rank(socket: str, num_leases: int, verb: str) -> Iterator[Event]:
    """An event: the large rank is at work while it is set."""
    context = multiprocessing.get_context("spawn")
    going, ended = context.Event(), context.Event()
    process = context.Process(target=write_on_and_off, args=(socket, num_leases, verb, going, ended))
    process.start()
    try:
        if not ended.wait(120):
            raise RuntimeError("the large rank is not ready after 120 s")
        ended.clear()
        yield going
    finally:
        going.clear()
        ended.set()
        time.sleep(SETTLE_S)
        going.set()  # it looks, and leaves
        process.join(60)


def take_turn(client: Client, chunks: range, seconds: float) -> dict[str, float]:
    """The small rank reads chunk after chunk."""
    waits_s: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        waits_s.append(use(client, chunks[len(waits_s) % len(chunks)], read=WEIGHT))
    elapsed_s = time.perf_counter() - start
    return {
        "bytes_per_s": len(waits_s) * FRAME_BYTES / elapsed_s,
        "p50_us": float(np.percentile(waits_s, 50)) * 1e6,
        "p99_us": float(np.percentile(waits_s, 99)) * 1e6,
        "num_reads": len(waits_s),
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    alone: list[dict[str, float]] = []
    beside: list[dict[str, float]] = []
    with (
        scratch_directory("fairness-", arguments.swap_dir) as directory,
        DaemonProcess(swap_dirs=[directory], options=["--engine", arguments.engine]) as daemon,
    ):
        socket = str(daemon.socket)
        client, chunks = attach(socket, "small", SMALL_FRAMES, SMALL_CHUNKS)
        with client, large_rank(socket, arguments.leases, arguments.verb) as going:
            for chunk in chunks:
                use(client, chunk, write=WEIGHT)
            for turn in range(2 * arguments.turns):
                if turn % 2:
                    going.set()
                time.sleep(SETTLE_S)
                (beside if turn % 2 else alone).append(take_turn(client, chunks, arguments.seconds))
                going.clear()
    kept = [b["bytes_per_s"] / a["bytes_per_s"] for a, b in zip(alone, beside, strict=True)]
    stretch = [b["p99_us"] / a["p99_us"] for a, b in zip(alone, beside, strict=True)]
    return {
        "leases": arguments.leases,
        "verb": arguments.verb,
        "alone": alone,
        "beside": beside,
        "bandwidth_kept": round(statistics.median(kept), 3),
        "p99_stretch": round(statistics.median(stretch), 2),
        "kept_each_turn": [round(each, 3) for each in kept],
        "stretch_each_turn": [round(each, 2) for each in stretch],
        "machine": describe_machine(Path(arguments.swap_dir)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fairness", description=__doc__)
    add_directory(parser)
    parser.add_argument("--engine", default="auto", help="as for `io-daemon serve`")
    parser.add_argument("--leases", type=int, default=32, help="leases that the large rank keeps open; default: 32")
    parser.add_argument("--verb", choices=("write", "read", "update"), default="write", help="what it does with them")
    parser.add_argument("--turns", type=int, default=5, help="turns alone and turns beside; default: 5")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn; default: 1.5")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    table = Table(title=f"A small rank beside one with {arguments.leases} leases ({arguments.verb})")
    for column in ("turn", "alone MB/s", "beside MB/s", "kept", "alone p99 µs", "beside p99 µs", "stretch"):
        table.add_column(column, justify="right")
    for turn, (a, b) in enumerate(zip(result["alone"], result["beside"], strict=True)):
        table.add_row(
            str(turn), f"{a['bytes_per_s'] / 1e6:.0f}", f"{b['bytes_per_s'] / 1e6:.0f}",
            f"{b['bytes_per_s'] / a['bytes_per_s']:.2f}", f"{a['p99_us']:.0f}", f"{b['p99_us']:.0f}",
            f"{b['p99_us'] / a['p99_us']:.1f}",
        )  # fmt: skip
    Console().print(table)
    Console().print(f"bandwidth kept {result['bandwidth_kept']:.2f}, p99 stretched {result['p99_stretch']:.1f} times")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

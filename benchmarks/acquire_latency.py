"""How long an acquire of a resident chunk takes, from call to grant, while every core computes.

``python -m benchmarks.acquire_latency``: a daemon, some tenants that acquire and release resident chunks in turn, and
one process a core that multiplies matrices. Prints percentiles in µs of acquire + wait, of the rings' round trip
(echo), and of a byte that a bare asyncio server of the daemon's priority sends back, which is what the machine allows
at that time; all of them in turns, with the machine otherwise idle and with compute beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.place import add_directory
from io_daemon.command.scratch import scratch_directory
from io_daemon.rank.client import Client
from io_daemon.rank.process import DaemonProcess
from io_daemon.serve.startup import raise_priority
from io_daemon.shared.protocol import ChunkSpec, ObjectKind

FRAME_BYTES: Final = 1 << 20
NUM_CHUNKS: Final = 16
MATRIX_ROWS: Final = 256
THINK_S: Final = 200e-6
"""Between two acquires, as a step has compute between them: the daemon sleeps again meanwhile."""
BEGIN_TIMEOUT_S: Final = 60.0
PERCENTILES: Final = (50.0, 99.0, 99.9)
FIGURES: Final = ("acquire_us", "echo_us", "bare_asyncio_us")


def compute(begun: Barrier, stop: Event, seed: int) -> None:
    """Keep one core busy."""
    os.environ["OMP_NUM_THREADS"] = "1"
    left, right = np.random.default_rng(seed).random((2, MATRIX_ROWS, MATRIX_ROWS), dtype=np.float32)
    begun.wait(BEGIN_TIMEOUT_S)
    while not stop.is_set():
        left = (left @ right) % 1.0


@contextmanager
def computing(num_processes: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    begun, stop = context.Barrier(num_processes + 1), context.Event()
    processes = [
        context.Process(target=compute, args=(begun, stop, seed), daemon=True) for seed in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        begun.wait(BEGIN_TIMEOUT_S)
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(10.0)


class Echo(asyncio.Protocol):
    """Sends back what comes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def serve_echo(address: str) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Echo, address)
        await server.serve_forever()

    raise_priority()
    asyncio.run(run())


@contextmanager
def bare_echo(address: str) -> Iterator[socket.socket]:
    """A connection to an asyncio server that does nothing else."""
    process = multiprocessing.get_context("spawn").Process(target=serve_echo, args=(address,), daemon=True)
    process.start()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            while sock.connect_ex(address) != 0:
                process.join(0.05)
                if process.exitcode is not None:
                    raise RuntimeError(f"the echo server ended with status {process.exitcode}")
            yield sock
    finally:
        process.terminate()
        process.join(10.0)


def round_trip_s(sock: socket.socket) -> float:
    start = time.perf_counter()
    sock.send(b"x")
    sock.recv(1)
    return time.perf_counter() - start


def attach(socket_path: str, rank: int) -> tuple[Client, range]:
    client = Client.connect(socket_path, job="acquire-latency", rank=rank)
    client.attach(num_frames=NUM_CHUNKS, frame_bytes=FRAME_BYTES, swap_dirs=client.swap_dirs, lock_memory="auto")
    chunks = client.register([ChunkSpec((FRAME_BYTES,))] * NUM_CHUNKS)
    for chunk in chunks:
        seq = client.acquire(chunk, write=ObjectKind.WEIGHT.mask)
        client.wait(seq)
        client.release(seq, dirty=ObjectKind.WEIGHT.mask)
    return client, chunks


def measure(
    tenants: Sequence[tuple[Client, range]], bare: socket.socket, num_acquires: int
) -> dict[str, dict[str, float]]:
    """Percentiles in µs, tenants taking turns."""
    acquire_s, echo_s, bare_s = [], [], []
    for turn in range(num_acquires):
        client, chunks = tenants[turn % len(tenants)]
        chunk = chunks[turn // len(tenants) % len(chunks)]
        start = time.perf_counter()
        seq = client.acquire(chunk, read=ObjectKind.WEIGHT.mask)
        client.wait(seq)
        acquire_s.append(time.perf_counter() - start)
        client.release(seq)
        time.sleep(THINK_S)
        if turn % 4 == 0:
            echo_s.append(client.echo())
            time.sleep(THINK_S)
            bare_s.append(round_trip_s(bare))
    return {
        name: percentiles_us(samples_s) for name, samples_s in zip(FIGURES, (acquire_s, echo_s, bare_s), strict=True)
    }


def percentiles_us(samples_s: Sequence[float]) -> dict[str, float]:
    values = np.percentile(np.array(samples_s) * 1e6, PERCENTILES)
    return {f"p{percentile:g}": round(float(value), 1) for percentile, value in zip(PERCENTILES, values, strict=True)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    num_cores = len(os.sched_getaffinity(0))
    load_before = os.getloadavg()[0]
    with (
        scratch_directory("acquire-latency-", arguments.swap_dir) as directory,
        DaemonProcess(swap_dirs=[directory], options=["--engine", arguments.engine]) as daemon,
        bare_echo(str(daemon.socket.parent / "echo")) as bare,
    ):
        tenants = [attach(str(daemon.socket), rank) for rank in range(arguments.tenants)]
        measure(tenants, bare, arguments.acquires // 10)
        idle = measure(tenants, bare, arguments.acquires)
        with computing(num_cores):
            measure(tenants, bare, arguments.acquires // 10)
            busy = measure(tenants, bare, arguments.acquires)
        for client, _ in tenants:
            client.close()
    return {
        "tenants": arguments.tenants,
        "acquires": arguments.acquires,
        "compute_processes": num_cores,
        "load_before": round(load_before, 2),
        "idle": idle,
        "compute": busy,
        "machine": describe_machine(Path(arguments.swap_dir)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="acquire_latency", description=__doc__)
    add_directory(parser)
    parser.add_argument("--engine", default="auto", help="as for `io-daemon serve`")
    parser.add_argument("--tenants", type=int, default=1, help="attached ranks, taking turns; default: 1")
    parser.add_argument("--acquires", type=int, default=10_000, help="acquires measured; default: 10000")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    result = run(arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    table = Table(title=f"{arguments.acquires} acquires of resident chunks, {arguments.tenants} tenants, µs")
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile:g}", justify="right")
    for load in ("idle", "compute"):
        for what in FIGURES:
            figures = result[load][what]
            table.add_row(
                f"{what.removesuffix('_us').replace('_', ' ')}, {load}", *(f"{value:.1f}" for value in figures.values())
            )
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The reactor beside fio: same file, engine, block size, depth and direct I/O, in alternating runs.

``python -m benchmarks.reactor_bandwidth --directory /nvme0``: GB/s of sequential reads and writes, of fio, of the
reactor without and with block checksums, and of the checksum alone. Runs alternate, so that each of the reactor's has a
fio run beside it; how far fio's own runs lie apart says how much of a ratio is the device's mood.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.place import add_directory
from io_daemon._native import ENGINES, Reactor, Region, checksum, checksum_portable
from io_daemon.command.scratch import scratch_directory

FIO_ENGINES: Final = {"io_uring": "io_uring", "libaio": "libaio", "posix": "psync"}
REQUEST_BLOCKS: Final = 4
CHECKSUM_BYTES: Final = 64 << 20
SEED: Final = 1
FIO, PLAIN, SUMMED = "fio", "reactor", "reactor, checksums"


class Target:
    """One reactor, as deep and with blocks as large as fio's. Its arena is little larger than fio's buffers, so that
    both are cached alike: two requests beyond the queue depth, that the device need not wait for Python."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self.file_bytes = int(options.file_bytes)
        self.request_bytes = int(options.block_bytes) * REQUEST_BLOCKS
        self.num_requests = -(-int(options.queue_depth) // REQUEST_BLOCKS) + 2
        self.arena = self._region(self.num_requests * self.request_bytes)
        self.arena.array()[:] = np.random.default_rng(SEED).integers(0, 256, self.arena.region_bytes, dtype=np.uint8)
        self.checksums = self._region(-(-self.file_bytes // options.block_bytes) * 4)
        self.reactor = Reactor(options.engine, options.queue_depth, options.block_bytes)
        self.block_bytes = int(options.block_bytes)
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.file = self.reactor.add_file(fd)
        os.close(fd)
        self.buffer = self.reactor.add_buffer(self.arena)

    @staticmethod
    def _region(num_bytes: int) -> Region:
        fd = os.memfd_create("reactor-bandwidth")
        os.truncate(fd, num_bytes)
        region = Region(fd, num_bytes)
        os.close(fd)
        region.prefault(2)
        return region

    def run(self, operation: int, runtime_s: float, *, checksums: bool) -> float:
        """Bytes a second over about ``runtime_s``, from the start of the file and round again."""
        begin = time.perf_counter()
        num_requests = self._keep_busy(
            lambda index: operation if time.perf_counter() - begin < runtime_s else None, checksums=checksums
        )
        return num_requests * self.request_bytes / (time.perf_counter() - begin)

    def fill(self) -> None:
        """Write the whole file once, and store its checksums."""
        num_requests = self.file_bytes // self.request_bytes
        self._keep_busy(lambda index: Reactor.WRITE if index < num_requests else None, checksums=True)

    def move(self, read_bytes: int, written_bytes: int) -> float:
        """Seconds that so many bytes take, reads and writes evenly mixed, with checksums. The file is filled before."""
        num_requests = -(-(read_bytes + written_bytes) // self.request_bytes)
        num_writes = round(num_requests * written_bytes / max(1, read_bytes + written_bytes))

        def operation(index: int) -> int | None:
            if index == num_requests:
                return None
            is_write = (index + 1) * num_writes // num_requests > index * num_writes // num_requests
            return Reactor.WRITE if is_write else Reactor.READ

        begin = time.perf_counter()
        self._keep_busy(operation, checksums=True)
        return time.perf_counter() - begin

    def close(self) -> None:
        if not self.reactor.close():
            raise TimeoutError("the reactor did not end")

    def _keep_busy(self, operation_of: Callable[[int], int | None], *, checksums: bool) -> int:
        """Requests until ``operation_of`` their number is None."""
        waiter = select.poll()
        waiter.register(self.reactor.event_fd, select.POLLIN)
        places = self.file_bytes // self.request_bytes
        free = list(range(self.num_requests))
        num_started = 0
        operation = operation_of(0)
        while True:
            while free and operation is not None:
                self._submit(free.pop(), operation, num_started % places * self.request_bytes, checksums=checksums)
                num_started += 1
                operation = operation_of(num_started)
            if len(free) == self.num_requests:
                return num_started
            if not waiter.poll(30_000):
                raise TimeoutError("no completion within 30 s")
            os.eventfd_read(self.reactor.event_fd)
            for slot, status, error_number, *_ in self.reactor.reap(self.num_requests):
                if status:
                    raise OSError(error_number, f"request ended with status {status}")
                free.append(slot)

    def _submit(self, slot: int, operation: int, offset: int, *, checksums: bool) -> None:
        at = slot * self.request_bytes
        if not checksums:
            self.reactor.submit(slot, operation, self.file, offset, self.buffer, at, self.request_bytes)
            return
        verify = operation == Reactor.READ
        place = offset // self.block_bytes * 4
        self.reactor.submit(
            slot, operation, self.file, offset, self.buffer, at, self.request_bytes, self.checksums, place, verify
        )


def run_fio(path: Path, write: bool, options: argparse.Namespace) -> float:
    """Bytes a second, by fio's own count."""
    command = [
        "fio",
        "--name=pair",
        f"--filename={path}",
        f"--size={options.file_bytes}",
        f"--rw={'write' if write else 'read'}",
        f"--bs={options.block_bytes}",
        f"--iodepth={options.queue_depth if options.engine != 'posix' else 1}",
        f"--numjobs={options.queue_depth if options.engine == 'posix' else 1}",
        "--group_reporting",
        f"--ioengine={FIO_ENGINES[options.engine]}",
        "--direct=1",
        f"--runtime={options.runtime_s}",
        "--time_based",
        "--output-format=json",
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(report["jobs"][0]["write" if write else "read"]["bw_bytes"])


def time_checksum(function: Callable[[NDArray[np.uint8]], int]) -> float:
    """Bytes a second over bytes that no cache holds; the best of five."""
    data = np.random.default_rng(SEED).integers(0, 256, CHECKSUM_BYTES, dtype=np.uint8)
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        function(data)
        taken.append(time.perf_counter() - begin)
    return CHECKSUM_BYTES / min(taken)


def measure(path: Path, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """GB/s of every run, by direction and who ran."""
    target = Target(path, options)
    target.fill()  # the first write of an extent is slower
    figures: dict[str, dict[str, list[float]]] = {}
    for direction, operation in (("write", Reactor.WRITE), ("read", Reactor.READ)):
        runs: dict[str, list[float]] = {FIO: [], PLAIN: [], SUMMED: []}
        for _ in range(options.pairs):
            runs[FIO].append(run_fio(path, direction == "write", options) / 1e9)
            runs[PLAIN].append(target.run(operation, options.runtime_s, checksums=False) / 1e9)
            runs[SUMMED].append(target.run(operation, options.runtime_s, checksums=True) / 1e9)
        figures[direction] = runs
        target.fill()  # fio and the run without checksums have left other bytes
    target.close()
    return figures


def print_table(figures: dict[str, dict[str, list[float]]], sums: dict[str, float]) -> None:
    table = Table("GB/s", "median", "lowest", "highest", "median ratio to fio")
    for direction, runs in figures.items():
        for name, values in runs.items():
            ratio = statistics.median(value / fio for value, fio in zip(values, runs[FIO], strict=True))
            cells = (f"{figure:.2f}" for figure in (statistics.median(values), min(values), max(values), ratio))
            table.add_row(f"{direction}, {name}", *cells)
    for name, value in sums.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_directory(parser, "--directory")
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--file-bytes", type=int, default=2 << 30)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--runtime-s", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    if shutil.which("fio") is None:
        print("fio is not installed: there is nothing to compare with", file=sys.stderr)
        return 2
    with scratch_directory("infinity-bench-", options.directory) as directory:
        path = directory / "target"
        path.touch()
        os.truncate(path, options.file_bytes)
        figures = measure(path, options)
    sums = {"checksum": time_checksum(checksum) / 1e9, "checksum, portable": time_checksum(checksum_portable) / 1e9}
    if options.json:
        setting = {name: str(value) for name, value in vars(options).items()}
        print(json.dumps({"setting": setting, "gb_per_s": figures, "checksum_gb_per_s": sums}))
    else:
        print_table(figures, sums)
    return 0


if __name__ == "__main__":
    sys.exit(main())

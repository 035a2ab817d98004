"""A reactor with one file and one arena, for tests of what the compiled core does with them."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import BenchReactor, Reactor, Region

DEADLINE_S = 60.0
BLOCK_BYTES = 64 * 1024
QUEUE_DEPTH = 4
ARENA_BYTES = 8 << 20
CHECKSUMS_MAX = 4096

Fault = tuple[str, int, int]


class Completion(NamedTuple):
    tag: int
    status: int
    error_number: int
    offset: int
    expected: int
    actual: int


def make_region(num_bytes: int, *, writable: bool = True) -> Region:
    """A region over a new memfd that nobody else holds."""
    fd = os.memfd_create("test-region", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, num_bytes)
        return Region(fd, num_bytes, writable=writable)
    finally:
        os.close(fd)


class ReactorBench:
    """Lower half of the arena: bytes to write, random. Upper half: where reads go. The file is as large as one half."""

    def __init__(
        self, path: Path, engine: str, *, direct: bool = False, faults: Sequence[Fault] = (), truncate: bool = True
    ) -> None:
        self.half_bytes = ARENA_BYTES // 2
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if truncate:
                os.truncate(fd, self.half_bytes)
            self.region = make_region(ARENA_BYTES)
            self.checksums = make_region(CHECKSUMS_MAX * 4)
            self.reactor = BenchReactor(engine, QUEUE_DEPTH, BLOCK_BYTES, faults=faults)
            self.file = self.reactor.add_file(fd)
        finally:
            os.close(fd)
        self.buffer = self.reactor.add_buffer(self.region)
        arena = self.region.array()
        self.to_write = arena[: self.half_bytes]
        self.found = arena[self.half_bytes :]
        self.to_write[:] = np.random.default_rng(0).integers(0, 256, self.half_bytes, dtype=np.uint8)

    def __enter__(self) -> ReactorBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.reactor.close(int(DEADLINE_S * 1000)) and error is None:
            raise AssertionError("the reactor did not end")

    def stored_checksums(self, num_blocks: int) -> NDArray[np.uint32]:
        return self.checksums.array().view(np.uint32)[:num_blocks]

    def submit_write(self, tag: int, offset: int, at: int, num_bytes: int, *, first_checksum: int = 0) -> None:
        self.reactor.submit(
            tag, Reactor.WRITE, self.file, offset, self.buffer, at, num_bytes, self.checksums, first_checksum * 4
        )

    def submit_read(
        self, tag: int, offset: int, at: int, num_bytes: int, *, first_checksum: int = 0, verify: bool = True
    ) -> None:
        """``at`` counts from the start of the upper half."""
        self.reactor.submit(
            tag,
            Reactor.READ,
            self.file,
            offset,
            self.buffer,
            self.half_bytes + at,
            num_bytes,
            self.checksums,
            first_checksum * 4,
            verify,
        )

    def finish(self, num_requests: int = 1) -> list[Completion]:
        """Wait for that many completions; fails if there are more."""
        return finish(self.reactor, num_requests)

    def write(self, offset: int, at: int, num_bytes: int) -> Completion:
        self.submit_write(1, offset, at, num_bytes)
        return self.finish()[0]

    def read(self, offset: int, at: int, num_bytes: int, *, verify: bool = True) -> Completion:
        self.submit_read(2, offset, at, num_bytes, verify=verify)
        return self.finish()[0]


def finish(reactor: Reactor, num_requests: int) -> list[Completion]:
    completions: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    waiter = select.poll()
    waiter.register(reactor.event_fd, select.POLLIN)
    while len(completions) < num_requests:
        if not waiter.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise AssertionError(f"{len(completions)} of {num_requests} requests have ended: {reactor.stats()}")
        os.eventfd_read(reactor.event_fd)
        completions += [Completion(*completion) for completion in reactor.reap(64)]
    if len(completions) > num_requests:
        raise AssertionError(f"{len(completions)} completions of {num_requests} requests")
    return completions

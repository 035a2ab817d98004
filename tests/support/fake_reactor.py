"""What lies beyond swap devices and tenants, as symbols: arenas, swap files, and a reactor that moves frames between
them at moments of its own, in any order, with faults.

It takes the numbers that the real one takes, and notices what that one could not: a frame that changes under an I/O,
two I/Os at one place, an I/O that the table does not announce, checksums of another block, anything that is given back
while an I/O still uses it."""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from io_daemon._native import Reactor
from io_daemon.errors import SwapSpaceError
from io_daemon.shared.protocol import PAGE_BYTES, IoEnd, Status
from io_daemon.shared.states import FrameState
from io_daemon.shared.table import TableGeometry
from tests.support.fake_disk import Contents, FakeMemory, garbage


def check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


class FakeArena(FakeMemory):
    """Frames and residency table of one tenant. In place of ``Table``, and of the Region of arena and table."""

    def __init__(self, geometry: TableGeometry, job: str, rank: int) -> None:
        super().__init__(geometry.num_frames)
        self.geometry = geometry
        self.fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.num_chunks = 0
        self.closed = False

    @property
    def region(self) -> FakeArena:
        return self

    @property
    def region_bytes(self) -> int:
        return self.geometry.table_bytes

    def store_num_chunks(self, num_chunks: int) -> None:
        self.num_chunks = num_chunks

    def checksum_offset(self, checksum_index: int) -> int:
        return self.geometry.checksums_offset + 4 * checksum_index

    def close(self) -> None:
        check(not self.closed, "a table is closed twice")
        self.closed = True
        os.close(self.fd)


@dataclass(eq=False)
class FakeSwapFile:
    path: Path
    rng: random.Random
    full_chance: float
    file_bytes: int = PAGE_BYTES
    blocks: dict[int, tuple[Contents, int | None]] = field(default_factory=dict)
    """By offset: what was written, and where its checksums lie."""
    fd: int = -1
    linked: bool = True
    closed: bool = False

    def grow(self, file_bytes: int, *, reserve: bool = True) -> None:
        if file_bytes > self.file_bytes and self.rng.random() < self.full_chance:
            raise SwapSpaceError(path=str(self.path), needed_bytes=file_bytes, free_bytes=0, remedy="it is simulated")
        self.file_bytes = file_bytes

    def shrink(self, file_bytes: int) -> None:
        self.file_bytes = file_bytes

    def unlink(self) -> None:
        self.linked = False

    def give_up_space(self) -> None:
        check(not (self.linked or self.closed), f"{self.path} gives up its space too early or too late")

    def close(self) -> None:
        check(not self.closed, f"{self.path} is closed twice")
        self.closed = True


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """Seconds of virtual time, and chances."""

    latency_s: float = 100e-6
    slow_chance: float = 0.02
    """That an I/O takes SLOW times as long."""
    read_faults: float = 0.0
    write_faults: float = 0.0
    refusals: float = 0.0
    """Submissions that the reactor refuses."""
    buffer_refusals: float = 0.0
    """Arenas that cannot be registered."""


SLOW = 200


@dataclass(frozen=True, eq=False)
class _Request:
    tag: int
    write: bool
    file: int
    offset: int
    buffer: int
    frame: int
    num_bytes: int
    checksums_offset: int | None
    verify: bool
    before: Contents


class FakeReactor:
    """In place of ``Reactor``, on the running loop's time."""

    engine = "fake"

    def __init__(
        self,
        rng: random.Random,
        model: DeviceModel,
        swap_files: Mapping[int, FakeSwapFile],
        arenas: Mapping[int, FakeArena],
    ) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.num_submitted = 0
        self.model = model
        self._rng = rng
        self._swap_files, self._arenas = swap_files, arenas
        """Both by fd."""
        self.files: dict[int, FakeSwapFile] = {}
        self.buffers: dict[int, FakeArena] = {}
        self.in_flight: dict[int, _Request] = {}
        self._next_index = 0
        self._done: deque[tuple[int, int, int, int, int, int]] = deque()
        self._moved = {False: 0, True: 0}

    def add_file(self, fd: int) -> int:
        self._next_index += 1
        self.files[self._next_index] = self._swap_files[fd]
        return self._next_index

    def remove_file(self, index: int) -> None:
        check(all(request.file != index for request in self.in_flight.values()), "a file is removed under its I/O")
        del self.files[index]

    def add_buffer(self, arena_fd: int) -> int:
        if self._rng.random() < self.model.buffer_refusals:
            raise OSError(12, os.strerror(12))
        self._next_index += 1
        self.buffers[self._next_index] = self._arenas[arena_fd]
        return self._next_index

    def remove_buffer(self, index: int) -> None:
        check(all(request.buffer != index for request in self.in_flight.values()), "an arena is removed under its I/O")
        del self.buffers[index]

    def submit(
        self,
        tag: int,
        op: int,
        file: int,
        offset: int,
        buffer: int,
        buffer_offset: int,
        num_bytes: int,
        checksums: FakeArena | None = None,
        checksums_offset: int = 0,
        verify: bool = False,
    ) -> None:
        if self._rng.random() < self.model.refusals:
            raise RuntimeError("refused")
        arena, swap_file = self.buffers[buffer], self.files[file]
        check(not swap_file.closed, "an I/O on a closed file")
        check(checksums in (None, arena), "the checksums are another tenant's")
        check(PAGE_BYTES <= offset and offset + num_bytes <= swap_file.file_bytes, f"{offset} is beyond the file")
        frame, rest = divmod(buffer_offset - PAGE_BYTES, arena.geometry.frame_bytes)
        check(rest == 0 and 0 <= frame < arena.geometry.num_frames, f"{buffer_offset} is no frame's")
        write = op == Reactor.WRITE
        wanted = FrameState.DRAINING if write else FrameState.FILLING
        check(arena.states[frame] is wanted, f"the table says {arena.states[frame].name} of frame {frame}")
        for other in self.in_flight.values():
            check((other.file, other.offset) != (file, offset), f"two I/Os at {offset}")
            check((other.buffer, other.frame) != (buffer, frame), f"two I/Os on frame {frame}")
        at = None if checksums is None else checksums_offset
        if write:
            swap_file.blocks[offset] = (garbage(), at)
        else:
            arena.contents[frame] = garbage()
        self.in_flight[tag] = _Request(
            tag, write, file, offset, buffer, frame, num_bytes, at, verify, arena.contents[frame]
        )
        self.num_submitted += 1
        slowly = SLOW if self._rng.random() < self.model.slow_chance else 1
        delay_s = self.model.latency_s * (1 + 3 * self._rng.random()) * slowly
        asyncio.get_running_loop().call_later(delay_s, self._end, tag)

    def reap(self, completions_max: int) -> list[tuple[int, int, int, int, int, int]]:
        reaped = [self._done.popleft() for _ in range(min(completions_max, len(self._done)))]
        if self._done:
            os.eventfd_write(self.event_fd, 1)
        return reaped

    def stats(self) -> dict[str, int]:
        return {
            "bytes_read": self._moved[False],
            "bytes_written": self._moved[True],
            "num_reads": 0,
            "num_writes": 0,
            "num_short": 0,
            "num_in_flight": len(self.in_flight),
        }

    def close(self, timeout_ms: int = 10_000) -> bool:
        check(not self.in_flight, "the reactor ends under its I/O")
        os.close(self.event_fd)
        return True

    def _end(self, tag: int) -> None:
        request = self.in_flight.pop(tag)
        arena, swap_file = self.buffers[request.buffer], self.files[request.file]
        check(not arena.closed and not swap_file.closed, "something was given back under an I/O")
        check(arena.contents[request.frame] == request.before, f"frame {request.frame} changed under {request}")
        outcome = self._outcome(request)
        if outcome.status == Status.OK:
            self._moved[request.write] += request.num_bytes
            if request.write:
                swap_file.blocks[request.offset] = (request.before, request.checksums_offset)
            else:
                contents, written_at = swap_file.blocks[request.offset]
                check(not request.verify or written_at == request.checksums_offset, "checksums of another block")
                arena.contents[request.frame] = contents
        self._done.append((tag, *outcome))
        os.eventfd_write(self.event_fd, 1)

    def _outcome(self, request: _Request) -> IoEnd:
        done = IoEnd(Status.OK, 0, request.offset, request.num_bytes, request.num_bytes)
        if self._rng.random() >= (self.model.write_faults if request.write else self.model.read_faults):
            return done
        failures = [done._replace(status=Status.IO_ERROR, error_number=5, actual=0),
                    done._replace(status=Status.SHORT_IO, actual=512)]  # fmt: skip
        if not request.write and request.verify:
            failures.append(done._replace(status=Status.INTEGRITY, expected=1, actual=2))
        return self._rng.choice(failures)

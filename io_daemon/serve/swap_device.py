"""One swap directory at work: its reactor, and the queue in which tenants take turns for it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from io_daemon._native import Reactor, Region
from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import SwapDir
from io_daemon.policy.actions import StartIo
from io_daemon.policy.fair_queue import FairQueue
from io_daemon.shared.metrics import DeviceStatus
from io_daemon.shared.protocol import PAGE_BYTES, IoEnd

log = logging.getLogger(__name__)

REAP_MAX: Final = 256
FREE_BYTES_TIMEOUT_S: Final = 1.0
REQUESTS_MAX: Final = 1 << 16
"""The reactor takes no more before some are reaped."""
DEPTHS_IN_FLIGHT: Final = 2
"""Queue depths' worth of blocks that the reactor has: one at the device and one to refill it from; what waits beyond
that waits here, where tenants take turns."""


class Requester(Protocol):
    """Whoever queued a request is told how it ended, by exactly one of these, unless it had the request forgotten."""

    def on_io_done(self, io: StartIo, end: IoEnd) -> None: ...

    def abandon(self, io: StartIo, error: Exception) -> None:
        """It could not even be submitted."""


@dataclass(frozen=True, slots=True)
class SwapRequest:
    """One StartIo with what the reactor needs to know beside it, and whom to tell when it has ended."""

    io: StartIo
    requester: Requester
    file: int
    """The reactor's index of the swap file."""
    buffer: int
    """The reactor's index of the arena."""
    buffer_offset: int
    checksums: Region
    checksums_offset: int

    @property
    def num_bytes(self) -> int:
        return self.io.num_bytes

    @property
    def write(self) -> bool:
        return self.io.write

    @property
    def demand(self) -> bool:
        return self.io.demand


class SwapDevice:
    def __init__(self, swap_dir: SwapDir, reactor: Reactor, config: ServeConfig, on_broken: Callable[[], None]) -> None:
        self.swap_dir = swap_dir
        self.broken: OSError | None = None
        """Why the engine as a whole failed. What was in flight then may land at any time: only the end of the process
        makes its memory and files safe."""
        self._on_broken = on_broken
        self._free_bytes = swap_dir.free_bytes()
        """What its filesystem said last."""
        self._asking: asyncio.Future[None] | None = None
        """It has been asked again and has not answered."""
        self.looked_for: dict[object, int] = {}
        """By tenant, the bytes that it found room for and has not reserved yet, less what it will give back."""
        self.reactor = reactor
        self._queue: FairQueue[SwapRequest] = FairQueue(DEPTHS_IN_FLIGHT * config.queue_depth * config.block_bytes)
        self._in_flight: dict[int, SwapRequest] = {}
        self._next_tag = 1
        self._checksums = config.verify_checksums
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reactor.event_fd, self._on_completions)

    @classmethod
    def start(cls, swap_dir: SwapDir, engine: str, config: ServeConfig, on_broken: Callable[[], None]) -> SwapDevice:
        """Start the reactor thread. ``on_broken`` is called if its engine ever fails as a whole. Raises OSError if the
        engine cannot start."""
        reactor = Reactor(engine, config.queue_depth, config.block_bytes, faults=config.faults)
        return cls(swap_dir, reactor, config, on_broken)

    def enqueue(self, tenant_id: int, request: SwapRequest) -> None:
        """Queue one request; ``pump`` starts it in its tenant's turn."""
        self._queue.push(tenant_id, request)

    def hurry(self, tenant_id: int) -> None:
        """Leases of the tenant wait for what it writes behind."""
        self._queue.hurry(tenant_id)
        self.pump()

    def forget(self, tenant_id: int) -> int:
        """Drop what the tenant has queued and not started; how many requests that was."""
        return len(self._queue.remove(tenant_id))

    def pump(self) -> None:
        """Start queued requests while the reactor has room for them."""
        while self.broken is None and len(self._in_flight) < REQUESTS_MAX and (item := self._queue.pop()) is not None:
            _, request = item
            tag = self._next_tag
            self._next_tag += 1
            self._in_flight[tag] = request
            try:
                self._submit(tag, request)
            except Exception as error:  # noqa: BLE001 -- the defect of one tenant's policy
                self._finish(tag).requester.abandon(request.io, error)

    def _submit(self, tag: int, request: SwapRequest) -> None:
        io = request.io
        self.reactor.submit(
            tag,
            Reactor.WRITE if io.write else Reactor.READ,
            request.file,
            PAGE_BYTES + io.offset,
            request.buffer,
            request.buffer_offset,
            io.num_bytes,
            request.checksums if self._checksums else None,
            request.checksums_offset if self._checksums else 0,
            io.verify,
        )

    def _finish(self, tag: int) -> SwapRequest:
        request = self._in_flight.pop(tag)
        self._queue.complete(request)
        return request

    async def ask_free_bytes(self) -> None:
        """Ask the filesystem how much is free. In a thread, and not for long: a mount whose server is gone answers
        nobody, and all ranks would wait with whoever wanted the figure. Then the last one stands. No executor has the
        thread: the interpreter would wait for it at its end."""
        if self._asking is None:
            threading.Thread(target=self._look_for_space, daemon=True).start()
            self._asking = self._loop.create_future()
        await asyncio.wait({self._asking}, timeout=FREE_BYTES_TIMEOUT_S)

    def _look_for_space(self) -> None:
        free_bytes = self.swap_dir.free_bytes()
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._note_free_bytes, free_bytes)

    def _note_free_bytes(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        if self._asking is not None:
            self._asking.set_result(None)
            self._asking = None

    def status(self) -> DeviceStatus:
        stats = self.reactor.stats()
        return DeviceStatus(
            path=str(self.swap_dir.path),
            engine=self.reactor.engine,
            direct=self.swap_dir.direct,
            filesystem=self.swap_dir.filesystem,
            free_bytes=self._free_bytes,
            bytes_read=stats["bytes_read"],
            bytes_written=stats["bytes_written"],
            num_reads=stats["num_reads"],
            num_writes=stats["num_writes"],
            num_short=stats["num_short"],
            num_in_flight=stats["num_in_flight"],
            num_queued=len(self._queue),
        )

    def close(self, timeout_ms: int) -> bool:
        """End the reactor thread; False if I/O is still in flight after ``timeout_ms``."""
        self._loop.remove_reader(self.reactor.event_fd)
        return self.reactor.close(timeout_ms)

    def _on_completions(self) -> None:
        """Takes one batch, so that a fast drive does not keep ranks waiting: of what is left the reactor signals."""
        try:
            os.read(self.reactor.event_fd, 8)
        except BlockingIOError:
            pass  # reaped with an earlier batch
        for tag, *end in self._reap():
            request = self._finish(tag)
            request.requester.on_io_done(request.io, IoEnd(*end))
        self.pump()

    def _reap(self) -> list[tuple[int, int, int, int, int, int]]:
        try:
            return self.reactor.reap(REAP_MAX)
        except OSError as error:
            log.critical("%s: %s; this daemon has to end", self.swap_dir.path, error)
            self.broken = error
            self._loop.remove_reader(self.reactor.event_fd)
            self._on_broken()
            return []

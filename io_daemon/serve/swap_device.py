"""One swap directory at work: its reactor, and the queue in which tenants take turns for it."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from io_daemon._native import Reactor
from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import SwapDir
from io_daemon.policy.actions import StartIo
from io_daemon.policy.fair_queue import FairQueue
from io_daemon.shared.arena import frame_offset
from io_daemon.shared.metrics import DeviceStatus
from io_daemon.shared.protocol import PAGE_BYTES

if TYPE_CHECKING:
    from io_daemon.serve.tenant import Tenant

log = logging.getLogger(__name__)

REAP_MAX: Final = 256
DEPTHS_IN_FLIGHT: Final = 2
"""Queue depths' worth of blocks that the reactor has: one at the device and one to refill it from; what waits beyond
that waits here, where tenants take turns."""


class SwapDevice:
    def __init__(self, swap_dir: SwapDir, reactor: Reactor, config: ServeConfig) -> None:
        self.swap_dir = swap_dir
        self.reactor = reactor
        self._queue = FairQueue(DEPTHS_IN_FLIGHT * config.queue_depth * config.block_bytes)
        self._tenants: dict[int, Tenant] = {}
        self._in_flight: dict[int, tuple[Tenant, StartIo]] = {}
        self._next_tag = 1
        self._checksums = config.verify_checksums
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reactor.event_fd, self._on_completions)

    @classmethod
    def start(cls, swap_dir: SwapDir, engine: str, config: ServeConfig) -> SwapDevice:
        """Start the reactor thread. Raises OSError if the engine cannot start."""
        reactor = Reactor(engine, config.queue_depth, config.block_bytes, faults=config.faults)
        return cls(swap_dir, reactor, config)

    def enqueue(self, tenant: Tenant, io: StartIo) -> None:
        """Queue one request; ``pump`` starts it in its turn."""
        self._tenants[tenant.tenant_id] = tenant
        self._queue.push(tenant.tenant_id, io)

    def forget(self, tenant: Tenant) -> int:
        """Drop what the tenant has queued and not started; how many requests that was."""
        self._tenants.pop(tenant.tenant_id, None)
        return len(self._queue.remove(tenant.tenant_id))

    def pump(self) -> None:
        """Start queued requests while the reactor has room for them."""
        while (item := self._queue.pop()) is not None:
            tenant_id, io = item
            tenant = self._tenants[tenant_id]
            tag = self._next_tag
            self._next_tag += 1
            self._in_flight[tag] = (tenant, io)
            try:
                self._submit(tag, tenant, io)
            except Exception as error:  # noqa: BLE001 -- the defect of one tenant's policy
                self._finish(tag)
                tenant.abandon(io, error)

    def _submit(self, tag: int, tenant: Tenant, io: StartIo) -> None:
        seat = tenant.seats[io.file]
        self.reactor.submit(
            tag,
            Reactor.WRITE if io.write else Reactor.READ,
            seat.file,
            PAGE_BYTES + io.offset,
            seat.buffer,
            frame_offset(io.frame, tenant.frame_bytes),
            io.num_bytes,
            tenant.table.region if self._checksums else None,
            tenant.table.checksum_offset(io.checksum_index) if self._checksums else 0,
            io.verify,
        )

    def _finish(self, tag: int) -> tuple[Tenant, StartIo]:
        tenant, io = self._in_flight.pop(tag)
        self._queue.complete(io.num_bytes)
        return tenant, io

    def status(self) -> DeviceStatus:
        stats = self.reactor.stats()
        return DeviceStatus(
            path=str(self.swap_dir.path),
            engine=self.reactor.engine,
            direct=self.swap_dir.direct,
            filesystem=self.swap_dir.filesystem,
            free_bytes=self.swap_dir.free_bytes(),
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
        try:
            os.read(self.reactor.event_fd, 8)
        except BlockingIOError:
            pass  # reaped with an earlier batch
        while batch := self.reactor.reap(REAP_MAX):
            for tag, status, error_number, offset, expected, actual in batch:
                tenant, io = self._finish(tag)
                tenant.on_io_done(io, status, error_number, offset, expected, actual)
        self.pump()

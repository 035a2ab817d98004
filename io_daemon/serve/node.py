"""What one daemon has to give, and the tenants that share it: swap devices, memory, a planner."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from io_daemon.config import ServeConfig
from io_daemon.disk.swap_file import Owner
from io_daemon.errors import BudgetError, ConfigError
from io_daemon.machine.meminfo import arenas_bytes_max
from io_daemon.serve.planner import Planner
from io_daemon.serve.swap_device import SwapDevice
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.arena import arena_bytes
from io_daemon.shared.control import Attach, Ended, Welcome
from io_daemon.shared.metrics import DaemonStatus
from io_daemon.shared.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)


class Node:
    def __init__(self, config: ServeConfig, devices: Sequence[SwapDevice]) -> None:
        self.tenants: set[Tenant] = set()
        self._config = config
        self._devices = {str(device.swap_dir.path): device for device in devices}
        self._owner = Owner.this_process()
        self._planner = Planner()
        self._started_s = time.monotonic()
        self._draining = False
        self._host_budget_bytes = min(config.host_budget_bytes, arenas_bytes_max())
        self._arenas_bytes = 0
        """The arenas of all tenants together, and of ranks that are about to attach."""

    def welcome(self) -> Welcome:
        return Welcome(protocol_version=PROTOCOL_VERSION, swap_dirs=tuple(self._devices))

    def book(self, num_bytes: int, job: str, rank: int) -> None:
        """Count an arena from now on: others may ask while it is made, or registered. Raises ConfigError or
        BudgetError."""
        self._refuse_while_draining()
        if self._arenas_bytes + num_bytes > self._host_budget_bytes:
            raise BudgetError(
                key="--host-budget-bytes",
                budget_bytes=self._host_budget_bytes,
                smallest_bytes=self._arenas_bytes + num_bytes,
                reason=f"rank {rank} of {job} brings an arena of {num_bytes} bytes, "
                f"and {self._arenas_bytes} are taken by the ranks that are there",
            )
        self._arenas_bytes += num_bytes

    def unbook(self, num_bytes: int) -> None:
        """An arena that was counted is gone, or will not come."""
        self._arenas_bytes -= num_bytes

    async def attach(self, request: Attach, arena_fd: int, pid: int, on_end: Callable[[Ended], None]) -> Tenant:
        """Raises ConfigError, BudgetError, SwapSpaceError, DeviceIOError, ProtocolError."""
        self._refuse_while_draining()
        unknown = [path for path in request.swap_dirs if path not in self._devices]
        if unknown or len(set(request.swap_dirs)) != len(request.swap_dirs):
            raise ConfigError(
                "io_daemon.swap_dirs",
                list(request.swap_dirs),
                f"this daemon serves {', '.join(self._devices)}: name some of these, each once, "
                "or start it with another --swap-dir",
            )
        num_bytes = arena_bytes(request.num_frames, request.frame_bytes)
        self.book(num_bytes, request.job, request.rank)
        try:
            tenant = await Tenant.attach(
                request,
                arena_fd,
                pid,
                [self._devices[path] for path in request.swap_dirs],
                self._config,
                self._owner,
                self._planner,
                on_end,
            )
        except BaseException:
            self.unbook(num_bytes)
            raise
        self.tenants.add(tenant)
        try:
            self._refuse_while_draining()  # that may have begun while this one's arena was registered
        except ConfigError:
            await tenant.close()
            self.detached(tenant)
            raise
        log.info("%s: attached with %d frames of %d bytes", tenant, request.num_frames, request.frame_bytes)
        return tenant

    def _refuse_while_draining(self) -> None:
        if self._draining:
            raise ConfigError("io_daemon.socket", str(self._config.socket_path), "the daemon there is shutting down")

    def drain(self) -> list[Coroutine[Any, Any, None]]:
        """Refuse new tenants and new leases; what to await until the last I/O of each tenant has ended."""
        self._draining = True
        return [tenant.drain() for tenant in self._in_order()]

    def broken_device(self) -> SwapDevice | None:
        """The swap device whose I/O engine has broken down, if there is one."""
        return next((device for device in self._devices.values() if device.broken is not None), None)

    def detached(self, tenant: Tenant) -> None:
        self.tenants.discard(tenant)
        self.unbook(tenant.arena_bytes)
        log.info("%s: gone", tenant)
        if not self.tenants:
            gc.collect()

    def _in_order(self) -> list[Tenant]:
        """The tenants as they have come."""
        return sorted(self.tenants, key=lambda each: each.tenant_id)

    async def status(self) -> DaemonStatus:
        config = self._config
        await asyncio.gather(*(device.ask_free_bytes() for device in self._devices.values()))
        return DaemonStatus(
            protocol_version=PROTOCOL_VERSION,
            pid=os.getpid(),
            socket_path=str(config.socket_path),
            uptime_s=time.monotonic() - self._started_s,
            block_bytes=config.block_bytes,
            queue_depth=config.queue_depth,
            verify_checksums=config.verify_checksums,
            private=config.private,
            devices=tuple(device.status() for device in self._devices.values()),
            tenants=tuple(tenant.stats() for tenant in self._in_order()),
        )

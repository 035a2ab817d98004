"""startup → serve → drain → shutdown. Composition only: what is decided lies in the schedulers, what is done in
tenants and devices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Final

from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.disk.swap_file import Owner
from io_daemon.errors import BudgetError, ConfigError
from io_daemon.rank.connection import peer_credentials
from io_daemon.serve.conversation import Conversation, Peer, watching_process
from io_daemon.serve.planner import Planner
from io_daemon.serve.startup import (
    announce_ready,
    choose_engine,
    listening,
    raise_priority,
    reclaim_unless,
    watching_parent,
)
from io_daemon.serve.swap_device import SwapDevice
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.arena import arena_bytes
from io_daemon.shared.control import AsyncChannel, Attach, Ended, Welcome
from io_daemon.shared.metrics import DaemonStatus
from io_daemon.shared.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)

LAST_WORDS_TIMEOUT_S: Final = 1.0
FIRST_TENANT_TIMEOUT_S: Final = 3600.0
"""A private daemon to which nobody has come after so long was started by somebody who is gone."""
ACCEPT_RETRY_S: Final = 1.0


async def serve(config: ServeConfig) -> int:
    """Run until told to end; the exit code. Raises ConfigError or WorldError if the daemon cannot start."""
    raise_priority()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as resources:
        if config.private:
            resources.enter_context(watching_parent(stop))
        engine, engine_notes = choose_engine(config.engine)
        swap_dirs = [check_swap_dir(path) for path in config.swap_dirs]
        for note in (*engine_notes, *(note for swap_dir in swap_dirs for note in swap_dir.notes)):
            log.warning("%s", note)
        if not await reclaim_unless(stop, config):
            return 0
        devices: list[SwapDevice] = []
        for swap_dir in swap_dirs:
            devices.append(SwapDevice.start(swap_dir, engine, config))
            resources.callback(devices[-1].close, int(config.drain_timeout_s * 1000))
        listener = resources.enter_context(listening(config.socket_path))
        server = Server(config, devices, stop)
        log.info("serving %s with %s on %s", ", ".join(map(str, config.swap_dirs)), engine, config.socket_path)
        announce_ready(config, engine, swap_dirs)
        return await server.run(listener)


class Server:
    def __init__(self, config: ServeConfig, devices: Sequence[SwapDevice], stop: asyncio.Event) -> None:
        self._config = config
        self._devices = {str(device.swap_dir.path): device for device in devices}
        self._stop = stop
        self._owner = Owner.this_process()
        self._planner = Planner()
        self._started_s = time.monotonic()
        self._peers: dict[Peer, asyncio.Task[None]] = {}
        self._tenants: set[Tenant] = set()

    async def run(self, listener: socket.socket) -> int:
        """Serve until stopped, then drain; the exit code: 0, or 1 if the drain's deadline passed."""
        loop = asyncio.get_running_loop()
        self._listen(listener)
        if self._config.private:
            loop.call_later(FIRST_TENANT_TIMEOUT_S, self._stop_if_alone)
        await self._stop.wait()
        loop.remove_reader(listener)
        return await self._shut_down()

    # --- the end

    async def _shut_down(self) -> int:
        """Refuse new leases, let I/O in flight end, tell tenants, give everything back."""
        log.info("draining %d tenants", len(self._tenants))
        ending = asyncio.gather(*(tenant.drain() for tenant in self._tenants))
        drained = await self._within_deadline(ending)
        for peer in self._peers:
            peer.depart(Ended(reason="the daemon is shutting down", by_fault=False))
        drained &= await self._within_deadline(asyncio.gather(*self._peers.values(), return_exceptions=True))
        if not drained:
            log.error("I/O is still in flight after %g s: giving up", self._config.drain_timeout_s)
            for tenant in self._tenants:
                tenant.unlink_files()
        return 0 if drained else 1

    async def _within_deadline(self, work: asyncio.Future[Any]) -> bool:
        try:
            await asyncio.wait_for(work, self._config.drain_timeout_s)
        except TimeoutError:
            return False
        return True

    def _stop_if_alone(self) -> None:
        if not self._tenants:
            self._stop.set()

    # --- connections

    def _listen(self, listener: socket.socket) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.error("cannot accept more ranks: %s", error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)  # it stays readable: look again later rather than at once
                loop.call_later(ACCEPT_RETRY_S, self._listen, listener)
            return
        pid, uid, _ = peer_credentials(sock)
        if uid not in (0, os.getuid()):
            log.warning("process %d of user %d is not allowed here", pid, uid)
            sock.close()
            return
        peer = Peer(pid, asyncio.get_running_loop().create_future())
        self._peers[peer] = asyncio.ensure_future(self._converse(sock, peer))

    async def _converse(self, sock: socket.socket, peer: Peer) -> None:
        """One connection, from hello to the end of its tenant."""
        channel = AsyncChannel(sock)
        conversation = Conversation(self, channel, peer)
        try:
            with watching_process(sock, peer):
                ended = await conversation.run()
            if ended is not None:
                if ended.by_fault:
                    log.warning("process %d: ended: %s", peer.pid, ended.reason)
                with contextlib.suppress(OSError, TimeoutError):
                    await asyncio.wait_for(channel.send(ended), LAST_WORDS_TIMEOUT_S)
            channel.close()
            await conversation.end_tenant()
        except Exception:
            log.exception("process %d: the conversation failed", peer.pid)
        finally:
            channel.close()
            del self._peers[peer]
            if self._config.private and conversation.had_tenant and not self._tenants:
                self._stop.set()

    # --- what conversations ask

    def welcome(self) -> Welcome:
        return Welcome(protocol_version=PROTOCOL_VERSION, swap_dirs=tuple(self._devices))

    async def attach(self, request: Attach, arena_fd: int, peer: Peer) -> Tenant:
        """Raises ConfigError, BudgetError, SwapSpaceError, DeviceIOError, ProtocolError."""
        if self._stop.is_set():
            raise ConfigError("io_daemon.socket", str(self._config.socket_path), "the daemon there is shutting down")
        unknown = [path for path in request.swap_dirs if path not in self._devices]
        if unknown or len(set(request.swap_dirs)) != len(request.swap_dirs):
            raise ConfigError(
                "io_daemon.swap_dirs",
                list(request.swap_dirs),
                f"this daemon serves {', '.join(self._devices)}: name some of these, each once, "
                "or start it with another --swap-dir",
            )
        num_bytes = arena_bytes(request.num_frames, request.frame_bytes)
        if num_bytes > self._config.host_budget_bytes:
            raise BudgetError(
                key="--host-budget-bytes",
                budget_bytes=self._config.host_budget_bytes,
                smallest_bytes=num_bytes,
                reason=f"rank {request.rank} of {request.job} brings an arena of {num_bytes} bytes",
            )
        tenant = await Tenant.attach(
            request,
            arena_fd,
            peer.pid,
            [self._devices[path] for path in request.swap_dirs],
            self._config,
            self._owner,
            self._planner,
            peer.depart,
        )
        self._tenants.add(tenant)
        log.info("%s: attached with %d frames of %d bytes", tenant, request.num_frames, request.frame_bytes)
        return tenant

    def detached(self, tenant: Tenant) -> None:
        self._tenants.discard(tenant)
        log.info("%s: gone", tenant)

    def status(self) -> DaemonStatus:
        config = self._config
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
            tenants=tuple(tenant.stats() for tenant in sorted(self._tenants, key=lambda each: each.tenant_id)),
        )

"""A daemon's life: startup → serve → drain → shutdown. Composition only: what is decided lies in the schedulers,
what is done in tenants and devices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from typing import Any, Final

from io_daemon.config import ServeConfig
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.rank.connection import peer_credentials
from io_daemon.serve.conversation import Conversation, Peer, watching_process
from io_daemon.serve.node import Node
from io_daemon.serve.startup import (
    announce_ready,
    choose_engine,
    keep_threads_apart,
    listening,
    raise_open_files_limit,
    raise_priority,
    reclaim_unless,
    use_one_heap,
    watching_parent,
    with_possible_depth,
)
from io_daemon.serve.swap_device import SwapDevice
from io_daemon.serve.threads import start_pool
from io_daemon.shared.control import AsyncChannel, Ended

log = logging.getLogger(__name__)

STOPPING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAST_WORDS_TIMEOUT_S: Final = 1.0
FIRST_TENANT_TIMEOUT_S: Final = 3600.0
"""A private daemon to which nobody has come after so long was started by somebody who is gone."""
WAITING_OF_PROCESS_MAX: Final = 32
WAITING_MAX: Final = 256
"""Connections that have not attached."""
ACCEPT_RETRY_S: Final = 1.0


async def serve(config: ServeConfig) -> int:
    """Run until told to end; the exit code. Raises ConfigError or WorldError if the daemon cannot start."""
    raise_priority()
    use_one_heap()
    keep_threads_apart()
    raise_open_files_limit()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(number, stop.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # a rank that takes its own by sigwait has handed us its mask
    loop.set_default_executor(start_pool())
    with contextlib.ExitStack() as resources:
        resources.callback(_stop_listening_to_signals)
        resources.enter_context(watching_parent(stop, config))
        engine, engine_notes = choose_engine(config.engine)
        config, depth_notes = with_possible_depth(config, engine)
        swap_dirs = [check_swap_dir(path) for path in config.swap_dirs]
        for note in (*engine_notes, *depth_notes, *(note for swap_dir in swap_dirs for note in swap_dir.notes)):
            log.warning("%s", note)
        if not await reclaim_unless(stop, config):
            return 0
        devices: list[SwapDevice] = []
        for swap_dir in swap_dirs:
            devices.append(SwapDevice.start(swap_dir, engine, config, stop.set))
            resources.callback(devices[-1].close, int(config.drain_timeout_s * 1000))
        listener = resources.enter_context(listening(config.socket_path))
        server = Server(config, Node(config, devices), stop)
        log.info("serving %s with %s on %s", ", ".join(map(str, config.swap_dirs)), engine, config.socket_path)
        announce_ready(config, engine, swap_dirs)
        return await server.run(listener)


def _stop_listening_to_signals() -> None:
    """A daemon that is told to end once more has nothing left to do. And asyncio closes what its handlers write to
    before it takes them away: a signal in between would complain of that on the user's terminal."""
    for number in STOPPING:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


class Server:
    """Accepts connections and sees each through to its end; ends all of them when told to stop."""

    def __init__(self, config: ServeConfig, node: Node, stop: asyncio.Event) -> None:
        self._config = config
        self._node = node
        self._stop = stop
        self._peers: dict[Peer, asyncio.Task[None]] = {}

    async def run(self, listener: socket.socket) -> int:
        """Serve until stopped, then drain; the exit code: 0, or 1 if the drain's deadline passed or an I/O engine broke
        down, which makes systemd start a new daemon."""
        loop = asyncio.get_running_loop()
        self._listen(listener)
        if self._config.private:
            loop.call_later(FIRST_TENANT_TIMEOUT_S, self._stop_if_alone)
        await self._stop.wait()
        loop.remove_reader(listener)
        if (broken := self._node.broken_device()) is not None:
            return await self._break_off(broken)
        return await self._shut_down()

    # --- the end

    async def _shut_down(self) -> int:
        """Refuse new leases, let I/O in flight end, tell tenants, give everything back."""
        log.info("draining %d tenants", len(self._node.tenants))
        drained = await self._within_deadline(asyncio.gather(*self._node.drain(), return_exceptions=True))
        for peer in self._peers:
            peer.depart(Ended(reason="the daemon is shutting down", by_fault=False))
        drained &= await self._within_deadline(asyncio.gather(*self._peers.values(), return_exceptions=True))
        if not drained:
            log.error("I/O is still in flight after %g s: giving up", self._config.drain_timeout_s)
            for tenant in self._node.tenants:
                tenant.unlink_files()
        return 0 if drained else 1

    async def _break_off(self, broken: SwapDevice) -> int:
        """Tell tenants and leave: I/O in flight on a broken engine never ends, so there is nothing to drain, and
        nothing may be given back before the process has gone."""
        for peer in self._peers:
            peer.depart(Ended(reason=f"{broken.swap_dir.path}: {broken.broken}", by_fault=False))
        if self._peers:
            await asyncio.wait(self._peers.values(), timeout=LAST_WORDS_TIMEOUT_S)
        for tenant in self._node.tenants:
            tenant.unlink_files()
        return 1

    async def _within_deadline(self, work: asyncio.Future[Any]) -> bool:
        try:
            await asyncio.wait_for(work, self._config.drain_timeout_s)
        except TimeoutError:
            return False
        return True

    def _stop_if_alone(self) -> None:
        if not self._node.tenants:
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
        peer = Peer(pid, asyncio.get_running_loop().create_future())
        if uid in (0, os.getuid()):
            self._make_room(pid)
        else:
            reason = f"user {uid} is not allowed here, only user {os.getuid()} and root: start a daemon of your own"
            peer.depart(Ended(reason=reason, by_fault=True))
        self._peers[peer] = asyncio.ensure_future(self._converse(sock, peer))

    def _make_room(self, pid: int) -> None:
        """Connections without a tenant never shut ranks out: of too many, the oldest goes."""
        waiting = [peer for peer in self._peers if not (peer.attached or peer.departure.done())]
        of_process = [peer for peer in waiting if peer.pid == pid]
        if pid and len(of_process) >= WAITING_OF_PROCESS_MAX:  # 0: of another pid namespace, and who knows of which
            of_process[0].depart(Ended(reason=f"process {pid} has too many connections", by_fault=True))
        elif len(waiting) >= WAITING_MAX:
            waiting[0].depart(Ended(reason="too many connections wait to attach", by_fault=False))

    async def _converse(self, sock: socket.socket, peer: Peer) -> None:
        """One connection, from hello to the end of its tenant."""
        channel = AsyncChannel(sock)
        conversation = Conversation(self._node, channel, peer)
        try:
            with watching_process(sock, peer):
                ended = await conversation.run()
            if ended is not None:
                if ended.by_fault:
                    log.warning("process %d: ended: %s", peer.pid, ended.reason)
                with contextlib.suppress(OSError):
                    await channel.send(ended, timeout_s=LAST_WORDS_TIMEOUT_S)
            channel.close()
        except Exception:
            log.exception("process %d: the conversation failed", peer.pid)
        try:
            await conversation.end_tenant()
        except Exception:
            log.exception("process %d: not everything that it owned could be given back", peer.pid)
        finally:
            channel.close()
            del self._peers[peer]
            if self._config.private and peer.attached and not self._node.tenants:
                self._stop.set()

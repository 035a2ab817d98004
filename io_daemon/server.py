"""startup → serve → drain → shutdown. Composition only: what is decided lies in the schedulers, what is done in
tenants and devices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from io_daemon._native import ENGINES, probe_engine
from io_daemon.arena import arena_bytes
from io_daemon.config import ServeConfig, notify_socket
from io_daemon.connection import check_socket_path, peer_credentials
from io_daemon.control import (
    AsyncChannel,
    Attach,
    Attached,
    Detach,
    Done,
    Ended,
    Fault,
    Hello,
    Message,
    Register,
    Registered,
    Stats,
    StatsRequest,
    Status,
    StatusRequest,
    Unregister,
    UploadTrace,
    Welcome,
    close_all,
)
from io_daemon.errors import BudgetError, ConfigError, ProtocolError, WorldError
from io_daemon.metrics import DaemonStatus
from io_daemon.protocol import PROTOCOL_VERSION
from io_daemon.swap_device import SwapDevice
from io_daemon.swap_dir import SwapDir, check_swap_dir, reclaim
from io_daemon.swap_file import Owner
from io_daemon.tenant import Tenant

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
SEND_TIMEOUT_S: Final = 30.0
"""A rank that takes its answer so slowly is taken for hung."""
LAST_WORDS_TIMEOUT_S: Final = 1.0
FIRST_TENANT_TIMEOUT_S: Final = 3600.0
"""A private daemon to which nobody has come after so long was started by somebody who is gone."""
ACCEPT_RETRY_S: Final = 1.0
BACKLOG: Final = 128
ENGINES_BY_RANK: Final = ("io_uring", "libaio", "posix")
SO_PEERPIDFD: Final = 77
"""Linux 6.5: the peer's pidfd, with no way for its pid to be reused in between."""


def choose_engine(choice: str) -> tuple[str, list[str]]:
    """The engine to use, and what to say about those that do not work here. Raises ConfigError."""
    wanted = ENGINES_BY_RANK if choice == "auto" else (choice.removeprefix("require:"),)
    notes: list[str] = []
    for engine in wanted:
        problem = probe_engine(engine) if engine in ENGINES else "not compiled in: its library was missing at build"
        if problem is None:
            return engine, [f"{note}; falling back to {engine}" for note in notes]
        notes.append(f"engine {engine} does not work here ({problem})")
    raise ConfigError("engine", choice, f"{'; '.join(notes)}; write auto, or see `infinity doctor`")


async def serve(config: ServeConfig) -> int:
    """Run until told to end; the exit code. Raises ConfigError or WorldError if the daemon cannot start."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with contextlib.ExitStack() as resources:
        if config.private:
            resources.enter_context(_watching_parent(stop))
        engine, engine_notes = choose_engine(config.engine)
        swap_dirs = [check_swap_dir(path) for path in config.swap_dirs]
        for note in (*engine_notes, *(note for swap_dir in swap_dirs for note in swap_dir.notes)):
            log.warning("%s", note)
        if not await _reclaim_unless(stop, config):
            return 0
        devices: list[SwapDevice] = []
        for swap_dir in swap_dirs:
            devices.append(SwapDevice.start(swap_dir, engine, config))
            resources.callback(devices[-1].close, int(config.drain_timeout_s * 1000))
        listener = resources.enter_context(_listening(config.socket_path))
        server = Server(config, devices, stop)
        log.info("serving %s with %s on %s", ", ".join(map(str, config.swap_dirs)), engine, config.socket_path)
        _announce_ready(config, engine, swap_dirs)
        return await server.run(listener)


async def _reclaim_unless(stop: asyncio.Event, config: ServeConfig) -> bool:
    """Reclaim what dead daemons left; False if ``stop`` comes while their last I/O is waited for."""
    reclaiming = asyncio.ensure_future(reclaim(config.swap_dirs, config.lock_timeout_s))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({reclaiming, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not reclaiming.done():
        reclaiming.cancel()
        return False
    for path in reclaiming.result():
        log.warning("%s: reclaimed, its daemon is dead", path)
    return True


@contextlib.contextmanager
def _watching_parent(stop: asyncio.Event) -> Iterator[None]:
    """Stop when the parent process is gone. (Not PR_SET_PDEATHSIG: that fires when the parent's *thread* ends.)"""
    parent_pid = os.getppid()
    try:
        pidfd = os.pidfd_open(parent_pid)
    except OSError:
        stop.set()
        yield
        return
    if os.getppid() != parent_pid:  # it died before it could be watched
        stop.set()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, stop.set)
    try:
        yield
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The socket, 0600 in a directory that is 0700 if we make it; unlinked at the end. Raises ConfigError."""
    check_socket_path(str(path))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("socket", str(path), f"its directory cannot be made ({error.strerror})") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        before = os.umask(0o177)
        try:
            _bind(listener, path)
        except OSError as error:
            raise ConfigError("socket", str(path), f"cannot be listened on ({error.strerror})") from error
        finally:
            os.umask(before)
        ours = os.stat(path)
        listener.listen(BACKLOG)
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(ours, os.stat(path)):
                    os.unlink(path)


def _bind(listener: socket.socket, path: Path) -> None:
    try:
        listener.bind(str(path))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(LAST_WORDS_TIMEOUT_S)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                os.unlink(path)  # left by a daemon that was killed
            else:
                raise ConfigError("socket", str(path), "another daemon listens there: name another") from error
        listener.bind(str(path))


def _announce_ready(config: ServeConfig, engine: str, swap_dirs: Sequence[SwapDir]) -> None:
    """To systemd, if it waits, and as one JSON line on stdout to whoever started us."""
    address = notify_socket()
    if address is not None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifier:
            try:
                notifier.connect("\0" + address[1:] if address.startswith("@") else address)
                notifier.send(b"READY=1")
            except OSError as error:
                log.warning("$NOTIFY_SOCKET %s: %s", address, error)
    line = {
        "ready": True,
        "pid": os.getpid(),
        "protocol_version": PROTOCOL_VERSION,
        "socket": str(config.socket_path),
        "engine": engine,
        "swap_dirs": [{"path": str(each.path), "direct": each.direct} for each in swap_dirs],
    }
    # a parent that closed the pipe is no reason to end
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(line).encode() + b"\n")


@dataclass(eq=False)
class Peer:
    """The process at the other end of one connection. ``departure`` is done when its tenant must end: with what to
    tell it, or with None if there is nobody to tell."""

    pid: int
    departure: asyncio.Future[Ended | None]

    def depart(self, ended: Ended | None) -> None:
        if not self.departure.done():
            self.departure.set_result(ended)


class Server:
    def __init__(self, config: ServeConfig, devices: Sequence[SwapDevice], stop: asyncio.Event) -> None:
        self._config = config
        self._devices = {str(device.swap_dir.path): device for device in devices}
        self._stop = stop
        self._owner = Owner.this_process()
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
            with _watching_process(sock, peer):
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


class Conversation:
    """Questions and answers on one connection. A question is answered whole before a departure is looked at, so that
    nothing is ever taken away under a request that is still being carried out."""

    def __init__(self, server: Server, channel: AsyncChannel, peer: Peer) -> None:
        self.had_tenant = False
        self._server = server
        self._channel = channel
        self._peer = peer
        self._tenant: Tenant | None = None

    async def run(self) -> Ended | None:
        """Until the rank leaves, or must; what to tell it then."""
        try:
            await asyncio.wait_for(self._greet(), HELLO_TIMEOUT_S)
            while (item := await self._next_question()) is not None:
                message, fds = item
                try:
                    await self._answer(message, fds)
                finally:
                    close_all(fds)
        except ProtocolError as error:
            return Ended(reason=str(error), by_fault=True)
        except (OSError, TimeoutError):
            return None
        return self._peer.departure.result() if self._peer.departure.done() else None

    async def end_tenant(self) -> None:
        """Idempotent."""
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            try:
                await tenant.close()
            finally:
                self._server.detached(tenant)

    async def _next_question(self) -> tuple[Message, list[int]] | None:
        """None if the rank hung up or must go."""
        receiving = asyncio.ensure_future(self._channel.receive())
        either: set[asyncio.Future[Any]] = {receiving, self._peer.departure}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._peer.departure.done():
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, ProtocolError):
                if (item := await receiving) is not None:
                    close_all(item[1])
            return None
        return receiving.result()

    async def _greet(self) -> None:
        item = await self._channel.receive()
        if item is None:
            raise OSError(errno.ECONNRESET, "hung up before hello")
        hello, fds = item
        close_all(fds)
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message must be hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            mismatch = ProtocolError(
                f"this daemon speaks protocol {PROTOCOL_VERSION}, the rank {hello.protocol_version}: "
                "run the same version of infinity on both sides"
            )
            await self._channel.send(Fault.of(mismatch))
            raise mismatch
        await self._channel.send(self._server.welcome())

    async def _answer(self, message: Message, fds: Sequence[int]) -> None:
        answer: Message
        answer_fds: Sequence[int] = ()
        try:
            if isinstance(message, Attach):
                answer, answer_fds = await self._attach(message, fds)
            else:
                answer = await self._answer_plain(message)
        except ProtocolError:
            raise
        except (WorldError, ValueError, OSError) as error:
            answer = Fault.of(error)
        await asyncio.wait_for(self._channel.send(answer, answer_fds), SEND_TIMEOUT_S)

    async def _attach(self, request: Attach, fds: Sequence[int]) -> tuple[Attached, list[int]]:
        if self._tenant is not None or len(fds) != 1:
            raise ProtocolError("attach: once, with exactly one fd")
        self._tenant = await self._server.attach(request, fds[0], self._peer)
        self.had_tenant = True
        self._tenant.serve()
        return self._tenant.attached()

    async def _answer_plain(self, message: Message) -> Message:
        if isinstance(message, StatusRequest):
            return Status(daemon=self._server.status())
        tenant = self._tenant
        if tenant is None:
            raise ProtocolError(f"{type(message).__name__.lower()}: attach first")
        match message:
            case Register():
                chunks = await tenant.register(message.specs())
                return Registered(start=chunks.start, stop=chunks.stop)
            case Unregister():
                tenant.unregister(range(message.start, message.stop))
                return Done()
            case UploadTrace():
                tenant.set_trace(message.trace_id, message.trace())
                return Done()
            case StatsRequest():
                return Stats(tenant=tenant.stats())
            case Detach():
                await self.end_tenant()
                return Done()
            case _:
                raise ProtocolError(f"{type(message).__name__.lower()} is nothing that a rank says")


@contextlib.contextmanager
def _watching_process(sock: socket.socket, peer: Peer) -> Iterator[None]:
    """Depart when the process that connected has ended, whoever else still holds its end of the socket: forked
    DataLoader workers may."""
    loop = asyncio.get_running_loop()
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        try:
            pidfd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            peer.depart(None)
            yield
            return
        except OSError:
            yield  # another pid namespace: only its hanging up will tell
            return
    loop.add_reader(pidfd, peer.depart, None)
    try:
        yield
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)

"""Questions and answers with one rank, from hello to the end of its tenant."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from io_daemon.errors import ConfigError, ProtocolError, WorldError
from io_daemon.policy.trace import Trace
from io_daemon.serve.node import Node
from io_daemon.serve.tenant import Tenant
from io_daemon.shared.bulk import CHUNK_BYTES, read_memfd, unpack_specs
from io_daemon.shared.control import (
    Announce,
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
    Reserve,
    Stats,
    StatsRequest,
    Status,
    StatusRequest,
    Unregister,
    UploadTrace,
    close_all,
)
from io_daemon.shared.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 600.0
"""A connection without a tenant is given up when nothing has been asked for so long."""
REQUEST_BYTES_MAX: Final = 4 << 10
ATTACH_BYTES_MAX: Final = 2 << 20
"""It names up to 256 paths."""
SEND_TIMEOUT_S: Final = 30.0
"""A rank that takes its answer so slowly is taken for hung."""
SO_PEERPIDFD: Final = 77
"""Linux 6.5: the peer's pidfd, with no way for its pid to be reused in between."""


@dataclass(eq=False)
class Peer:
    """The process at the other end of one connection. ``departure`` is done when its tenant must end: with what to
    tell it, or with None if there is nobody to tell."""

    pid: int
    departure: asyncio.Future[Ended | None]
    attached: bool = False
    """It has, or had, a tenant: then it may be silent as long as it likes."""

    def depart(self, ended: Ended | None) -> None:
        if not self.departure.done():
            self.departure.set_result(ended)


class Conversation:
    """Questions and answers on one connection. A question is answered whole before a departure is looked at, so that
    nothing is ever taken away under a request that is still being carried out."""

    def __init__(self, node: Node, channel: AsyncChannel, peer: Peer) -> None:
        self._node = node
        self._channel = channel
        self._peer = peer
        self._tenant: Tenant | None = None
        self._announced_bytes = 0
        """The node counts on an arena that has not come yet."""
        self._greeted = False

    async def run(self) -> Ended | None:
        """Until the rank leaves, or must; what to tell it then."""
        try:
            if await self._greet():
                while (item := await self._next_question()) is not None:
                    await self._answer(*item)
        except ProtocolError as error:
            return Ended(reason=str(error), by_fault=True)
        except OSError:
            return None
        except Exception as error:  # whatever it is, it ends this tenant alone, and ends it whole
            log.exception("process %d: the daemon failed to answer it", self._peer.pid)
            return Ended(reason=f"the daemon failed: {type(error).__name__}: {error}", by_fault=False)
        return self._peer.departure.result() if self._peer.departure.done() else None

    async def end_tenant(self) -> None:
        """Nothing of it is counted any more, also if it was only announced. Idempotent."""
        self._unbook()
        tenant, self._tenant = self._tenant, None
        if tenant is not None:
            try:
                await tenant.close()
            finally:
                self._node.detached(tenant)

    async def _next_question(self) -> tuple[Message, list[int]] | None:
        """None if the rank hung up or must go. Raises TimeoutError if it says nothing without having attached."""
        await asyncio.sleep(0)  # others have their turn, however many questions lie there
        timeout_s = None if self._peer.attached else IDLE_TIMEOUT_S if self._greeted else HELLO_TIMEOUT_S
        return await self._channel.receive(self._bytes_max(), timeout_s=timeout_s, unless=self._peer.departure)

    def _bytes_max(self) -> int:
        """The length of the longest message that may come now."""
        return ATTACH_BYTES_MAX if self._greeted and not self._peer.attached else REQUEST_BYTES_MAX

    async def _greet(self) -> bool:
        """False if it hung up before, or must go."""
        item = await self._next_question()
        if item is None:
            return False
        hello, fds = item
        close_all(fds)
        if not isinstance(hello, Hello):
            raise ProtocolError("the first message must be hello")
        if hello.protocol_version != PROTOCOL_VERSION:
            mismatch = (
                f"this daemon speaks protocol {PROTOCOL_VERSION}, the rank {hello.protocol_version}: "
                "run the same version of infinity on both sides"
            )
            await self._channel.send(Fault.of(ProtocolError(mismatch)), timeout_s=SEND_TIMEOUT_S)
            raise ProtocolError(mismatch)
        await self._channel.send(self._node.welcome(), timeout_s=SEND_TIMEOUT_S)
        self._greeted = True
        return True

    async def _answer(self, message: Message, fds: Sequence[int]) -> None:
        answer: Message
        answer_fds: Sequence[int] = ()
        try:
            if isinstance(message, Attach):
                answer, answer_fds = await self._attach(message, fds)
            else:
                answer = await self._answer_plain(message, fds)
        except ProtocolError:
            raise
        except (WorldError, ValueError, OSError) as error:
            answer = Fault.of(_with_remedy(error))
        finally:
            close_all(fds)
        await self._channel.send(answer, answer_fds, timeout_s=SEND_TIMEOUT_S)

    def _announce(self, request: Announce) -> None:
        if self._tenant is not None:
            raise ProtocolError("announce: before attach")
        self._unbook()
        self._node.book(request.arena_bytes, request.job, request.rank)
        self._announced_bytes = request.arena_bytes

    def _unbook(self) -> None:
        self._node.unbook(self._announced_bytes)
        self._announced_bytes = 0

    async def _attach(self, request: Attach, fds: Sequence[int]) -> tuple[Attached, list[int]]:
        if self._tenant is not None or len(fds) != 1:
            raise ProtocolError("attach: once, with exactly one fd")
        self._unbook()  # what it brings is booked before anybody else has a turn
        self._tenant = await self._node.attach(request, fds[0], self._peer.pid, self._peer.depart)
        self._peer.attached = True
        self._tenant.serve()
        return self._tenant.attached()

    async def _answer_plain(self, message: Message, fds: Sequence[int]) -> Message:
        if isinstance(message, StatusRequest):
            return Status(daemon=await self._node.status())
        if isinstance(message, Announce):
            self._announce(message)
            return Done()
        tenant = self._tenant
        if tenant is None:
            raise ProtocolError(f"{type(message).__name__.lower()}: attach first")
        match message:
            case Register():
                num_bytes = message.num_chunks * CHUNK_BYTES
                chunks = await tenant.register(lambda: unpack_specs(_bulk(fds, num_bytes)), message.spare_bytes)
                return Registered(start=chunks.start, stop=chunks.stop)
            case Reserve():
                await tenant.reserve()
                return Done()
            case Unregister():
                await tenant.unregister(range(message.start, message.stop))
                return Done()
            case UploadTrace():
                num_bytes = message.num_bytes
                await tenant.set_trace(message.trace_id, lambda: Trace.from_bytes(_bulk(fds, num_bytes)))
                return Done()
            case StatsRequest():
                return Stats(tenant=tenant.stats())
            case Detach():
                await self.end_tenant()
                return Done()
            case _:
                raise ProtocolError(f"{type(message).__name__.lower()} is nothing that a rank says")


def _with_remedy(error: Exception) -> Exception:
    if getattr(error, "errno", 0) not in (errno.EMFILE, errno.ENFILE):
        return error
    open_files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "the daemon can open no more: raise `ulimit -n` where it is started, or LimitNOFILE= in its unit"
    return ConfigError("open files of the daemon", open_files_max, remedy)


def _bulk(fds: Sequence[int], num_bytes: int) -> bytes:
    """What came beside a message. In a thread: it may be long."""
    if len(fds) != 1:
        raise ProtocolError("exactly one fd belongs to this message")
    return read_memfd(fds[0], num_bytes)


@contextlib.contextmanager
def watching_process(sock: socket.socket, peer: Peer) -> Iterator[None]:
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

    def depart() -> None:
        loop.remove_reader(pidfd)  # it stays readable, and the end of its tenant may take minutes
        peer.depart(None)

    loop.add_reader(pidfd, depart)
    try:
        yield
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)

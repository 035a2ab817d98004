"""The control plane: length-prefixed JSON messages over a Unix stream socket, with fds beside them.

One message is 4 bytes of little-endian length and that many bytes of JSON; the fds that belong to it travel by
SCM_RIGHTS with its first byte. A rank asks and the daemon answers, in order; only ``Ended`` comes unasked, as the
last message before the daemon hangs up. ``Channel`` is the blocking end (ranks, command line), ``AsyncChannel`` the
daemon's.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from io_daemon import errors
from io_daemon.shared.metrics import DaemonStatus, TenantStats
from io_daemon.shared.patience import Patience

MESSAGE_BYTES_MAX: Final = 64 << 20
CHUNKS_MAX: Final = 1 << 22
TRACE_BYTES_MAX: Final = 128 << 20
MESSAGE_TIMEOUT_S: Final = 10.0
"""The time from a message's first bytes to its last."""
FDS_MAX: Final = 8
RECEIVE_BYTES: Final = 256 << 10
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
LENGTH: Final = struct.Struct("<I")

Uint32 = Annotated[int, Field(ge=0, lt=1 << 32)]
Uint63 = Annotated[int, Field(ge=0, lt=1 << 63)]
Job = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Version = Annotated[int, Field(strict=True, ge=0, lt=1 << 32)]
"""Strict: the true, 1.0 and "1" of JSON are no version 1."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# --- rank -> daemon


class Hello(Message):
    """Always the first message. Its shape never changes, so that any two versions can tell each other apart."""

    model_config = ConfigDict(frozen=True, extra="ignore")
    type: Literal["hello"] = "hello"
    protocol_version: Version


class Announce(Message):
    """An arena is about to be made and attached. Answered with Done when the node has room for it, and keeps that until
    the attach, or the end of the connection."""

    type: Literal["announce"] = "announce"
    job: Job
    rank: Uint32
    arena_bytes: Uint63
    """Header page included."""


class Attach(Message):
    """Comes with one fd: the sealed arena."""

    type: Literal["attach"] = "attach"
    job: Job
    rank: Uint32
    num_frames: Annotated[int, Field(ge=1, lt=1 << 31)]
    frame_bytes: Annotated[int, Field(ge=1, lt=1 << 40)]
    page_locked: bool
    swap_dirs: Annotated[tuple[str, ...], Field(min_length=1, max_length=256)]
    chunks_max: Annotated[int, Field(ge=1, le=CHUNKS_MAX)]


class Register(Message):
    """Comes with one fd: the chunks, as ``bulk.pack_specs`` lays them out."""

    type: Literal["register"] = "register"
    num_chunks: Annotated[int, Field(ge=0, le=CHUNKS_MAX)]
    spare_bytes: Uint63 = 0
    """If any: so much will be given back on the same disks before ``Reserve`` comes, so that space is only looked for
    now, and reserved then."""


class Reserve(Message):
    """What was registered beside spare bytes is to have its space now."""

    type: Literal["reserve"] = "reserve"


class Unregister(Message):
    type: Literal["unregister"] = "unregister"
    start: Uint32
    stop: Uint32


class UploadTrace(Message):
    """Comes with one fd: the trace, as ``Trace.to_bytes`` makes it."""

    type: Literal["upload_trace"] = "upload_trace"
    trace_id: Uint63
    num_bytes: Annotated[int, Field(ge=0, le=TRACE_BYTES_MAX)]


class StatsRequest(Message):
    type: Literal["stats_request"] = "stats_request"


class StatusRequest(Message):
    type: Literal["status_request"] = "status_request"


class Detach(Message):
    type: Literal["detach"] = "detach"


# --- daemon -> rank


class Welcome(Message):
    type: Literal["welcome"] = "welcome"
    protocol_version: Version
    swap_dirs: tuple[str, ...]


class Attached(Message):
    """Comes with four fds: table (read-only), rings, and twice the rank's end of the wake-up sockets, for the
    submission and for the completion ring."""

    type: Literal["attached"] = "attached"
    table_bytes: int
    rings_bytes: int
    num_sqes: int
    num_cqes: int
    cq_offset: int
    swap_files: tuple[str, ...]
    """Paths, by the file index that completions name."""


class Registered(Message):
    type: Literal["registered"] = "registered"
    start: int
    stop: int


class Done(Message):
    type: Literal["done"] = "done"


class Stats(Message):
    type: Literal["stats"] = "stats"
    tenant: TenantStats


class Status(Message):
    type: Literal["status"] = "status"
    daemon: DaemonStatus


ERRORS: Final[dict[str, type[Exception]]] = {"ValueError": ValueError} | {
    name: error
    for name, error in vars(errors).items()
    if isinstance(error, type) and issubclass(error, (errors.ConfigError, errors.WorldError))
}


class Fault(Message):
    """The answer to a request that failed: a typed error of ``errors.py``, attributes and all."""

    type: Literal["fault"] = "fault"
    error: str
    text: str
    attributes: dict[str, int | float | str]

    @classmethod
    def of(cls, error: Exception) -> Fault:
        if type(error).__name__ not in ERRORS:
            return cls(error="WorldError", text=f"{type(error).__name__}: {error}", attributes={})
        held = vars(error).items()
        attributes = {name: value if isinstance(value, int | float) else str(value) for name, value in held}
        return cls(error=type(error).__name__, text=str(error), attributes=attributes)

    def exception(self) -> Exception:
        kind = ERRORS.get(self.error, errors.WorldError)
        exception = kind.__new__(kind, self.text)  # the text is whole already: no constructor may format it again
        vars(exception).update(self.attributes)
        return exception


class Ended(Message):
    """The daemon ends this tenant. The last message; the socket closes behind it."""

    type: Literal["ended"] = "ended"
    reason: str
    by_fault: bool
    """True if the rank broke the protocol, False if the daemon shuts down."""


AnyMessage = Annotated[
    Hello
    | Announce
    | Attach
    | Register
    | Reserve
    | Unregister
    | UploadTrace
    | StatsRequest
    | StatusRequest
    | Detach
    | Welcome
    | Attached
    | Registered
    | Done
    | Stats
    | Status
    | Fault
    | Ended,
    Field(discriminator="type"),
]
MESSAGES: Final[TypeAdapter[Any]] = TypeAdapter(AnyMessage)


def encode(message: Message) -> bytes:
    body = message.model_dump_json().encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise errors.ProtocolError(f"message of {len(body)} bytes is longer than {MESSAGE_BYTES_MAX}")
    return LENGTH.pack(len(body)) + body


class Assembler:
    """Bytes and fds in, messages out. Owns the fds until ``take`` hands them over."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: Sequence[int]) -> None:
        self._data += data
        self._fds += fds
        if len(self._fds) > FDS_MAX:
            raise errors.ProtocolError(f"more than {FDS_MAX} fds came with one message")

    @property
    def is_empty(self) -> bool:
        """No message has begun."""
        return not self._data

    def take(self, bytes_max: int = MESSAGE_BYTES_MAX) -> tuple[Message, list[int]] | None:
        """The next whole message and the fds that came with it; None if bytes are missing. Raises ProtocolError for one
        that is longer than ``bytes_max``, as soon as it says so."""
        if len(self._data) < LENGTH.size:
            return None
        (body_bytes,) = LENGTH.unpack_from(self._data)
        if body_bytes > bytes_max:
            raise errors.ProtocolError(f"message of {body_bytes} bytes is longer than {bytes_max}")
        end = LENGTH.size + body_bytes
        if len(self._data) < end:
            return None
        try:
            message: Message = MESSAGES.validate_json(bytes(self._data[LENGTH.size : end]))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "message"
            raise errors.ProtocolError(f"malformed message: {where}: {first['msg']}") from error
        del self._data[:end]
        fds, self._fds = self._fds, []
        return message, fds

    def close(self) -> None:
        close_all(self._fds)
        self._fds = []


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _receive(sock: socket.socket, assembler: Assembler) -> bool:
    """One recvmsg into the assembler; False at the end of the stream. Raises BlockingIOError or TimeoutError."""
    # not socket.recv_fds: it drops its flags argument, and the fds would be inherited across exec
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    assembler.feed(data, fds)
    if flags & socket.MSG_CTRUNC:
        raise errors.ProtocolError("fds were lost in transit: too many, or this process may open no more (ulimit -n)")
    return bool(data)


class Channel:
    """The blocking end. Not thread-safe: its owner serialises requests."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._assembler = Assembler()

    def send(self, message: Message, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        """Raises TimeoutError, or OSError if the other side is gone."""
        data, left = encode(message), list(fds)
        patience = Patience(timeout_s)
        while data:
            self._wait_at_most(patience)
            with contextlib.suppress(TimeoutError):
                sent = socket.send_fds(self.socket, [data], left, socket.MSG_NOSIGNAL)
                data, left = data[sent:], []  # they go with its first byte

    def receive(self, *, timeout_s: float) -> tuple[Message, list[int]] | None:
        """The next message; None at the end of the stream. Raises TimeoutError or OSError."""
        patience = Patience(timeout_s)
        while (item := self._assembler.take()) is None:
            self._wait_at_most(patience)
            with contextlib.suppress(TimeoutError):
                if not _receive(self.socket, self._assembler):
                    return None
        return item

    def _wait_at_most(self, patience: Patience) -> None:
        """One slice of it. Raises TimeoutError when it is at its end."""
        if not (slice_s := patience.slice_s()):
            raise TimeoutError
        self.socket.settimeout(slice_s)

    def close(self) -> None:
        self._assembler.close()
        self.socket.close()


class AsyncChannel:
    """The daemon's end of one connection, on the running loop. No wait of it is a task or a future that could carry an
    exception: its frames would hold what a departed rank had, and it the frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._assembler = Assembler()
        self._loop = asyncio.get_running_loop()

    async def send(self, message: Message, fds: Sequence[int] = (), *, timeout_s: float) -> None:
        """Raises TimeoutError, or OSError if the rank is gone. The fds stay the caller's."""
        data, left = encode(message), list(fds)
        until_s = self._loop.time() + timeout_s
        while data:
            try:
                sent = socket.send_fds(self.socket, [data], left, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer, until_s)
            else:
                data, left = data[sent:], []  # they go with its first byte

    async def receive(
        self, bytes_max: int, *, timeout_s: float | None = None, unless: asyncio.Future[Any] | None = None
    ) -> tuple[Message, list[int]] | None:
        """The next message; None at the end of the stream, or when ``unless`` is done. Raises ProtocolError, OSError,
        or TimeoutError if it is not there within ``timeout_s``, or has begun and is not whole in time."""
        until_s = None if timeout_s is None else self._loop.time() + timeout_s
        begun = False
        while unless is None or not unless.done():
            if (item := self._assembler.take(bytes_max)) is not None:
                return item
            try:
                if not _receive(self.socket, self._assembler):
                    return None
            except BlockingIOError:
                if not (begun or self._assembler.is_empty):
                    begun = True
                    whole_s = self._loop.time() + MESSAGE_TIMEOUT_S
                    until_s = whole_s if until_s is None else min(until_s, whole_s)
                await self._wait(self._loop.add_reader, self._loop.remove_reader, until_s, unless)
        return None

    async def _wait(
        self,
        watch: Callable[..., None],
        unwatch: Callable[[socket.socket], object],
        until_s: float | None,
        unless: asyncio.Future[Any] | None = None,
    ) -> None:
        """Until the socket is ready, or the time has come, or ``unless`` is done. Raises TimeoutError if the time had
        come before."""
        if until_s is not None and self._loop.time() >= until_s:
            raise TimeoutError
        woken: asyncio.Future[None] = self._loop.create_future()

        def wake(_: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        timer = None if until_s is None else self._loop.call_at(until_s, wake)
        watch(self.socket, wake)
        if unless is not None:
            unless.add_done_callback(wake)
        try:
            await woken
        finally:
            unwatch(self.socket)  # before it is closed, or the loop would watch whoever has its number next
            if timer is not None:
                timer.cancel()
            if unless is not None:
                unless.remove_done_callback(wake)

    def close(self) -> None:
        self._assembler.close()
        self.socket.close()

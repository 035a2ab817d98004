"""A rank's end of the control plane: ask, answer, and see at once when the daemon is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from io_daemon.config import SOCKET_PATH_BYTES_MAX, is_text
from io_daemon.disk.kernel_text import read_text
from io_daemon.errors import ConfigError, DaemonLostError, ProtocolError, WorldError
from io_daemon.rank.turn import Turn
from io_daemon.shared.control import Channel, Ended, Fault, Hello, Message, Welcome, close_all
from io_daemon.shared.patience import Patience
from io_daemon.shared.protocol import PROTOCOL_VERSION

PEER_CREDENTIALS: Final = struct.Struct("iII")

_REMEDY: Final = "what it held is lost: call the engine's destroy(), start again, and load the last checkpoint"

M = TypeVar("M", bound=Message)

_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process that connected, or that listens."""
    pid, uid, gid = PEER_CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    )
    return pid, uid, gid


def check_socket_path(path: str) -> None:
    """Raises ConfigError."""
    if not is_text(path):
        raise ConfigError("io_daemon.socket", ascii(path), "is no UTF-8, which all messages are: name another")
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError("io_daemon.socket", path, f"is longer than {SOCKET_PATH_BYTES_MAX} bytes: name a shorter one")


def process_state(pid: int) -> str:
    """What the kernel says the process is doing, for the text of an error."""
    text = read_text(Path(f"/proc/{pid}/status"))  # holds the process's name, which may be any bytes
    if text is None:
        return "gone"
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("State:")), "unknown")


def connect_to(socket_path: str, timeout_s: float) -> socket.socket:
    """A socket, connected to who listens there. Raises OSError; of it BlockingIOError if somebody does who takes nobody
    within ``timeout_s``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        patience = Patience(timeout_s)
        while slice_s := patience.slice_s():
            # a socket of Python's that has a timeout does not wait for room among those that wait to be taken
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(slice_s))
            with contextlib.suppress(BlockingIOError):
                sock.connect(socket_path)
                if _is_connected(sock):
                    return sock
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except BaseException:
        sock.close()
        raise


def _is_connected(sock: socket.socket) -> bool:
    """Python takes what a signal has interrupted for a connection that comes about by itself: a Unix socket's does
    not."""
    try:
        sock.getpeername()
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


class Connection:
    """Requests are serialised; any thread may ask. ``watch_fd`` becomes readable when the daemon dies or hangs up."""

    def __init__(self, channel: Channel, socket_path: str) -> None:
        self.socket_path = socket_path
        self.daemon_pid = peer_credentials(channel.socket)[0]
        self._channel = channel
        self._question = Turn()
        self.was_lost = False
        """Whether the daemon was found dead or hung, or ended this rank."""
        self._lost: WorldError | None = None
        self._watch = select.epoll()
        self._watch.register(channel.socket, select.EPOLLRDHUP)  # not EPOLLIN: answers wake nobody but their asker
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(self.daemon_pid)
            self._watch.register(self._pidfd, select.EPOLLIN)
        except (OSError, ValueError):
            pass  # the daemon lives in another pid namespace: its hanging up still tells
        _open_connections.add(self)

    @classmethod
    def open(cls, socket_path: str, timeout_s: float) -> tuple[Connection, Welcome]:
        """Connect and agree on the protocol. Raises DaemonLostError or ProtocolError."""
        check_socket_path(socket_path)
        try:
            sock = connect_to(socket_path, timeout_s)
        except BlockingIOError as error:
            raise DaemonLostError(
                f"the I/O daemon at {socket_path} is there, and has taken no connection within {timeout_s:g} s: it "
                "hangs, or too many processes connect at once; `io-daemon status` tells, and if it does not answer "
                "either, end the daemon and start it again"
            ) from error
        except OSError as error:
            raise DaemonLostError(
                f"no I/O daemon answers at {socket_path} ({error.strerror or error}): start one with "
                f"`io-daemon serve --socket {socket_path} --swap-dir DIR`, or name its socket in io_daemon.socket "
                "or $INFINITY_IO_SOCKET"
            ) from error
        uid = peer_credentials(sock)[1]
        if uid not in (0, os.getuid()):
            sock.close()
            raise ProtocolError(
                f"the process that listens at {socket_path} belongs to user {uid}, not to {os.getuid()}: "
                "no arena is handed to a stranger"
            )
        connection = cls(Channel(sock), socket_path)
        try:
            welcome, _ = connection.request(Hello(protocol_version=PROTOCOL_VERSION), Welcome, timeout_s=timeout_s)
            if welcome.protocol_version != PROTOCOL_VERSION:
                raise ProtocolError(
                    f"the daemon at {socket_path} speaks protocol {welcome.protocol_version}, this rank "
                    f"{PROTOCOL_VERSION}: run the same version of infinity on both sides"
                )
        except BaseException:
            connection.close()
            raise
        return connection, welcome

    @property
    def watch_fd(self) -> int:
        return self._watch.fileno()

    def request(
        self, message: Message, answer_type: type[M], fds: Sequence[int] = (), *, timeout_s: float
    ) -> tuple[M, list[int]]:
        """One question, one answer and the fds that came with it. Raises the daemon's typed error, or
        DaemonLostError when no answer comes within ``timeout_s``; after that the connection is of no more use."""
        what = type(message).__name__.lower()
        with self._question.taken():
            self.check()
            try:
                self._channel.send(message, fds, timeout_s=timeout_s)
                item = self._channel.receive(timeout_s=timeout_s)
            except TimeoutError:
                raise self.lose(
                    f"the I/O daemon (pid {self.daemon_pid}, state: {process_state(self.daemon_pid)}) at "
                    f"{self.socket_path} did not answer `{what}` within {timeout_s:g} s"
                ) from None
            except OSError as error:
                # the reason may lie in the socket, sent before the daemon hung up
                raise self._last_words(f"`{what}` ({os.strerror(error.errno or errno.EIO)})") from error
            except BaseException as error:  # what was sent, and what has come of an answer, is not known
                self._end(DaemonLostError(f"`{what}` of the I/O daemon was broken off by {error!r}; {_REMEDY}"))
                raise
            if item is None:
                raise self.lose(f"the I/O daemon at {self.socket_path} hung up instead of answering `{what}`")
            answer, answer_fds = item
            if isinstance(answer, answer_type):
                return answer, answer_fds
            close_all(answer_fds)
            if isinstance(answer, Fault):
                raise answer.exception()
            if isinstance(answer, Ended):
                raise self._lose_ended(answer)
            raise self.lose(f"the I/O daemon answered `{what}` with `{type(answer).__name__.lower()}`")

    def wait_lost(self, timeout_s: float) -> bool:
        """Sleep up to ``timeout_s``; True as soon as the daemon is gone."""
        return bool(self._watch.poll(timeout_s, 1))

    def lost(self, waiting_for: str, timeout_s: float = 1.0) -> WorldError:
        """``watch_fd`` has fired: the error that says why, with the daemon's last words if it left any."""
        if not self._question.lock.acquire(timeout=timeout_s):
            return self.lose(f"the I/O daemon (pid {self.daemon_pid}) is gone; waited for: {waiting_for}; {_REMEDY}")
        try:
            return self._lost if self._lost is not None else self._last_words(waiting_for)
        finally:
            self._question.lock.release()

    def check(self) -> None:
        """Raise if the daemon is already known to be lost."""
        if self._lost is not None:
            raise self._lost

    def lose(self, text: str) -> WorldError:
        """Whoever waits for this daemon, in whichever call and on whichever connection of this process, is to wait no
        longer. The error that says so: ``text``, or what was known before."""
        for each in list(_open_connections):
            if each is not self and (each.socket_path, each.daemon_pid) == (self.socket_path, self.daemon_pid):
                each._end(DaemonLostError(text))
        return self._end(DaemonLostError(text))

    def close(self) -> None:
        _open_connections.discard(self)
        self._lost = self._lost or DaemonLostError("the connection is closed")
        self._watch.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._channel.close()

    def forget(self) -> None:
        """In a forked child: drop every fd without a word, so that it neither speaks for the rank nor outlives it."""
        self._lost = DaemonLostError("a forked child has no part in its parent's I/O: open a client of your own")
        self.close()

    def _last_words(self, waiting_for: str) -> WorldError:
        try:
            item = self._channel.receive(timeout_s=0.1)
        except (OSError, ProtocolError):
            item = None
        if item is not None:
            close_all(item[1])
            if isinstance(item[0], Ended):
                return self._lose_ended(item[0])
        return self.lose(
            f"the I/O daemon (pid {self.daemon_pid}, state: {process_state(self.daemon_pid)}) at {self.socket_path} "
            f"is gone; waited for: {waiting_for}; {_REMEDY}"
        )

    def _lose_ended(self, ended: Ended) -> WorldError:
        text = f"the I/O daemon at {self.socket_path} ended this rank: {ended.reason}"
        return self._end(ProtocolError(text) if ended.by_fault else DaemonLostError(text))

    def _end(self, error: WorldError) -> WorldError:
        """Wakes all that sleep on the socket or on ``watch_fd``."""
        self.was_lost |= self._lost is None
        self._lost = self._lost or error
        with contextlib.suppress(OSError):
            self._channel.socket.shutdown(socket.SHUT_RDWR)
        return self._lost


def _timeval(seconds: float) -> bytes:
    """The kernel's struct, which has no zero for not waiting: at least a microsecond."""
    whole, part = divmod(max(1, round(seconds * 1_000_000)), 1_000_000)
    return struct.pack("ll", whole, part)

"""What happens before the first rank is served: which engine, whose leftovers, which socket, who is told."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from io_daemon._native import ENGINES, POSIX_THREADS_MAX, probe_engine
from io_daemon.config import ENGINES_BY_RANK, ServeConfig, notify_socket
from io_daemon.disk.swap_dir import SwapDir, reclaim
from io_daemon.errors import ConfigError
from io_daemon.rank.connection import check_socket_path, connect_to
from io_daemon.rank.private_dir import remove_if_private
from io_daemon.rank.socket_lock import SocketLock
from io_daemon.shared.protocol import PROTOCOL_VERSION

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 1.0
NICENESS: Final = -10
SWITCH_INTERVAL_S: Final = 0.0005
NEVER: Final = 1 << 30
M_ARENA_MAX: Final = -8
"""The number that malloc.h gives it."""
BACKLOG: Final = 128
ANOTHER_DAEMON: Final = "another daemon listens there: name another"


def raise_priority() -> None:
    """Take precedence where that is allowed and nobody chose a niceness: turns of the loop are short and a rank sleeps
    through each of them. (Measured with compute on both cores: p99 of an acquire 3.6 ms, and 1.3 to 1.8 ms so.)"""
    if os.getpriority(os.PRIO_PROCESS, 0) == 0:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


def keep_threads_apart() -> None:
    """A turn of another thread of this interpreter is short, and the cyclic collector never
    goes over all objects. (Of a tenant with 300,000 chunks there are two million, half a second's work; nothing of ours
    lies in circles, so what the youngest generations do not free can wait until nobody is served.)"""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    youngest, young, _ = gc.get_threshold()
    gc.set_threshold(youngest, young, NEVER)


def use_one_heap() -> None:
    """All threads allocate from one heap of libc, before any of them has another. (Eight a core come and go with short
    threads, and what lies scattered in them is given back to nobody: 1.2 KiB more for every rank that was killed.)"""
    with contextlib.suppress(OSError, AttributeError):  # a libc of another kind
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def raise_open_files_limit() -> None:
    """To what this process is allowed: a tenant takes about ten descriptors."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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


def with_possible_depth(config: ServeConfig, engine: str) -> tuple[ServeConfig, list[str]]:
    """The settings with no more I/Os in flight than the engine has, since prefetch and the tenants' turns reckon with
    all of them; and what to say if it has fewer."""
    if engine != "posix" or config.queue_depth <= POSIX_THREADS_MAX:
        return config, []
    note = f"engine posix has {POSIX_THREADS_MAX} I/Os in flight at most: a queue depth of {config.queue_depth} is that"
    return config.model_copy(update={"queue_depth": POSIX_THREADS_MAX}), [note]


async def reclaim_unless(stop: asyncio.Event, config: ServeConfig) -> bool:
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
def watching_parent(stop: asyncio.Event, config: ServeConfig) -> Iterator[None]:
    """Stop when whoever started this daemon is gone, where that matters, and remove the directory that was made for our
    socket: its maker may have been killed. Raises ConfigError.

    (Not PR_SET_PDEATHSIG: that fires when the parent's *thread* ends.)"""
    pidfd = config.parent_pidfd
    if pidfd is None:
        yield
        return
    loop = asyncio.get_running_loop()

    def orphaned() -> None:
        loop.remove_reader(pidfd)  # it stays readable for as long as the drain takes
        stop.set()

    try:
        loop.add_reader(pidfd, orphaned)
    except OSError as error:
        raise ConfigError("parent_pidfd", pidfd, f"is no inherited pidfd ({error.strerror})") from error
    try:
        yield
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        remove_if_private(config.socket_path.parent)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """The socket, 0600 in a directory that is 0700 if we make it; unlinked at the end. Raises ConfigError."""
    check_socket_path(str(path))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("socket", str(path), f"its directory cannot be made ({error.strerror})") from error
    with _locked(path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        before = os.umask(0o177)
        try:
            _unlink_leftover(path)
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError("socket", str(path), f"cannot be listened on ({error.strerror or error})") from error
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


def _locked(path: Path) -> SocketLock:
    """Raises ConfigError."""
    if (lock := SocketLock.take(path)) is None:
        raise ConfigError("socket", str(path), ANOTHER_DAEMON)
    return lock


def _unlink_leftover(path: Path) -> None:
    """Remove what a killed daemon left. The lock is held: none is about to listen. Raises ConfigError, OSError."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError("socket", str(path), "is there and is no socket: name another path")
    try:
        connect_to(str(path), PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        os.unlink(path)
        return
    except BlockingIOError:
        pass  # it listens, and has no time to accept
    raise ConfigError("socket", str(path), ANOTHER_DAEMON)


def announce_ready(config: ServeConfig, engine: str, swap_dirs: Sequence[SwapDir]) -> None:
    """To systemd, if it waits, and as one JSON line on stdout to whoever started us."""
    address = notify_socket()
    if address is not None and not config.private:  # a private daemon is no service: its rank's may be
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

"""Daemons as forks of one process that has imported what they need: half a second of CPU each, and each engine has one.

Within ``used()`` this process, its forks, and those below it that call ``use_if_told()`` start their daemons so. What
they are is the same: a daemon has a process, a group, standard files and an environment of its own; only whose child it
is differs. Tests of how daemons start and end do without (``tests/io_daemon``, and what is marked ``cold_daemons``).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from io_daemon.rank import process

REPOSITORY: Final = Path(__file__).resolve().parents[2]
VARIABLE: Final = "TESTS_WARM_DAEMONS"
"""The server's socket, for processes below the one that started it."""
DEADLINE_S: Final = 60.0
DAEMON, PLANNER = "daemon", "planner"


class Forked:
    """As much of ``subprocess.Popen`` as the library uses of a daemon."""

    def __init__(self, what: str, words: Sequence[str], fds: Sequence[int]) -> None:
        """``fds``: standard input, output, errors, and further ones, whose numbers the words do not know."""
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(DEADLINE_S)
        self._socket.connect(os.environ[VARIABLE])
        request = {"what": what, "words": list(words), "env": dict(os.environ), "cwd": os.getcwd()}
        with tempfile.TemporaryFile() as file:  # an environment may be longer than a message
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._socket, [b"fork"], [file.fileno(), *fds])
        self.pid = int(self._socket.recv(64))

    def __del__(self) -> None:
        """Of an engine that nobody destroyed nobody waits for the daemon."""
        self._socket.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            if self.returncode is None:
                self._socket.settimeout(timeout)
                try:
                    answer = self._socket.recv(64)
                except (TimeoutError, BlockingIOError) as error:
                    raise subprocess.TimeoutExpired("a warm daemon", timeout or 0.0) from error
                self._socket.close()
                self.returncode = int(answer or -signal.SIGKILL)  # the server was killed: nobody knows
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def used() -> Iterator[None]:
    """The first that asks starts the server, which ends with this process."""
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _Server()
    os.environ[VARIABLE] = _servers[os.getpid()].path
    use_if_told()
    try:
        yield
    finally:
        process._start = _cold
        del os.environ[VARIABLE]


def use_if_told() -> None:
    """In a process below one that is within ``used()``."""
    if VARIABLE in os.environ:
        process._start = _start_daemon


def _start_daemon(command: Sequence[str]) -> Any:
    num_words = len(process.DAEMON_COMMAND)
    if tuple(command[:num_words]) != process.DAEMON_COMMAND or VARIABLE not in os.environ:
        return _cold(command)
    (out, to_out), (errors, to_errors) = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        with process.own_pidfd() as pidfd:
            forked = Forked(DAEMON, command[num_words:], [nothing, to_out, to_errors, pidfd])
    finally:
        for fd in (nothing, to_out, to_errors):
            os.close(fd)
    forked.stdout, forked.stderr = os.fdopen(out, "rb", buffering=0), os.fdopen(errors, "rb")
    return forked


class _Server:
    """It ends when this process, which holds its standard input, and its last daemon have ended."""

    def __init__(self) -> None:
        self.path = f"{tempfile.mkdtemp(prefix='warm-daemons-')}/socket"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.daemon_forks", self.path],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of daemons did not start")
        atexit.register(self._end, os.getpid())

    def _end(self, pid: int) -> None:
        """``pid``: the process that started it; a fork of that one ends nothing."""
        if os.getpid() == pid:
            self._process.communicate(timeout=DEADLINE_S)


_cold = process._start
_servers: dict[int, _Server] = {}
"""The one that this process has started."""

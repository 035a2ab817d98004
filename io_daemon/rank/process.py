"""A daemon as a child of this process: for the library, for ``infinity run`` and for the benchmark."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Self

from io_daemon.config import from_root, socket_parents
from io_daemon.errors import ConfigError, DaemonLostError, WorldError
from io_daemon.machine.limits import check_addresses, naming_limits, too_few_threads
from io_daemon.rank.private_dir import PrivateDir

_log = logging.getLogger(__name__)

DAEMON_COMMAND = (sys.executable, "-P", "-m", "io_daemon")
"""Without -P modules would be looked for in the working directory first: a stranger's pydantic.py, say."""
READY_LINE_BYTES_MAX = 1 << 16
STDERR_LINES_KEPT = 50
KILL_TIMEOUT_S = 10.0
EXIT_USAGE = 2
"""The status with which ``io-daemon`` refuses a setting."""


class DaemonProcess:
    """One ``io-daemon serve``, started here and ended here, with this process at the latest.

    The constructor returns once the daemon serves its socket. It raises ``ConfigError`` if the daemon refuses a
    setting, ``DaemonLostError`` if it ends or stays silent; both carry its own last words. It raises ``WorldError`` if
    a limit (``ulimit``) lets this process start none, or the kernel lets nobody see it end. A context manager; at exit
    of the interpreter the daemon is ended too.
    """

    def __init__(
        self,
        *,
        swap_dirs: Sequence[str | os.PathLike[str]],
        socket: str | os.PathLike[str] | None = None,
        options: Sequence[str] = (),
        private: bool = True,
        start_timeout_s: float = 60.0,
        command: Sequence[str] = DAEMON_COMMAND,
        directories: Sequence[Path] | None = None,
    ) -> None:
        """``socket``: where to listen; None = in a fresh directory that only this user can enter, removed at the end.
        ``options``: further options of ``io-daemon serve``, see ``DaemonSettings``. ``private``: the daemon ends with
        its last tenant. ``directories``: where the fresh directory may be made, the first that fits; None = where this
        user's sockets belong."""
        if not swap_dirs:
            raise ConfigError(
                "io_daemon.swap_dirs",
                [],
                "a daemon needs at least one directory for swap files",
            )
        if not all(map(os.fspath, swap_dirs)):
            raise ConfigError("io_daemon.swap_dirs", list(swap_dirs), "one is empty: name a path")
        check_addresses()  # it inherits the limit
        self._owner_pid = os.getpid()
        self._directory: PrivateDir | None = None
        if socket is None:
            with naming_limits("make a directory for the I/O daemon's socket"):
                self._directory = PrivateDir.make(socket_parents() if directories is None else directories)
            socket = self._directory.socket
        self.socket = Path(socket)
        self._arguments = ["serve", "--socket", str(self.socket)]
        for swap_dir in swap_dirs:
            self._arguments += ["--swap-dir", str(from_root(Path(swap_dir), "io_daemon.swap_dirs"))]
        self._arguments += [*options, *(["--private"] if private else [])]
        try:
            with naming_limits("start the I/O daemon"):
                self._popen = _start([*command, *self._arguments])
        except BaseException:
            if self._directory is not None:
                self._directory.remove()
            raise
        self._stderr = _StderrTail(self._popen)
        self._finalizer = weakref.finalize(
            self,
            _end,
            self._popen,
            self._stderr,
            self._directory,
            self._owner_pid,
            KILL_TIMEOUT_S,
        )
        try:
            self._stderr.start()
            self.ready = self._wait_for_ready(start_timeout_s)
        except BaseException:
            self._finalizer()
            raise

    @property
    def pid(self) -> int:
        return self._popen.pid

    def poll(self) -> int | None:
        """Exit status, or None while the daemon runs."""
        return self._popen.poll()

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, so that the daemon drains; SIGKILL after ``timeout_s``. Returns the exit status. Idempotent."""
        _end(self._popen, self._stderr, self._directory, self._owner_pid, timeout_s)
        self._finalizer.detach()
        status = self._popen.poll()
        return -signal.SIGKILL if status is None else status  # what becomes of it once the kernel lets go of it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.terminate()

    def _wait_for_ready(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._popen.stdout
        if stdout is None:
            raise AssertionError("stdout is a pipe")
        line, at_end = _read_line(stdout, time.monotonic() + timeout_s)
        if at_end:
            self._refuse()
        if not line.endswith(b"\n"):
            raise DaemonLostError(f"the I/O daemon was not ready within {timeout_s:g} s{self._stderr.last_words()}")
        try:
            ready = json.loads(line)
        except ValueError:
            ready = None
        if not isinstance(ready, dict):
            raise DaemonLostError(f"the I/O daemon's first line is not a JSON object: {line[:200]!r}")
        self._stderr.pass_on()
        return ready

    def _refuse(self) -> NoReturn:
        """The daemon closed its stdout: it has ended, or is about to."""
        status = self._popen.wait(KILL_TIMEOUT_S)
        last_words = self._stderr.last_words()
        if status == EXIT_USAGE:
            raise ConfigError(
                "io_daemon",
                " ".join(self._arguments),
                f"the I/O daemon refuses to start{last_words}",
            )
        raise DaemonLostError(f"the I/O daemon ended with status {status} before it was ready{last_words}")


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a process group of its own: a Ctrl-C at the terminal goes to the ranks, which still need the daemon to end."""
    with own_pidfd() as pidfd:
        return subprocess.Popen(
            [*command, "--parent-pidfd", str(pidfd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            pass_fds=(pidfd,),
        )


@contextlib.contextmanager
def own_pidfd() -> Iterator[int]:
    """By which what is started sees this process end, from its first instruction on: by the time that it could ask who
    its parent is, that may be another. Raises WorldError where the kernel gives none."""
    try:
        with naming_limits("watch over this process by a pidfd"):
            pidfd = os.pidfd_open(os.getpid())
    except OSError as error:
        raise WorldError(
            f"pidfd_open: {error.strerror} (errno {error.errno}): what this process starts could not see it end; Linux "
            "5.3 or newer has that call, and a container's seccomp profile must allow it"
        ) from error
    try:
        yield pidfd
    finally:
        os.close(pidfd)


class _StderrTail:
    """Keeps the last lines of the daemon's stderr for an error message; once asked to, passes each on as it comes.
    Whoever makes one starts it, and ends the daemon where that fails."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._lines: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        self._lock = threading.Lock()
        self._passing = False
        if popen.stderr is None:
            raise AssertionError("stderr is a pipe")
        self._stream = popen.stderr
        self._thread = threading.Thread(
            target=self._drain,
            name="io-daemon-stderr",
            daemon=True,
        )

    def start(self) -> None:
        """Raises WorldError where the system gives no thread."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._stream.close()
            raise too_few_threads(error, "this process needs one to hear the daemon") from error

    def _drain(self) -> None:
        with self._stream:
            for raw in self._stream:
                line = raw.decode(errors="replace").rstrip()
                with self._lock:
                    self._lines.append(line)
                    if self._passing:
                        _tell(line)

    def pass_on(self) -> None:
        """What was kept so far, and from now on every line."""
        with self._lock:
            self._passing = True
            for line in self._lines:
                _tell(line)

    def last_words(self) -> str:
        """Ready to follow a sentence; the empty string if nothing was said."""
        self.join(1.0)
        with self._lock:
            return ":\n  " + "\n  ".join(self._lines) if self._lines else ""

    def join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:  # else it could not be started
            self._thread.join(timeout_s)


def _tell(line: str) -> None:
    """On the user's stderr, if there is one: a job goes on when its terminal has gone."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            print(line, file=sys.stderr, flush=True)


def _read_line(stream: IO[bytes], deadline: float) -> tuple[bytes, bool]:
    """Bytes up to and with the first newline, fewer at the deadline (monotonic); whether the stream ended first."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < READY_LINE_BYTES_MAX:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            byte = os.read(stream.fileno(), 1)  # one at a time: what follows the line is not ours to swallow
            if not byte:
                return line, True
            line += byte
    return line, False


def _end(
    popen: subprocess.Popen[bytes],
    stderr: _StderrTail,
    directory: PrivateDir | None,
    owner_pid: int,
    timeout_s: float,
) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child must not end its parent's daemon
    if popen.poll() is None:
        popen.send_signal(signal.SIGTERM)
        try:
            popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.warning(
                "the I/O daemon (pid %d) did not drain within %g s: killed",
                popen.pid,
                timeout_s,
            )
            popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # its I/O hangs in the kernel: nobody can end it
                popen.wait(KILL_TIMEOUT_S)
    if popen.stdout is not None:
        popen.stdout.close()
    stderr.join(KILL_TIMEOUT_S)
    if directory is not None:
        directory.remove()

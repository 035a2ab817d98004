"""``python -m tests.support.daemon_forks SOCKET``: forks daemons, and their planners, for ``warm_daemons``."""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import selectors
import socket
import sys
from collections.abc import Sequence
from typing import Any, Final

import io_daemon.command.cli
import io_daemon.serve.server  # noqa: F401 (what a daemon needs)
from io_daemon.__main__ import main as daemon
from io_daemon.serve import planner
from io_daemon.serve.planner import PLAN_TIMEOUT_S
from io_daemon.serve.threads import in_thread
from tests.support.warm_daemons import PLANNER, REPOSITORY, Forked

FDS_MAX: Final = 8


_Task = tuple[str, list[str]]
"""What a fork is to be, and its words."""


class _Forks:
    def __init__(self, path: str) -> None:
        self._path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        self._listening.listen(64)
        self._running: dict[int, tuple[int, socket.socket]] = {}
        """By pidfd: the fork's pid, and who asked for it."""
        self._selector = selectors.DefaultSelector()
        for fd in (0, self._listening.fileno()):
            self._selector.register(fd, selectors.EVENT_READ)

    def serve(self) -> _Task | None:
        """Until whoever started this process, and the last fork, have ended. In a fork: what it is to be."""
        print("ready", flush=True)
        is_ended = False
        while self._running or not is_ended:
            for key, _ in self._selector.select():
                if key.fd == 0:
                    is_ended = True
                    self._selector.unregister(0)
                elif key.fd != self._listening.fileno():
                    self._tell_end(key.fd)
                elif (task := self._fork()) is not None:
                    return task
        os.unlink(self._path)
        os.rmdir(os.path.dirname(self._path))
        return None

    def _fork(self) -> _Task | None:
        """What is to be forked is asked for. In the fork: what it is to be."""
        asker, _ = self._listening.accept()
        if (received := _received(asker)) is None:
            asker.close()
            return None
        request, fds = received
        if (pid := os.fork()) == 0:
            inherited = [asker, self._listening, *(each for _, each in self._running.values())]
            _close([*(each.fileno() for each in inherited), *self._running])
            self._selector.close()
            return _become(request, fds)
        _close(fds)
        with contextlib.suppress(OSError):  # it was killed meanwhile: the daemon sees that, too
            asker.send(str(pid).encode())
        pidfd = os.pidfd_open(pid)
        self._running[pidfd] = (pid, asker)
        self._selector.register(pidfd, selectors.EVENT_READ)
        return None

    def _tell_end(self, pidfd: int) -> None:
        pid, asker = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError), asker:
            asker.send(str(status).encode())


def _received(asker: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """None if the asker was killed before it asked."""
    numbers = array.array("i")
    _, ancillary, _, _ = asker.recvmsg(64, socket.CMSG_SPACE(FDS_MAX * numbers.itemsize))
    for _, _, data in ancillary:
        numbers.frombytes(data)
    if not numbers:
        return None
    with os.fdopen(numbers[0], "rb") as file:
        file.seek(0)
        return json.loads(file.read()), list(numbers[1:])


def _become(request: dict[str, Any], fds: Sequence[int]) -> _Task:
    for number in range(3):
        os.dup2(fds[number], number)
    _close(fds[:3])
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    return request["what"], [*request["words"], *(word for fd in fds[3:] for word in ("--parent-pidfd", str(fd)))]


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


async def _run_planner(_planner: planner.Planner, asked: int, answered: int, num_accesses: int) -> None:
    """What ``Planner._run`` does, by a fork of the server's."""
    forked = await in_thread(lambda: Forked(PLANNER, [], [asked, answered, 2]))
    try:
        if await asyncio.to_thread(forked.wait, PLAN_TIMEOUT_S) != 0:
            raise AssertionError(f"a planner of {num_accesses} accesses ended with {forked.returncode}")
    finally:
        forked.kill()


def main() -> int:
    sys.path[0] = str(REPOSITORY)
    task = _Forks(sys.argv[1]).serve()
    if task is None:
        return 0
    what, words = task
    if what == PLANNER:
        planner.main()
        return 0
    planner.Planner._run = _run_planner  # type: ignore[method-assign, assignment]
    sys.argv = ["io-daemon", *words]
    return daemon(words)


if __name__ == "__main__":
    raise SystemExit(main())

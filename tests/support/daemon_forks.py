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


def _serve(path: str) -> tuple[str, list[str]] | None:
    """In a fork: what it is to be."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        print("ready", flush=True)
        ended = False
        while running or not ended:
            for key, _ in selector.select():
                if key.fd == 0:  # whoever started this has ended
                    ended = True
                    selector.unregister(0)
                elif key.fd == listening.fileno():
                    asker, _ = listening.accept()
                    if (received := _received(asker)) is None:
                        asker.close()
                        continue
                    request, fds = received
                    if (pid := os.fork()) == 0:
                        inherited = [asker, listening, *(each for _, each in running.values())]
                        _close([*(each.fileno() for each in inherited), *running])
                        selector.close()
                        return _become(request, fds)
                    _close(fds)
                    with contextlib.suppress(OSError):  # it was killed meanwhile: the daemon sees that, too
                        asker.send(str(pid).encode())
                    pidfd = os.pidfd_open(pid)
                    running[pidfd] = (pid, asker)
                    selector.register(pidfd, selectors.EVENT_READ)
                else:
                    pid, asker = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError), asker:
                        asker.send(str(status).encode())
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    return None


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


def _become(request: dict[str, Any], fds: Sequence[int]) -> tuple[str, list[str]]:
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
    found = _serve(sys.argv[1])
    if found is None:
        return 0
    what, words = found
    if what == PLANNER:
        planner.main()
        return 0
    planner.Planner._run = _run_planner  # type: ignore[method-assign, assignment]
    sys.argv = ["io-daemon", *words]
    return daemon(words)


if __name__ == "__main__":
    raise SystemExit(main())

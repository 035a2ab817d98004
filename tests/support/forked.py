"""A forked child that works and says lines; its crash or silence is told, not shared."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

Say = Callable[[str], Any]
"""Sends one line to the parent."""

SAID_CHARS_MAX = 3000


def warm_up() -> None:
    """Import what torch.optim and infinity import late: every child would pay for it.

    Nothing may run autograd before a fork: with an accelerator its threads would not survive.
    """
    for module in ("torch._dynamo", "torch._inductor", "torch.utils.checkpoint", "infinity.entry"):
        importlib.import_module(module)


class Child:
    """``work`` runs in a process group of its own, its output kept for the report of its end."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self._reader, writer = os.pipe()
        self._unread = b""
        self._timeout_s: float | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            _work_and_exit(work, writer, self._messages.fileno())
        os.close(writer)

    def read_line(self, timeout_s: float) -> str | None:
        """The next line; None if the child has ended, or was ended because none came in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._reader], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                self._timeout_s = timeout_s
                os.kill(self.pid, signal.SIGABRT)  # faulthandler writes every thread's traceback
                return None
            part = os.read(self._reader, 1 << 16)
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def end(self) -> str:
        """Reap the child: how it ended, and the last that it printed."""
        os.close(self._reader)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # whatever it has started and left
        self._messages.seek(0)
        said = self._messages.read().decode(errors="replace")[-SAID_CHARS_MAX:]
        self._messages.close()
        how = f"ends with {status}" if self._timeout_s is None else f"says nothing for {self._timeout_s:g} s"
        return f"the process {how}\n{said}"


def _work_and_exit(work: Callable[[Say], None], writer: int, messages: int) -> None:
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(messages, 1)
        os.dup2(messages, 2)
        faulthandler.enable(file=2)
        with os.fdopen(writer, "w") as stream:
            work(lambda line: print(line, file=stream, flush=True))
        status = 0
    except BaseException:  # noqa: BLE001 (the parent reads it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

"""How long OpenMP's threads spin while they have nothing to do: shorter while a rank waits for I/O.

After a loop, GNU's runtime has the threads of a team spin for milliseconds, since the next loop mostly comes soon. A
rank that waits for its leases has many short loops, and spins between them on the very core that the daemon, and the
kernel for it, need to move what the rank waits for. The runtime lets threads sleep almost at once where a process has
more of them than cores, and says so of itself in no other way after its start. So a thread of ours, with a team of two
that does nothing, is the one too many for as long as that is wanted. How many threads compute, and so every bit of
what they compute, stays.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any, Final

import torch

WAITED_S: Final = 0.005
WAITED_SHARE: Final = 0.05
"""A rank that has waited so long, and so much of its time, goes at the daemon's pace. (Where it rather computes,
sleeping threads cost more than their cores bring: a tenth of a forward.)"""
START_TIMEOUT_S: Final = 5.0


class _OneTooMany:
    """The thread and its team; the team goes with the thread."""

    def __init__(self, libraries: Any) -> None:
        self._libraries = libraries
        self._has_begun, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stay, name="infinity-one-too-many", daemon=True)
        self._thread.start()
        self._has_begun.wait(START_TIMEOUT_S)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(START_TIMEOUT_S)

    def _stay(self) -> None:
        nothing = ctypes.cast(self._libraries.free, ctypes.c_void_p)  # of NULL, which does nothing
        self._libraries.GOMP_parallel(nothing, None, 2, 0)
        self._has_begun.set()
        self._may_end.wait()


class Spinning:
    """How long they do in this process, which has one of these. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_too_many: _OneTooMany | None = None
        self._begun_s, self._waited_s = time.monotonic(), 0.0
        libraries: Any = ctypes.CDLL(None)
        self._libraries = libraries if hasattr(libraries, "GOMP_parallel") else None
        """What the process has loaded for all; None: OpenMP is another's, or torch has none."""

    @property
    def is_short(self) -> bool:
        return self._one_too_many is not None

    def note_wait(self, seconds: float) -> None:
        """A lease was waited for so long: spinning is cut short once that adds up."""
        self._waited_s += seconds
        if self._waited_s > max(WAITED_S, WAITED_SHARE * (time.monotonic() - self._begun_s)):
            self.cut_short()

    def cut_short(self) -> None:
        """Let threads that wait for a loop sleep at once, where they take every core. Idempotent."""
        if self._one_too_many is not None or self._libraries is None:
            return
        if torch.get_num_threads() < len(os.sched_getaffinity(0)):
            return  # the daemon has a core, and the runtime counts too few threads to be told anything
        with self._lock:
            if self._one_too_many is None:
                try:
                    self._one_too_many = _OneTooMany(self._libraries)
                except RuntimeError:  # the process may have no more threads: it is not worth an error
                    self._libraries = None

    def restore(self) -> None:
        """Let them spin as long as the runtime's settings say, and count waits anew. Idempotent."""
        self._begun_s, self._waited_s = time.monotonic(), 0.0
        if self._one_too_many is None:
            return
        with self._lock:
            ended, self._one_too_many = self._one_too_many, None
        if ended is not None:
            ended.end()


spinning: Final = Spinning()

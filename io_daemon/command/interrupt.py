"""Signals that end a command: while there is nothing to clean up yet (modules are being imported, options parsed), and
where there is. And the one that says how a child has ended."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once and says nothing. Raised in the middle of an import, KeyboardInterrupt
    would end in a traceback, and a class under construction even turns it into a RuntimeError."""
    before = signal.getsignal(signal.SIGINT)
    # ignored, as in a script's background, or somebody else's business; and only the main thread may set one
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    os._exit(EXIT_INTERRUPTED)


def hear_of_children() -> None:
    """Where whoever started this process ignores SIGCHLD, so would this one: the kernel then keeps no child's exit
    code, and one that has failed would be taken for one that has not."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP clean up as Ctrl-C does, on the main thread; no other may say so. One that is ignored, as
    SIGHUP under nohup, or that a program around us handles stays as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait for the end of what is inside, on the main thread; the last of them counts. Only
    for what is short: a user who wants out is not heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    try:
        for number in before:  # one that comes meanwhile ends this before anything was done
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[-1])


def end_with(fd: int) -> None:
    """SIGTERM comes once the process of a pidfd is gone, or that at the other end of a pipe, whatever has ended it."""

    def watch() -> None:
        gone = select.poll()
        gone.register(fd, select.POLLIN)
        gone.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="infinity-parent", daemon=True).start()


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(128 + number)

"""Signals that end a command: while there is nothing to clean up yet (modules are being imported, options parsed), and
where there is."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


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


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP clean up as Ctrl-C does, on the main thread; no other may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _exit) for number in heeded}  # under nohup SIGHUP stays ignored
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise SystemExit(128 + number)

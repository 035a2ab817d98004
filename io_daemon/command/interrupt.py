"""Ctrl-C while there is nothing to clean up yet: modules are being imported, options parsed."""

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

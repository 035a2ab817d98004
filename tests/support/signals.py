"""For children that tests send signals to."""

from __future__ import annotations

import signal


def heed_signals() -> None:
    """As ``preexec_fn``: under nohup or in the background of a script signals come ignored, and children inherit it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)

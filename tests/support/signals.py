"""For children that tests send signals to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

ENDING: Final = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


def heed_signals() -> None:
    """As ``preexec_fn``: under nohup or in the background of a script signals come ignored, and children inherit it."""
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """For a daemon that ends in this process: it ignores what would end it once more, and children of later tests, who
    inherit that, would be killed only when their deadline has passed."""
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

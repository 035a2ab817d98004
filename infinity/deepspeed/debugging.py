"""Printing from many ranks at once: ``deepspeed.utils.debug``."""

from __future__ import annotations

import fcntl
from pathlib import Path


def printflock(*msgs: object) -> None:
    """Print while no other rank of this node prints by this function."""
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        print(*msgs, flush=True)

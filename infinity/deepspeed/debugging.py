"""Printing from many ranks at once: ``deepspeed.utils.debug``."""

from __future__ import annotations

import fcntl as locks
from pathlib import Path
from typing import Any

fcntl: Any = locks
"""What locks files; scripts set it to None where there are no locks."""


def printflock(*msgs: object) -> None:
    """Print while no other rank of this node prints by this function; without ``fcntl``, just print."""
    with Path(__file__).open() as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        print(*msgs, flush=True)

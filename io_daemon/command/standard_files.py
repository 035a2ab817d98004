"""Standard input, output and error: each is some file, also where whoever started this process has closed it."""

from __future__ import annotations

import os
import sys
from typing import Final

STANDARD: Final = (0, 1, 2)


def fill_standard_files() -> None:
    """Put /dev/null where one is missing. Its number would go to the next file that is opened, and what is written to
    standard output or error, by whomever, into that: a socket, or a swap file."""
    for fd in STANDARD:
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(fd, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)

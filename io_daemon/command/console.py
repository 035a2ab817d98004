"""Where reports are printed."""

from __future__ import annotations

from typing import Final

from rich.console import Console

WIDTH_MIN: Final = 20
"""A table has no room in less, and shows nothing."""


def redraws(console: Console) -> bool:
    """Whether what is shown can take the place of what was: not in a pipe, nor at a terminal that only goes on, as
    an editor's shell does (TERM=dumb)."""
    return console.is_terminal and not console.is_dumb_terminal


def open_console(*, stderr: bool = False) -> Console:
    """It is as wide as the terminal, or $COLUMNS, says; 80 where that is no width, as without a terminal. Names of
    files and tensors are printed as they are: they may hold what would be markup."""
    found = Console(stderr=stderr, markup=False, emoji=False)
    return found if found.width >= WIDTH_MIN else Console(stderr=stderr, width=80, markup=False, emoji=False)

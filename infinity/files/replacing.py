"""Files that take the names of former ones in a directory: all of them do, or everything is what it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType


class Replacing:
    """A context, whose end by an error gives every former file its name again. Its methods raise OSError."""

    def __init__(self, directory: Path, kept: Path) -> None:
        """``kept``: where former files are until it is over, on the same filesystem; it is made, and left to others to
        remove."""
        self._directory, self._kept = directory, kept
        self._undo = ExitStack()
        kept.mkdir()

    def take_away(self, name: str) -> None:
        """There is no such file from now on; there need not have been one."""
        former = self._directory / name
        if os.path.lexists(former):
            self._undone_by(lambda: (self._kept / name).rename(former))
            former.rename(self._kept / name)

    def put(self, new: Path) -> None:
        """``new`` takes its name here, at once; what has it is never absent meanwhile where that can be had."""
        name = new.name
        former = self._directory / name
        try:
            os.link(former, self._kept / name, follow_symlinks=False)
            self._undone_by(lambda: (self._kept / name).rename(former))
        except OSError:  # there is none, or no such thing as a link to it
            if former.is_symlink() or not former.is_dir():  # which the next line refuses
                self.take_away(name)
        self._undone_by(lambda: former.rename(new))
        os.replace(new, former)

    def _undone_by(self, rename: Callable[[], object]) -> None:
        """It may be interrupted before it is done: then ``rename`` finds nothing, or what it gives back anyway."""

        def undo() -> None:
            with suppress(OSError):
                rename()

        self._undo.callback(undo)

    def __enter__(self) -> Replacing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._undo.pop_all()
        self._undo.close()

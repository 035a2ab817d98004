"""A directory for as long as a command works: gone afterwards, whichever signal ends it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from io_daemon.command.interrupt import interruptible, undisturbed


@contextmanager
def scratch_directory(prefix: str, parent: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """A fresh one in ``parent``; None = where temporary files go. SIGTERM and SIGHUP remove it as Ctrl-C does, and one
    that comes while it is being made or removed waits for the end of that. Raises OSError if it cannot be made."""
    with interruptible():
        directory: tempfile.TemporaryDirectory[str] | None = None
        try:
            with undisturbed():
                directory = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
            yield Path(directory.name)
        finally:
            with undisturbed():
                if directory is not None:
                    directory.cleanup()

"""Files of a checkpoint that are open for reading, few at a time: of thousands of ranks there are more of them than a
process may open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from infinity.checkpoint.disk import disk_errors
from infinity.files.direct import open_direct

OPEN_MAX: Final = 64


class Descriptors:
    """Any thread may call ``of``."""

    def __init__(self, open_max: int = OPEN_MAX) -> None:
        """``open_max``: files that stay open while nobody reads them."""
        self._open_max = open_max
        self._lock = threading.Lock()
        self._open: dict[Path, int] = {}
        """The descriptor of each file; the one that was read last is the last."""
        self._num_readers: dict[Path, int] = {}

    @contextmanager
    def of(self, path: Path) -> Iterator[int]:
        """A descriptor of the file, to be read past the page cache inside. Raises CheckpointError."""
        with self._lock:
            descriptor = self._open.pop(path, None)
            if descriptor is None:
                with disk_errors(path, "opened"):
                    descriptor = open_direct(path, os.O_RDONLY)
            self._open[path] = descriptor
            self._num_readers[path] = self._num_readers.get(path, 0) + 1
        try:
            yield descriptor
        finally:
            with self._lock:
                self._num_readers[path] -= 1
                self._close_idle(self._open_max)

    def close(self) -> None:
        """All of them; nobody reads any."""
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, num_kept: int) -> None:
        for path in [path for path in self._open if not self._num_readers[path]][: max(0, len(self._open) - num_kept)]:
            os.close(self._open.pop(path))
            del self._num_readers[path]

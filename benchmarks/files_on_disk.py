"""Files that a benchmark has written: on the drive, and out of the page cache. Standard library alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def sync(path: Path) -> None:
    """Have every file of the directory, or the file, on the drive."""
    _each(path, os.fsync)


def drop_cache(path: Path) -> None:
    """Have none of its bytes in the page cache; they must be on the drive."""
    _each(path, lambda descriptor: os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED))


def _each(path: Path, work: Callable[[int], object]) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                work(descriptor)
            finally:
                os.close(descriptor)

"""Memory that blocks are moved to and from: as training's arenas are, in huge pages where the machine has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from io_daemon._native import Region
from io_daemon.shared.arena import prefault_threads
from io_daemon.shared.protocol import HUGE_PAGE_BYTES


class Buffers(NamedTuple):
    region: Region
    fd: int
    """The descriptor of the file behind it."""
    has_huge_pages: bool
    """All of it."""

    @property
    def path(self) -> Path:
        """By which other processes of this user can map it, too."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")


@contextmanager
def open_buffers(num_bytes: int) -> Iterator[Buffers]:
    """At least so many bytes, zero, whole huge pages, each there. The region outlives the context, the file does not.
    Raises OSError if the machine does not give it."""
    num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fd = os.memfd_create("infinity-bench", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, num_bytes)
        region = Region(fd, num_bytes)
        huge_bytes = region.prefault(prefault_threads())
        yield Buffers(region, fd, huge_bytes == num_bytes)
    finally:
        os.close(fd)

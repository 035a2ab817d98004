"""Memory that blocks are moved to and from: as training's arenas are, in huge pages where the machine has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from io_daemon._native import Region
from io_daemon.errors import ConfigError, WorldError
from io_daemon.machine.facts import cgroup_ram_max_bytes, meminfo
from io_daemon.shared.arena import prefault_threads
from io_daemon.shared.protocol import HUGE_PAGE_BYTES


class Buffers(NamedTuple):
    region: Region
    fd: int
    """Of the file behind it."""
    has_huge_pages: bool
    """All of it."""

    @property
    def path(self) -> Path:
        """By which other processes of this user can map it, too."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")


def available_bytes() -> int:
    """Of memory, as the kernel estimates it; no more than the limit of this process's cgroup."""
    there_bytes = meminfo(Path("/proc")).get("MemAvailable")
    if there_bytes is None:
        raise WorldError("/proc/meminfo does not say MemAvailable")
    return min(there_bytes, cgroup_ram_max_bytes(Path("/sys")) or there_bytes)


@contextmanager
def open_buffers(num_bytes: int) -> Iterator[Buffers]:
    """At least so many bytes, zero, whole huge pages, each there. The region outlives the context, the file does not.
    Raises ConfigError if the machine does not give it."""
    num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    fd = os.memfd_create("infinity-bench", os.MFD_CLOEXEC)
    try:
        try:
            os.truncate(fd, num_bytes)
            region = Region(fd, num_bytes)
            huge_bytes = region.prefault(prefault_threads())
        except OSError as error:
            raise ConfigError(
                "iodepth", num_bytes, f"the machine does not give this much memory for buffers ({error.strerror})"
            ) from error
        yield Buffers(region, fd, huge_bytes == num_bytes)
    finally:
        os.close(fd)

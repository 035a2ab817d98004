"""Memory that blocks are moved to and from: as training's arenas are, in huge pages where the machine has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from io_daemon._native import Region
from io_daemon.bench.report.machine import cgroup_ram_max_bytes
from io_daemon.errors import ConfigError, WorldError
from io_daemon.protocol import HUGE_PAGE_BYTES

PREFAULT_THREADS_MAX: Final = 8


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
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, cgroup_ram_max_bytes(Path("/sys")) or sys.maxsize)
    raise WorldError("/proc/meminfo does not say MemAvailable")


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
            huge_bytes = region.prefault(min(len(os.sched_getaffinity(0)), PREFAULT_THREADS_MAX))
        except OSError as error:
            raise ConfigError(
                "iodepth", num_bytes, f"the machine does not give this much memory for buffers ({error.strerror})"
            ) from error
        yield Buffers(region, fd, huge_bytes == num_bytes)
    finally:
        os.close(fd)

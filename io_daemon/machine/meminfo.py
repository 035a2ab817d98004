"""How much memory there is: the machine's, as /proc/meminfo has it (proc(5)), and this container's share of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from io_daemon.disk.kernel_text import read_integer, read_text
from io_daemon.disk.mounts import PROC
from io_daemon.errors import WorldError

SYS: Final = Path("/sys")


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """Bytes, by the kernel's names."""
    fields = (line.partition(":") for line in (read_text(proc / "meminfo") or "").splitlines())
    return {name: int(rest.split()[0]) << 10 for name, _, rest in fields if rest.split()[1:] == ["kB"]}


def cgroup_ram_max_bytes(sys: Path = SYS) -> int | None:
    """The limit of a container, which sees its own cgroup as the root: version 2, then version 1."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = read_integer(sys / "fs" / "cgroup" / name)
        if limit is not None and limit < 1 << 60:  # version 1 writes the largest multiple of a page for none
            return limit
    return None


def ram_bytes() -> int:
    """The memory of the machine. Raises WorldError."""
    return _told("MemTotal")


def available_bytes() -> int:
    """What the kernel estimates to be available; no more than the limit of this process's cgroup. Raises WorldError."""
    there_bytes = _told("MemAvailable")
    return min(there_bytes, cgroup_ram_max_bytes() or there_bytes)


def _told(name: str) -> int:
    found = meminfo().get(name)
    if found is None:
        raise WorldError(f"/proc/meminfo does not say {name}")
    return found

"""How much memory there is: the machine's, as /proc/meminfo has it (proc(5)), and this container's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from io_daemon.config import UNLIMITED_BYTES
from io_daemon.disk.kernel_text import read_integer, read_text
from io_daemon.disk.mounts import PROC
from io_daemon.errors import WorldError

SYS: Final = Path("/sys")
ARENAS_SHARE: Final = 0.9
"""Arenas may take this part of the machine's or container's memory where no budget was named. They are pinned while
the reactors have them registered, so the rest is all that everything else can live in."""
CONTROLLERS: Final = (("", "", "memory.max"), ("memory", "memory", "memory.limit_in_bytes"))
"""Versions 2 and 1 have each: a controller in /proc/PID/cgroup, a mounted tree, a file with the limit."""


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """Bytes, by the kernel's names."""
    fields = (line.partition(":") for line in (read_text(proc / "meminfo") or "").splitlines())
    return {name: int(rest.split()[0]) << 10 for name, _, rest in fields if rest.split()[1:] == ["kB"]}


def cgroup_ram_max_bytes(sys: Path = SYS, proc: Path = PROC) -> int | None:
    """The least limit of this process's cgroup and those above it, as far as they are seen: a container sees its own as
    the root, a batch system's job lies some levels below it."""
    found = (read_integer(path) for path in _limit_files(sys, proc))
    # version 1 writes the largest multiple of a page for none
    return min((limit for limit in found if limit is not None and limit < 1 << 60), default=None)


def _limit_files(sys: Path, proc: Path) -> Iterator[Path]:
    """Whether they are there or not."""
    lines = [line.split(":", 2) for line in (read_text(proc / "self" / "cgroup") or "").splitlines()]
    for controller, mounted, name in CONTROLLERS:
        root = sys / "fs" / "cgroup" / mounted
        yield root / name
        for own in (line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")):
            if ".." not in Path(own).parts:  # of a process that lies above what this container sees
                below = Path(own.lstrip("/"))
                yield from (root / each / name for each in (below, *below.parents))


def ram_bytes() -> int:
    """The memory of the machine. Raises WorldError."""
    return _told("MemTotal")


def available_bytes() -> int:
    """What the kernel estimates to be available; no more than the limit of this process's cgroup. Raises WorldError."""
    there_bytes = _told("MemAvailable")
    return min(there_bytes, cgroup_ram_max_bytes() or there_bytes)


def arenas_bytes_max() -> int:
    """Most bytes of arenas that this machine, or this container, can hold."""
    limits = (meminfo().get("MemTotal"), cgroup_ram_max_bytes())
    return int(ARENAS_SHARE * min((limit for limit in limits if limit is not None), default=UNLIMITED_BYTES))


def _told(name: str) -> int:
    found = meminfo().get(name)
    if found is None:
        raise WorldError(f"/proc/meminfo does not say {name}")
    return found

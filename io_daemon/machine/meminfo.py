"""How much memory there is: the machine's, as /proc/meminfo has it (proc(5)), and this container's share of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from io_daemon.config import UNLIMITED_BYTES
from io_daemon.disk.kernel_text import read_integer, read_text
from io_daemon.disk.mounts import PROC
from io_daemon.errors import WorldError

SYS: Final = Path("/sys")
ARENAS_SHARE: Final = 0.9
"""Arenas may take this part of the machine's or container's memory where no budget was named. They are pinned while
the reactors have them registered, so the rest is all that everything else can live in."""


class Controller(NamedTuple):
    """Where one version of cgroups says what."""

    name: str
    """What /proc/PID/cgroup calls it."""
    mounted: str
    limit: str
    """The file with the limit, in every directory of the tree."""
    used: str
    """The file with what is charged, page cache included."""
    cached: tuple[str, str]
    """The lines of memory.stat with the page cache, which is given up for whoever asks."""


CONTROLLERS: Final = (
    Controller("", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    Controller(
        "memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Versions 2 and 1."""
UNLIMITED_FROM_BYTES: Final = 1 << 60
"""Version 1 writes the largest multiple of a page for no limit."""


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """Bytes, by the kernel's names."""
    fields = (line.partition(":") for line in (read_text(proc / "meminfo") or "").splitlines())
    return {name: int(rest.split()[0]) << 10 for name, _, rest in fields if rest.split()[1:] == ["kB"]}


def cgroup_ram_max_bytes(sys: Path = SYS, proc: Path = PROC) -> int | None:
    """The least limit of this process's cgroup and those above it, as far as they are seen: a container sees its own as
    the root, a batch system's job lies some levels below it."""
    return min((limit_bytes for _, _, limit_bytes in _limits(sys, proc)), default=None)


def _limits(sys: Path, proc: Path) -> Iterator[tuple[Controller, Path, int]]:
    """Each limit with the directory that has it."""
    for controller, directory in _directories(sys, proc):
        limit_bytes = read_integer(directory / controller.limit)
        if limit_bytes is not None and limit_bytes < UNLIMITED_FROM_BYTES:
            yield controller, directory, limit_bytes


def _directories(sys: Path, proc: Path) -> Iterator[tuple[Controller, Path]]:
    """Whether they are there or not."""
    lines = [line.split(":", 2) for line in (read_text(proc / "self" / "cgroup") or "").splitlines()]
    for controller in CONTROLLERS:
        root = sys / "fs" / "cgroup" / controller.mounted
        yield controller, root
        for own in (line[2] for line in lines if len(line) == 3 and controller.name in line[1].split(",")):
            if ".." not in Path(own).parts:  # of a process that lies above what this container sees
                below = Path(own.lstrip("/"))
                yield from ((controller, root / each) for each in (below, *below.parents))


def ram_bytes() -> int:
    """The memory of the machine. Raises WorldError."""
    return _told("MemTotal")


def available_bytes(sys: Path = SYS, proc: Path = PROC) -> int:
    """What the kernel estimates to be available; no more than what this process's cgroup and those above it have left.
    Raises WorldError."""
    left_bytes = [_left_bytes(*each) for each in _limits(sys, proc)]
    return min([_told("MemAvailable", proc), *left_bytes])


def _left_bytes(controller: Controller, directory: Path, limit_bytes: int) -> int:
    """What may still be charged there."""
    lines = (line.partition(" ") for line in (read_text(directory / "memory.stat") or "").splitlines())
    cached_bytes = sum(int(value) for name, _, value in lines if name in controller.cached)
    used_bytes = (read_integer(directory / controller.used) or 0) - cached_bytes
    return max(0, limit_bytes - max(0, used_bytes))


def arenas_bytes_max() -> int:
    """Most bytes of arenas that this machine, or this container, can hold."""
    limits = (meminfo().get("MemTotal"), cgroup_ram_max_bytes())
    return int(ARENAS_SHARE * min((limit for limit in limits if limit is not None), default=UNLIMITED_BYTES))


def _told(name: str, proc: Path = PROC) -> int:
    found = meminfo(proc).get(name)
    if found is None:
        raise WorldError(f"/proc/meminfo does not say {name}")
    return found

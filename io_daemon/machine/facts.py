"""Where a figure was taken: without this a figure means nothing to anyone else.

``describe_machine`` never fails: a fact that cannot be read is None, with a note that says why or what to do.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import ValidationError

from io_daemon.config import ENGINES_BY_RANK
from io_daemon.disk.kernel_text import read_integer, read_text
from io_daemon.disk.mounts import PROC, Mount, find_mount, mount_written
from io_daemon.machine.block_device import BlockDevice, cached_loops, find_block_device
from io_daemon.machine.cpuinfo import processor_name
from io_daemon.machine.meminfo import cgroup_ram_max_bytes, meminfo
from io_daemon.shared.record import Record

SYS: Final = Path("/sys")
CAP_IPC_LOCK: Final = 14
PACKAGE: Final = "infinity"


class EngineFact(Record):
    name: str
    compiled: bool
    works: bool
    reason: str | None
    """Why it does not work."""


class DirectoryFacts(Record):
    """What a directory lies on, from its mount down to the drives."""

    path: str
    filesystem: str | None
    mount_point: str | None
    mount_options: list[str]
    source: str | None
    free_bytes: int | None
    """Bytes that are free to this user."""
    total_bytes: int | None
    direct: bool | None
    direct_refusal: str | None
    """Why O_DIRECT does not work."""
    device: BlockDevice | None
    notes: list[str]


class MachineFacts(Record):
    version: str | None
    """The version of this program."""
    python: str
    kernel: str | None
    processor: str | None
    architecture: str
    num_cores: int
    """The cores that this process may use."""
    num_cores_online: int | None
    numa_nodes: str | None
    """The nodes as the kernel lists them: ``0-1``."""
    ram_bytes: int | None
    ram_available_bytes: int | None
    cgroup_ram_max_bytes: int | None
    """None: this container sets no limit."""
    swap_bytes: int | None
    page_bytes: int
    memlock_bytes: int | Literal["unlimited"]
    aio_nr: int | None
    aio_max_nr: int | None
    io_uring_disabled: int | None
    """0: everyone may; 1: a group may; 2: nobody. None: a kernel before 6.6."""
    engines: list[EngineFact]
    directories: list[DirectoryFacts]
    notes: list[str]

    @classmethod
    def of_report(cls, machine: Mapping[str, Any]) -> Self | None:
        """What a report says of its machine; None if another version wrote that."""
        try:
            return cls.model_validate(machine)
        except ValidationError:
            return None


def describe_machine(directories: Sequence[Path], *, proc: Path = PROC, sys: Path = SYS) -> MachineFacts:
    """``proc`` and ``sys``: where to look for the kernel's facts. ``directories`` may be any, also missing ones."""
    memory = meminfo(proc)
    engines, engine_note = _engines()
    facts = MachineFacts(
        version=package_version(),
        python=platform.python_version(),
        kernel=read_text(proc / "sys" / "kernel" / "osrelease"),
        processor=processor_name(proc),
        architecture=platform.machine(),
        num_cores=len(os.sched_getaffinity(0)),
        num_cores_online=os.cpu_count(),
        numa_nodes=read_text(sys / "devices" / "system" / "node" / "online"),
        ram_bytes=memory.get("MemTotal"),
        ram_available_bytes=memory.get("MemAvailable"),
        cgroup_ram_max_bytes=cgroup_ram_max_bytes(sys, proc),
        swap_bytes=memory.get("SwapTotal"),
        page_bytes=resource.getpagesize(),
        memlock_bytes=_memlock_bytes(proc),
        aio_nr=read_integer(proc / "sys" / "fs" / "aio-nr"),
        aio_max_nr=read_integer(proc / "sys" / "fs" / "aio-max-nr"),
        io_uring_disabled=read_integer(proc / "sys" / "kernel" / "io_uring_disabled"),
        engines=engines,
        directories=[describe_directory(path, proc=proc, sys=sys) for path in directories],
        notes=[] if engine_note is None else [engine_note],
    )
    unknown = [
        name
        for name in ("version", "kernel", "processor", "ram_bytes", "swap_bytes", "aio_max_nr")
        if getattr(facts, name) is None
    ]
    if not unknown:
        return facts
    return facts.model_copy(update={"notes": [*facts.notes, f"this system does not tell {', '.join(unknown)}"]})


def package_version() -> str | None:
    """The version that is installed; None where none is."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memlock_bytes(proc: Path) -> int | Literal["unlimited"]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if _may_lock_all(proc) or soft == resource.RLIM_INFINITY else soft


def _may_lock_all(proc: Path) -> bool:
    for line in (read_text(proc / "self" / "status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


def _engines() -> tuple[list[EngineFact], str | None]:
    try:
        from io_daemon import _native
    except ImportError as error:
        return [], f"the I/O core cannot be loaded ({error}): build it with make build, or pip install ."
    facts = []
    for name in ENGINES_BY_RANK:
        compiled = name in _native.ENGINES
        reason = _native.probe_engine(name) if compiled else "not compiled in"
        facts.append(EngineFact(name=name, compiled=compiled, works=reason is None, reason=reason))
    return facts, None


def describe_directory(path: Path, *, proc: Path = PROC, sys: Path = SYS) -> DirectoryFacts:
    mount = _mount(path, proc)
    free_bytes, total_bytes = _space(path)
    direct_refusal = _direct_refusal(path)
    device = None if mount is None else find_block_device(mount, sys)
    return DirectoryFacts(
        path=as_text(path),
        filesystem=None if mount is None else mount.filesystem,
        mount_point=None if mount is None else as_text(mount.mount_point),
        mount_options=[] if mount is None else list(mount.options),
        source=None if mount is None else as_text(mount.source),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        direct=None if free_bytes is None else direct_refusal is None,
        direct_refusal=direct_refusal,
        device=device,
        notes=list(_directory_notes(as_text(path), mount, free_bytes, device)),
    )


def cached_loops_below(path: Path, *, proc: Path = PROC, sys: Path = SYS) -> list[str]:
    """The names of loop devices below ``path`` that make of direct I/O such as goes through the page cache."""
    mount = _mount(path, proc)
    return [] if mount is None else cached_loops(mount_written(mount, proc), sys)


def _directory_notes(
    name: str, mount: Mount | None, free_bytes: int | None, device: BlockDevice | None
) -> Iterator[str]:
    from io_daemon.disk.swap_dir import MEMORY_FILESYSTEMS

    if free_bytes is None:
        yield f"{name} cannot be looked at: is it there, and yours to read?"
    if mount is None:
        yield f"{name}: no mount is known to hold it"
    elif mount.filesystem in MEMORY_FILESYSTEMS:
        yield f"{name}: {mount.filesystem} lies in memory, not on a drive"
    elif mount.filesystem == "overlay":
        yield f"{name}: an overlay hides its drive: mount a volume of the host into the container and use that"
    elif device is None:
        yield f"{name}: {mount.filesystem} from {as_text(mount.source)} shows no block device of this machine"


def as_text(path: Path | str) -> str:
    """A name, or a word of a command, as JSON can hold it: bytes that are no UTF-8 are escapes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _mount(path: Path, proc: Path) -> Mount | None:
    try:
        return find_mount(path, proc)
    except (OSError, ValueError):  # unreadable, a line we do not understand
        return None


def _space(path: Path) -> tuple[int | None, int | None]:
    try:
        space = os.statvfs(path)
    except OSError:
        return None, None
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def _direct_refusal(path: Path) -> str | None:
    from io_daemon.disk.swap_dir import probe_direct

    return probe_direct(path)

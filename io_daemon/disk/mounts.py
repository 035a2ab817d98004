"""Which mount holds a path: its device, filesystem and options, as /proc/self/mountinfo has them (proc(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Mount:
    number: int
    """The ``mnt_id`` of files that lie there."""
    device: str
    """``major:minor``; major 0 for filesystems without one device (tmpfs, overlay, btrfs, NFS)."""
    mount_point: Path
    filesystem: str
    """Without a sub-type: ``fuse.sshfs`` is ``fuse``."""
    source: str
    """``/dev/nvme0n1``, ``server:/export``, or a word that means nothing."""
    options: tuple[str, ...]
    """Those of the mount, then those of the superblock; each once."""

    @property
    def upper(self) -> Path | None:
        """Where an overlay's writes go, as the process that mounted it named it: perhaps nowhere that we can look."""
        names = [option.partition("=")[2] for option in self.options if option.startswith("upperdir=")]
        return Path(_unescape(names[0])) if self.filesystem == "overlay" and names else None

    @classmethod
    def parse(cls, line: str) -> Mount:
        left, _, right = line.partition(" - ")
        number, _, device, _, mount_point, options, *_ = left.split(" ")
        filesystem, source, super_options = right.split(" ", 2)
        return cls(
            int(number),
            device,
            Path(_unescape(mount_point)),
            filesystem.partition(".")[0],
            _unescape(source),
            tuple(dict.fromkeys((*options.split(","), *super_options.split(",")))),
        )


def find_mount(path: Path, proc: Path = PROC) -> Mount | None:
    """The mount that holds ``path``. Raises OSError.

    The kernel says which, of a path that is there; else it is the last one above it, which covers earlier ones.
    """
    target, number = Path(os.path.realpath(path)), _number_of_mount(path, proc)
    found: Mount | None = None
    for line in os.fsdecode((proc / "self" / "mountinfo").read_bytes()).rstrip("\n").split("\n"):
        mount = Mount.parse(line)
        if mount.number == number:
            return mount
        if target.is_relative_to(mount.mount_point):
            found = mount
    return found


def mount_written(mount: Mount, proc: Path = PROC) -> Mount:
    """The mount that takes what is written there: of an overlay that of its upper directory, where we can find it."""
    while mount.upper is not None and mount.upper.is_dir():
        below = find_mount(mount.upper, proc)
        if below is None or below == mount:
            break
        mount = below
    return mount


def _number_of_mount(path: Path, proc: Path) -> int | None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = (proc / "self" / "fdinfo" / str(fd)).read_text()
    except OSError:  # a kernel, or a stand-in for one, that does not say
        return None
    finally:
        os.close(fd)
    numbers = [line.partition(":")[2] for line in told.split("\n") if line.startswith("mnt_id:")]
    return int(numbers[0]) if numbers else None


def _unescape(text: str) -> str:
    """Blanks, newlines, backslashes and the like are written as octal escapes; all else is UTF-8 as it is."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), text)

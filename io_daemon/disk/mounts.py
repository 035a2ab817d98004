"""Which mount holds a path: its device, filesystem and options, as /proc/self/mountinfo has them (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Mount:
    device: str
    """``major:minor``; major 0 for filesystems without one device (tmpfs, overlay, btrfs, NFS)."""
    mount_point: Path
    filesystem: str
    """Without a sub-type: ``fuse.sshfs`` is ``fuse``."""
    source: str
    """``/dev/nvme0n1``, ``server:/export``, or a word that means nothing."""
    options: tuple[str, ...]
    """Those of the mount, then those of the superblock; each once."""

    @classmethod
    def parse(cls, line: str) -> Mount:
        left, _, right = line.partition(" - ")
        _, _, device, _, mount_point, options, *_ = left.split()
        filesystem, source, super_options = right.split(" ", 2)
        return cls(
            device,
            Path(_unescape(mount_point)),
            filesystem.partition(".")[0],
            _unescape(source),
            tuple(dict.fromkeys((*options.split(","), *super_options.split(",")))),
        )


def find_mount(path: Path, proc: Path = PROC) -> Mount | None:
    """The mount with the longest mount point above ``path``; a later mount covers an earlier one. Raises OSError."""
    target = path.resolve()
    found: Mount | None = None
    for line in os.fsdecode((proc / "self" / "mountinfo").read_bytes()).rstrip("\n").split("\n"):
        mount = Mount.parse(line)
        if target.is_relative_to(mount.mount_point) and (
            found is None or len(mount.mount_point.parts) >= len(found.mount_point.parts)
        ):
            found = mount
    return found


def _unescape(text: str) -> str:
    """Blanks, tabs, newlines and backslashes are written as octal escapes; all else is UTF-8 as it is."""
    if "\\" not in text:
        return text
    for code in ("\\040", "\\011", "\\012", "\\134"):
        text = text.replace(code, chr(int(code[1:], 8)))
    return text

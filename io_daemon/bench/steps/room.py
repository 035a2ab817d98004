"""What a replay may take of disks and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from io_daemon.bench.settings import FREE_SHARE_KEPT
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.machine.meminfo import available_bytes

RAM_SHARE_MAX: Final = 0.5
"""Arenas take at most this part of what is available."""


def disk_room_bytes(directories: Sequence[Path]) -> int:
    """Swap files may fill so much, all directories together; several may lie on one filesystem. At least 0. Raises
    ConfigError for an unfit directory."""
    room_bytes = {}
    for directory in directories:
        path = check_swap_dir(directory).path
        space = os.statvfs(path)
        room_bytes[path.stat().st_dev] = int((space.f_bavail - space.f_blocks * FREE_SHARE_KEPT) * space.f_frsize)
    return max(0, sum(room_bytes.values()))


def arena_room_bytes() -> float:
    """Arenas may take so much of memory."""
    return available_bytes() * RAM_SHARE_MAX

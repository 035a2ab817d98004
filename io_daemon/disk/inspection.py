"""What lies in a swap directory: whose each file is, and whether it is whole. Nothing is changed or locked."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from io_daemon.disk.swap_dir import is_elsewhere, unusable
from io_daemon.disk.swap_file import PREFIX, SUFFIX, SwapHeader
from io_daemon.errors import ConfigError
from io_daemon.shared.protocol import PAGE_BYTES

SETTLES_S: Final = 1.0
"""A file that is being made, lengthened or shortened is whole again by then."""
LOOK_EVERY_S: Final = 0.02


class Condition(StrEnum):
    """What a file with a swap file's name turns out to be."""

    IN_USE = "in use"
    """Its daemon runs."""
    LEFT = "left behind"
    """Its daemon is dead: the next one, or `io-daemon gc`, removes it."""
    ELSEWHERE = "of another machine"
    """Whether its daemon lives is not known here."""
    NOT_OURS = "not ours"
    """It is another user's, no regular file, or not to be read: no daemon of ours touches it."""
    DAMAGED = "damaged"
    """It has no header that this program wrote; or it is in use, and shorter than its header says."""


@dataclass(frozen=True)
class FoundFile:
    """``note``: why, where the condition alone does not say."""

    path: Path
    condition: Condition
    num_bytes: int
    header: SwapHeader | None = None
    note: str = ""


def inspect(directory: Path) -> list[FoundFile]:
    """Every file of ``directory`` that has a swap file's name, by name. Raises ConfigError if it cannot be listed."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        remedy = unusable(str(directory)) or f"cannot be listed ({error.strerror}): name another directory"
        raise ConfigError("swap_dirs", str(directory), remedy) from error
    paths = (directory / name for name in names if name.startswith(PREFIX) and name.endswith(SUFFIX))
    return [found for path in paths if (found := _settled(path)) is not None]


def _settled(path: Path) -> FoundFile | None:
    """None if it has gone meanwhile."""
    deadline = time.monotonic() + SETTLES_S
    while (found := _look(path)) is not None and found.condition is Condition.DAMAGED:
        if time.monotonic() > deadline:
            break
        time.sleep(LOOK_EVERY_S)
    return found


def _look(path: Path) -> FoundFile | None:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            return FoundFile(path, Condition.NOT_OURS, 0, note="no regular file")
        if status.st_uid != os.geteuid():
            return FoundFile(path, Condition.NOT_OURS, status.st_size, note=f"of uid {status.st_uid}")
        with open(path, "rb", buffering=0, opener=_unfollowed) as file:
            page = file.read(PAGE_BYTES)
            num_bytes = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        return FoundFile(path, Condition.NOT_OURS, 0, note=f"cannot be read ({error.strerror})")
    return _judge(path, num_bytes, SwapHeader.unpack(page))


def _unfollowed(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _judge(path: Path, num_bytes: int, header: SwapHeader | None) -> FoundFile:
    if header is None:
        return FoundFile(path, Condition.DAMAGED, num_bytes, note="no header that this program wrote")
    if not header.owner.lives():
        condition = Condition.ELSEWHERE if is_elsewhere(path, header) else Condition.LEFT
        return FoundFile(path, condition, num_bytes, header)
    if num_bytes < header.file_bytes:
        note = f"{num_bytes} bytes long, where its daemon has {header.file_bytes}: something has cut it off"
        return FoundFile(path, Condition.DAMAGED, num_bytes, header, note)
    return FoundFile(path, Condition.IN_USE, num_bytes, header)

"""What a sweep has found to be best for a directory's device, kept for the daemon's ``auto``.

One JSON file per machine and user. An entry is found again by the device below the directory, not by the path: the same
drive mounted elsewhere keeps its settings, another drive mounted here does not inherit them.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from io_daemon._native import ENGINES, probe_engine
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH, EngineName, state_dirs
from io_daemon.machine.block_device import device_key
from io_daemon.shared.protocol import PAGE_BYTES

log = logging.getLogger(__name__)

FILE_NAME: Final = "tuning.json"


class Tuning(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineName
    block_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=1 << 30, multiple_of=PAGE_BYTES)]
    queue_depth: Annotated[int, Field(ge=1, le=4096)]


class _Memory(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    devices: dict[str, Tuning] = {}


def remember(directories: Sequence[Path], tuning: Tuning) -> Path:
    """Store it for the devices of these directories; the file that holds it now. Raises OSError."""
    path = state_dirs()[0] / FILE_NAME
    memory = _load(path)
    for directory in directories:
        key = device_key(directory)
        if key is None:
            raise OSError(errno.ENODEV, "no device with a name of its own lies below", str(directory))
        memory.devices[key] = tuning
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(memory.model_dump_json(indent=2) + "\n")
        os.chmod(temporary, 0o644)  # a daemon of another user's may read it
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def recall(directories: Sequence[Path]) -> Tuning | None:
    """What was remembered for these directories' devices; of several different ones the smallest depth, so that no
    device gets more than it was found to want."""
    devices: dict[str, Tuning] = {}
    for state_dir in reversed(state_dirs()):
        devices |= _load(state_dir / FILE_NAME).devices
    found = [devices[key] for directory in directories if (key := device_key(directory)) in devices]
    return min(found, key=lambda tuning: (tuning.queue_depth, tuning.block_bytes), default=None)


class Chosen(NamedTuple):
    """Settings of a daemon with every "auto" resolved. ``engine``: as ``ServeConfig`` has it."""

    engine: str
    block_bytes: int
    queue_depth: int
    note: str | None
    """Where they come from, if a sweep was remembered."""


def choose(directories: Sequence[Path], engine: str, block_bytes: int | None, queue_depth: int | None) -> Chosen:
    """What is not given (``engine`` "auto", None) becomes what a sweep has found best for these directories, else the
    default. The three were found together: if what is given differs from them, or the engine works no more, the
    defaults it is."""
    defaults = Chosen(
        engine,
        BLOCK_BYTES if block_bytes is None else block_bytes,
        QUEUE_DEPTH if queue_depth is None else queue_depth,
        None,
    )
    tuning = recall(directories)
    if tuning is None or not (tuning.engine in ENGINES and probe_engine(tuning.engine) is None):
        return defaults
    found = Chosen(
        f"require:{tuning.engine}",
        tuning.block_bytes,
        tuning.queue_depth,
        f"a sweep of this device found {tuning.engine}, {tuning.block_bytes >> 10} KiB blocks and depth "
        f"{tuning.queue_depth} best",
    )
    agrees = (
        engine in ("auto", found.engine)
        and block_bytes in (None, found.block_bytes)
        and queue_depth in (None, found.queue_depth)
    )
    return found if agrees else defaults


def _load(path: Path) -> _Memory:
    """An absent or unreadable file is an empty memory: it only holds what can be measured again."""
    try:
        return _Memory.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return _Memory()
    except (OSError, ValueError, RecursionError) as error:  # of JSON, of UTF-8, of what the fields may be
        log.warning("%s is not used: %s", path, error)
        return _Memory()

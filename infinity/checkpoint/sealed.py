"""JSON files that say whether they are whole: the text, and a last line with its checksum."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np

from infinity.checkpoint.disk import disk_errors, write_whole
from infinity.errors import CheckpointError
from io_daemon._native import checksum

_MARK: Final = b"\ncrc32c "


def checksum_of(data: bytes | memoryview) -> int:
    """The CRC-32C of ``data``."""
    return checksum(np.frombuffer(data, dtype=np.uint8))


def write_sealed(path: Path, content: object, *, indent: int | None = None) -> int:
    """Write ``content`` as JSON and have it on the disk; the checksum."""
    text = json.dumps(content, indent=indent, separators=None if indent else (",", ":")).encode()
    seal = checksum_of(text)
    write_whole(path, text + _MARK + f"{seal:08x}\n".encode())
    return seal


def read_sealed(path: Path) -> tuple[Any, int]:
    """The content and its checksum. Raises CheckpointError if the file is not what was written."""
    with disk_errors(path, "read"):
        data = path.read_bytes()
    text, mark, seal = data.rpartition(_MARK)
    found = checksum_of(text)
    if not mark or seal.strip() != f"{found:08x}".encode():
        raise CheckpointError(
            path,
            f"is damaged: its checksum is {found:08x}, its last line says {os.fsdecode(seal.strip())[:20]!r}",
            "load another checkpoint, or copy this one anew",
        )
    return json.loads(text), found

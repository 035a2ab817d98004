"""Files that a command will write when its work is done: looked at before it begins."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from io_daemon.errors import ConfigError


def check_output(option: str, path: Path) -> None:
    """Raises ConfigError unless the file that ``option`` names can be written."""
    if (problem := _write_problem(path)) is not None:
        raise ConfigError(option, str(path), f"cannot be written ({problem}): name a file in a directory of yours")


def _write_problem(path: Path) -> str | None:
    # a file takes the place of what has its name: never a device's, or a link's such as /dev/stdout
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is no regular file"
    if path.exists() and not os.access(path, os.W_OK):
        return "no permission"
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # what os.access says of a directory does not hold for root
            return None
    except OSError as error:
        return error.strerror

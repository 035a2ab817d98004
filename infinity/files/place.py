"""The directories and files that users name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from infinity.errors import ConfigError
from io_daemon.config import from_root

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def local_path(key: str, given: object) -> Path:
    """What was given for the argument ``key``, from the root on: who goes on with it later does not follow the process
    to another working directory. Raises ConfigError for what no filesystem of this machine can have."""
    if not isinstance(given, str | os.PathLike) or not isinstance(text := os.fspath(given), str):
        raise ConfigError(key, given, "is a path: write a str or a pathlib.Path")
    if not text or "\0" in text:
        raise ConfigError(key, given, 'is no path: name a directory, "." is the one that this process works in')
    if _URL.match(text):
        raise ConfigError(key, given, "is the address of something elsewhere: name a directory on a mounted filesystem")
    bytes_of_name(key, text)
    return from_root(Path(text), key)


def check_file_name(key: str, given: object) -> None:
    """Raises ConfigError for what is not the name of one file in a directory."""
    if not isinstance(given, str) or given in ("", ".", "..") or "/" in given or "\0" in given:
        raise ConfigError(key, given, "is the name of one file, without its directory; formats: safe_serialization=")
    bytes_of_name(key, given)


def bytes_of_name(key: str, name: str) -> bytes:
    """What the filesystem is told. Raises ConfigError for characters that it cannot be told."""
    try:
        return os.fsencode(name)
    except UnicodeEncodeError as error:
        remedy = f"has characters that are none in {error.encoding}, which names of files are in: set LC_ALL=C.UTF-8"
        raise ConfigError(key, ascii(name), remedy) from error

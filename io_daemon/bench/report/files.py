"""The files that a report is held against or goes to, and what it names: looked at before anything is measured."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from io_daemon.bench.result import Report
from io_daemon.config import first_problem
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.errors import ConfigError


def check_names(directories: Sequence[Path]) -> None:
    """Raises ConfigError unless they are fit for swap files and JSON can name them."""
    for directory in directories:
        try:
            str(directory).encode()
            check_swap_dir(directory)
        except UnicodeEncodeError as error:
            raise ConfigError("directory", os.fsencode(directory), "is no UTF-8, which JSON needs") from error
        except ConfigError as error:
            raise ConfigError("directory", error.value, error.remedy) from error


def check_files(paths: Mapping[str, Path | None]) -> None:
    """Raises ConfigError unless the files, by option, can be written; None is not asked for."""
    for name, path in paths.items():
        if path is None:
            continue
        if (problem := _write_problem(path)) is not None:
            raise ConfigError(name, str(path), f"cannot be written ({problem}): name a file in a directory of yours")
        missing = [module for module in ("matplotlib", "jinja2") if importlib.util.find_spec(module) is None]
        if missing:
            raise ConfigError(name, str(path), f"needs {' and '.join(missing)}: pip install 'infinity[plot]'")


def _write_problem(path: Path) -> str | None:
    # a page takes the place of what has its name: never a device's, or a link's such as /dev/stdout
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return "it is no regular file"
    if path.exists() and not os.access(path, os.W_OK):
        return "no permission"
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # what os.access says of a directory does not hold for root
            return None
    except OSError as error:
        return error.strerror


def load_baseline(path: Path) -> Report:
    try:
        return Report.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ConfigError("baseline", str(path), f"is no report of this version: {first_problem(error)}") from error
    except (OSError, ValueError) as error:
        raise ConfigError("baseline", str(path), f"cannot be read: {error}") from error

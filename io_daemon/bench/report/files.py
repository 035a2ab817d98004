"""The files that a report is held against or goes to, and what it names: looked at before anything is measured."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from io_daemon.bench.result import Report
from io_daemon.command.output_files import check_output
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
        check_output(name, path)
        missing = [module for module in ("matplotlib", "jinja2") if importlib.util.find_spec(module) is None]
        if missing:
            raise ConfigError(name, str(path), f"needs {' and '.join(missing)}: pip install 'infinity[plot]'")


def load_baseline(path: Path) -> Report:
    try:
        return Report.model_validate_json(path.read_text())
    except ValidationError as error:
        problem = first_problem(error)  # without its value, which may be the whole file
        remedy = f"is no report of this version ({problem.key}: {problem.remedy}): write one with --json"
        raise ConfigError("baseline", str(path), remedy) from error
    except (OSError, ValueError) as error:
        raise ConfigError("baseline", str(path), f"cannot be read: {error}") from error

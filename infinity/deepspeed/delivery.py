"""How scripts that say ``import deepspeed`` get infinity: by a directory that is put first on the path, and only so.

The directory lies in the package and on nobody's path. It holds a package ``deepspeed`` of one line, its metadata, in
which Transformers and Accelerate look for the version, and the command ``deepspeed``. A DeepSpeed that is installed
stays as it is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).resolve().parents[1] / "as_deepspeed"
"""Goes on PYTHONPATH."""
COMMANDS: Final = DIRECTORY / "bin"
"""Goes on PATH."""
_DECIDED_AT_IMPORT: Final = ("transformers", "accelerate")
"""Whether there is a DeepSpeed they ask once, when they are imported."""


def install() -> None:
    """From now on ``import deepspeed`` is infinity, in this process: for notebooks, in the first cell.

    Processes that it starts with ``multiprocessing`` follow; others are started with ``infinity as-deepspeed``.

    Raises:
        RuntimeError: a real DeepSpeed is loaded, or Transformers or Accelerate, which have decided already.
    """
    loaded = sys.modules.get("deepspeed")
    if loaded is not None and not is_delivered(getattr(loaded, "__file__", None)):
        raise RuntimeError(
            f"a DeepSpeed is loaded already, from {getattr(loaded, '__file__', 'nowhere')}: call "
            "infinity.deepspeed.install() before anything imports it, or start with `infinity as-deepspeed python`"
        )
    if loaded is None:
        early = [name for name in _DECIDED_AT_IMPORT if name in sys.modules]
        if early:
            raise RuntimeError(
                f"{' and '.join(early)} looked for DeepSpeed when imported: call infinity.deepspeed.install() before, "
                "or start with `infinity as-deepspeed python`"
            )
        sys.path.insert(0, str(DIRECTORY))
        importlib.invalidate_caches()
        importlib.import_module("deepspeed")


def is_delivered(file: str | None) -> bool:
    """Whether a module of this file is the one delivered here."""
    return file is not None and Path(file).resolve().is_relative_to(DIRECTORY)


def scripts_path() -> list[str]:
    """The path of a script that lies in the working directory, started as this process was."""
    return [str(Path.cwd()), *(place for place in sys.path if place)]


@dataclass(frozen=True)
class Found:
    """The DeepSpeed that ``import deepspeed`` would get."""

    file: str
    version: str
    """What its metadata says; empty where there is none, which Transformers and Accelerate take for not installed."""
    ours: bool


def find(path: Sequence[str]) -> Found | None:
    """What a process with this path would get. Imports nothing."""
    spec = PathFinder.find_spec("deepspeed", path)
    if spec is None or spec.origin is None:
        return None
    versions = (each.version for each in distributions(name="deepspeed", path=list(path)))
    return Found(spec.origin, next(versions, ""), is_delivered(spec.origin))

"""Imported by every Python that runs in a slot: the packages come from its copy of the tree, mutated, and not from
wherever they are installed. What the copy lacks (the compiled core, unless it is what is mutated) is found as usual."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class CopyFinder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("infinity", "io_daemon", "tests", "benchmarks"):
            return None
        return PathFinder.find_spec(name, path or [os.environ["MUTATION_TREE"]])


sys.meta_path.insert(0, CopyFinder)

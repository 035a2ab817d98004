"""Modules made of the tree of names: ``deepspeed.runtime.zero`` and all others, wherever the tree is rooted.

A module is a table of names that are looked up when they are first asked for; what is not in the table is refused in
words. All of them are packages to Python, so that ``from deepspeed import PipelineModule`` asks the finder, whose
ImportError the user then reads.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from infinity.deepspeed.absent import refusal
from infinity.deepspeed.tree import ALIASES, RUNNABLE, SETTABLE, TREE

OWN: Final = "infinity.deepspeed"
_roots: list[str] = []
"""Packages below which the finder answers."""


def dress(root: str) -> None:
    """Make the loaded package ``root`` the root of a tree: its own names, and modules below it."""
    if root not in _roots:
        _roots.append(root)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _fill(sys.modules[root], root, "")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = next((root for root in _roots if fullname.startswith(f"{root}.")), None)
        if root is None or (root == OWN and _is_own(fullname)):
            return None
        place = fullname[len(root) + 1 :]
        above, _, name = place.rpartition(".")
        if name == "__main__" and above in RUNNABLE:
            return ModuleSpec(fullname, _Main(above))
        if place not in TREE:
            if name in TREE.get(above, ()):
                raise ModuleNotFoundError(f"{fullname} is no module, but a name in {root}.{above}", name=fullname)
            if place in ALIASES:
                problem = f"{fullname} is no module, but another name of {root}.{ALIASES[place]}: import that"
                raise ModuleNotFoundError(problem, name=fullname)
            # no ModuleNotFoundError: of that Python keeps its name alone in `from package import name`
            raise ImportError(refusal(root, above, name), name=fullname)
        return ModuleSpec(fullname, _Loader(root, place), is_package=True)


class _Loader(Loader):
    def __init__(self, root: str, place: str) -> None:
        self._root, self._place = root, place

    def exec_module(self, module: ModuleType) -> None:
        _fill(module, self._root, self._place)


class _Main(Loader):
    """The code of ``python -m deepspeed.launcher.runner`` and its like."""

    def __init__(self, place: str) -> None:
        self._runs = RUNNABLE[place]

    def get_code(self, fullname: str) -> CodeType:
        module, *words = self._runs
        lines = (
            "import runpy, sys",
            f"sys.argv[1:1] = {words!r}",
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)",
        )
        return compile("\n".join(lines), f"<{fullname}>", "exec")


_finder = _Finder()


def _is_own(fullname: str) -> bool:
    """Whether a file of infinity's stands behind the name, which Python finds by itself."""
    return (Path(__file__).parent / f"{fullname.removeprefix(OWN)[1:]}.py").exists()


class _Settable(ModuleType):
    """A module some of whose names are a module of ours', for reading and for setting; deleted, they are as before."""

    _homes: Mapping[str, str]
    _before: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._homes:
            home, attribute = _home(self._homes[name])
            self._before.setdefault(name, getattr(home, attribute))
            setattr(home, attribute, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._homes:
            home, attribute = _home(self._homes[name])
            setattr(home, attribute, self._before.pop(name, getattr(home, attribute)))
        else:
            super().__delattr__(name)


def _home(of: str) -> tuple[ModuleType, str]:
    module, _, attribute = of.partition(":")
    return importlib.import_module(module), attribute


def _fill(module: ModuleType, root: str, place: str) -> None:
    names, settable = TREE[place], SETTABLE.get(place, {})
    below = {other.rpartition(".")[2] for other in TREE if other and other.rpartition(".")[0] == place}
    aliases = {alias.rpartition(".")[2]: target for alias, target in ALIASES.items() if _above(alias) == place}

    def get(name: str) -> Any:
        if name in settable:
            return getattr(*_home(settable[name]))
        if name in names:
            found: Any = getattr(*_home(names[name]))
        elif name in below:
            found = importlib.import_module(f"{module.__name__}.{name}")
        elif name in aliases:
            found = importlib.import_module(f"{root}.{aliases[name]}")
        elif name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        else:
            raise AttributeError(refusal(root, place, name))
        vars(module)[name] = found
        return found

    def known() -> list[str]:
        return sorted({*vars(module), *names, *settable, *below, *aliases})

    vars(module).update(__getattr__=get, __dir__=known, __all__=sorted(names))
    for name in names:
        if name.startswith("__"):
            get(name)
    if settable:
        vars(module).update(_homes=settable, _before={})
        module.__class__ = _Settable


def _above(place: str) -> str:
    return place.rpartition(".")[0]

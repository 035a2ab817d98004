"""What a differential case is, and how one becomes JSON. Imports nothing of infinity: a real DeepSpeed runs it, too."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch

Program = Callable[[Path], Any]
RELATIVE: Final = 1e-6
"""What fp32 keeps over some steps. Sums near one cancel to small numbers, which kernels of another instruction set
round otherwise by as much: so it is the absolute bound as well, unless a case says how small its numbers are."""
_ERRORS: Final = (AssertionError, AttributeError, KeyError, TypeError, ValueError, RuntimeError)
"""Classes by which scripts catch: what one side raises the other must raise as the same."""


@dataclass(frozen=True)
class Case:
    """A program of some lines with what it is called, how many ranks run it, and how close floats must be."""

    name: str
    program: Program
    ranks: int
    relative: float
    absolute: float


CASES: Final[dict[str, Case]] = {}


def case(ranks: int = 1, relative: float = RELATIVE, absolute: float | None = None) -> Callable[[Program], Program]:
    """Register a program. It gets an empty directory that its ranks share, and returns what DeepSpeed's must, too."""

    def register(program: Program) -> Program:
        name = f"{program.__module__.rpartition('.')[2]}.{program.__name__}"
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name, program, ranks, relative, relative if absolute is None else absolute)
        return program

    return register


def cases_over(
    values: Mapping[str, Any], ranks: int = 1, relative: float = RELATIVE, absolute: float | None = None
) -> Callable[[Any], Any]:
    """One case for each value, which the program gets behind the directory."""

    def register(program: Any) -> Any:
        for label, value in values.items():

            def bound(directory: Path, value: Any = value) -> Any:
                return program(directory, value)

            bound.__name__, bound.__module__ = f"{program.__name__}[{label}]", program.__module__
            case(ranks, relative, absolute)(bound)
        return program

    return register


def raised(call: Callable[[], Any]) -> str | list[str]:
    """By which of the usual classes the call's error is caught; "nothing" if there is none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (that is what is asked)
        return [kind.__name__ for kind in _ERRORS if isinstance(error, kind)] or ["Exception"]
    return "nothing"


def plain(value: Any) -> Any:
    """As JSON: tensors as lists of numbers, what else is foreign by its name."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, torch.Tensor):
        return plain(value.detach().cpu().double().tolist())
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, torch.Size)):
        return [plain(each) for each in value]
    if isinstance(value, Path):
        return str(value)
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def differences(expected: Any, found: Any, relative: float, absolute: float, place: str = "") -> list[str]:
    """Where ``found`` is not what was expected; empty if it is. Errors may be caught by more classes than expected."""
    if isinstance(expected, bool) or isinstance(found, bool) or isinstance(expected, str) or expected is None:
        return [] if expected == found and type(expected) is type(found) else [f"{place}: {expected!r} != {found!r}"]
    if isinstance(expected, (int, float)):
        if isinstance(found, (int, float)) and math.isclose(expected, found, rel_tol=relative, abs_tol=absolute):
            return []
        return [f"{place}: {expected!r} != {found!r}"]
    if type(expected) is not type(found):
        return [f"{place}: {expected!r} != {found!r}"]
    if isinstance(expected, dict):
        missing = [
            f"{place}.{key}: only in {'the facts' if key in expected else 'ours'}" for key in expected.keys() ^ found
        ]
        both = [key for key in expected if key in found]
        return missing + [
            line
            for key in both
            for line in differences(expected[key], found[key], relative, absolute, f"{place}.{key}")
        ]
    names = {kind.__name__ for kind in _ERRORS} | {"Exception"}
    if expected and all(isinstance(each, str) and each in names for each in expected):
        if not all(isinstance(each, str) for each in found):
            return [f"{place}: {expected!r} != {found!r}"]
        lacking = set(expected) - set(found) - {"Exception"}
        return [f"{place}: raises {found}, not as {sorted(lacking)}"] if lacking else []
    if len(expected) != len(found):
        return [f"{place}: {len(expected)} entries, found {len(found)}: {expected!r} != {found!r}"]
    pairs = enumerate(zip(expected, found, strict=True))
    return [
        line
        for number, (each, other) in pairs
        for line in differences(each, other, relative, absolute, f"{place}[{number}]")
    ]

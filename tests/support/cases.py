"""Named scripts and the settings under which each is judged."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, overload
from zlib import crc32

import pytest

from tests.support.judge import Script
from tests.support.world import Setting

EACH = Setting(thresholds="each")
GROUPED = Setting(thresholds="grouped")
DEFAULT = Setting(thresholds="default")
EACH_BF16 = Setting(thresholds="each", bf16=True)
GROUPED_BF16 = Setting(thresholds="grouped", bf16=True)
NVME = Setting(thresholds="each", nvme=True)
WHOLE = Setting(stage=0)
STAGE_2 = Setting(stage=2)
STAGE_2_BF16 = Setting(stage=2, bf16=True)
STAGE_2_NVME = Setting(stage=2, nvme=True)
POISON = Setting(thresholds="each", poison=True)

SETTINGS: tuple[Setting, ...] = (EACH, GROUPED, DEFAULT, EACH_BF16)

Must = Literal["either", "equal", "refused"]


@dataclass(frozen=True)
class Case:
    name: str
    script: Script
    settings: tuple[Setting, ...]
    must: Must
    about: str
    by_torch: str
    writes: bool
    slow: bool

    @property
    def summary(self) -> str:
        return (self.script.__doc__ or self.name.replace("_", " ")).strip().splitlines()[0]


class Cases:
    """The cases of one test module: ``@cases`` or ``@cases(must="equal")`` above a script."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.by_name: dict[str, Case] = {}

    @overload
    def __call__(self, script: Script) -> Script: ...

    @overload
    def __call__(
        self,
        *,
        settings: Sequence[Setting] = SETTINGS,
        also: Sequence[Setting] = (),
        must: Must = "either",
        about: str = "",
        by_torch: str = "",
        writes: bool = False,
        slow: bool = False,
    ) -> Callable[[Script], Script]: ...

    def __call__(
        self,
        script: Script | None = None,
        *,
        settings: Sequence[Setting] = SETTINGS,
        also: Sequence[Setting] = (),
        must: Must = "either",
        about: str = "",
        by_torch: str = "",
        writes: bool = False,
        slow: bool = False,
    ) -> Script | Callable[[Script], Script]:
        """Register a script.

        Args:
            settings: under which it is judged; ``also`` are added to the usual ones.
            must: "equal" where a refusal would be a failure, too; "refused" where going on would be.
            about: what a refusal must say instead of naming a parameter or a module of the model.
            by_torch: torch's own words, where it refuses before we could.
            writes: the script itself writes to weights, so a refusal need not find them as they were.
            slow: `make test` leaves it out.
        """

        def register(function: Script) -> Script:
            name = function.__name__
            if name in self.by_name:
                raise ValueError(f"two cases are called {name}")
            self.by_name[name] = Case(name, function, (*settings, *also), must, about, by_torch, writes, slow)
            return function

        return register if script is None else register(script)

    def parametrized(self) -> pytest.MarkDecorator:
        """The decorator of the module's one test function, which takes ``case`` and ``judged``.

        Every case is judged under one of its settings in which weights come and go, if it has any: which one, its name
        decides, so that a file meets each. The others are slow tests of their own.
        """
        parameters = []
        for case in self.by_name.values():
            chosen_from = [each for each in case.settings if each.reshards] or case.settings
            at = case.settings.index(chosen_from[crc32(case.name.encode()) % len(chosen_from)])
            first, others = (case.settings[at],), (*case.settings[:at], *case.settings[at + 1 :])
            marks = [pytest.mark.slow] if case.slow else []
            parameters.append(pytest.param(replace(case, settings=first), id=case.name, marks=marks))
            if others:
                slow = replace(case, settings=others)
                parameters.append(pytest.param(slow, id=f"{case.name}-more", marks=pytest.mark.slow))
        return pytest.mark.parametrize("case", parameters)


def cases_of(module: str) -> Cases:
    """The ``Cases`` of a module, which calls its instance ``cases``."""
    found: Cases = importlib.import_module(module).cases
    return found

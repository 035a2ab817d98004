"""Whether what a refusal tells its reader to call is there."""

from __future__ import annotations

import builtins
import re
from typing import Any, Final

import torch
from torch import nn

import infinity

CALL: Final = re.compile(r"(?<![\w.])((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)\(")
NO_REMEDY: Final = {"forward", "Error"}
"""What the user's own classes have, and the \"Error(s)\" that torch counts."""


def unknown_calls(words: str, engine: Any) -> list[str]:
    """The calls that ``words`` names as ``name(``, and that neither the engine has nor its optimizer, its schedule, its
    model, a parameter, infinity or torch."""
    model = engine.module
    homes = {
        "engine": engine,
        "Engine": engine,  # DeepSpeed's words for it
        "model": model,
        "optimizer": engine.optimizer,
        "param": nn.Parameter(),
        "infinity": infinity,
        "torch": torch,
    }
    bare = [*homes.values(), infinity.zero, infinity.utils, infinity.checkpointing, builtins]
    found = []
    for call in CALL.findall(words):
        first, *rest = call.split(".")
        if not rest and any(_has(home, [first]) for home in bare):
            continue
        if rest and first in homes and _has(homes[first], rest):
            continue
        if call not in NO_REMEDY:
            found.append(call)
    return found


def _has(home: Any, path: list[str]) -> bool:
    for name in path:
        if isinstance(home, dict):
            return name in home
        if not hasattr(home, name):
            return False
        home = getattr(home, name)
    return True

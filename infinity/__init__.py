"""Train models far larger than memory: ZeRO stage 3 whose state lives on NVMe, bit-exact, inside a hard budget."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinity import checkpointing, utils, zero
    from infinity.engine import Engine
    from infinity.entry import initialize
    from infinity.pretrained import load_pretrained
    from infinity.weights.init_context import Init

__all__ = ["Engine", "Init", "checkpointing", "initialize", "load_pretrained", "utils", "zero"]
__version__ = "0.1.0"

_HOMES = {
    "Engine": "infinity.engine",
    "Init": "infinity.weights.init_context",
    "initialize": "infinity.entry",
    "load_pretrained": "infinity.pretrained",
}


def __getattr__(name: str) -> Any:
    """Imported on first use, so that the command line answers before torch is loaded."""
    if name in ("checkpointing", "utils", "zero"):
        return importlib.import_module(f"infinity.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module(_HOMES[name]), name)
    return value

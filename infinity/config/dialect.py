"""Every key of the DeepSpeed dialect, in exactly one class: works, subsumed or refused.

The only place that knows which keys exist. The parser checks a user's JSON against it, ``infinity config keys`` and
``schema`` print it, and tests hold it against the fields of ``sections.py`` and against what the parser does.
"""

from __future__ import annotations

from infinity.config.keys import io, others, training, zero
from infinity.config.keys.key import Key, Shape, Standing

__all__ = ["BY_PATH", "KEYS", "SECTIONS", "Key", "Shape", "Standing"]

KEYS: tuple[Key, ...] = tuple(key for part in (training, zero, io, others) for table in part.TABLES for key in table)
BY_PATH: dict[str, Key] = {key.path: key for key in KEYS}
if len(BY_PATH) != len(KEYS):
    raise ImportError("a key stands twice in the dialect")
SECTIONS: frozenset[str] = frozenset(
    ".".join(parts[:depth]) for key in KEYS for parts in [key.path.split(".")] for depth in range(1, len(parts))
)
"""Paths that hold other keys."""

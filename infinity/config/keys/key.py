"""What is known about one key of the dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Standing(Enum):
    WORKS = "works"
    SUBSUMED = "subsumed"
    """Accepted: the engine always does so, or has no such limit."""
    REFUSED = "refused"
    """A ConfigError, but for the values that switch it off."""


Shape = Literal["boolean", "whole number", "number", "string", "list", "object", "any"]
Auto = Literal["refused", "default", "value"]


@dataclass(frozen=True, kw_only=True)
class Key:
    path: str
    """Dotted, from the top of the JSON."""
    standing: Standing
    note: str
    """What it does, or why it is subsumed or refused."""
    remedy: str = ""
    """What to write instead of a refused value."""
    accepts: tuple[object, ...] | None = None
    """The only values that pass; None = no restriction."""
    shape: Shape = "any"
    """Checked here for subsumed keys only: fields that work are checked by their section's class."""
    off: tuple[object, ...] = (False,)
    """The values of ``switch`` that switch the section off."""
    switch: str = ""
    """For a refused section: the key inside it that turns it on. Where it is off the section passes, whatever else
    it holds; where it is absent the section may hold nothing."""
    auto: Auto = "refused"
    """What "auto" means: an error, the key's default, or a value like any other."""

    @property
    def switched_off(self) -> str:
        """What a refused section may say to pass."""
        return f"{self.switch}: {json.dumps(self.off[0])}"


def works(
    path: str,
    note: str,
    *,
    accepts: tuple[object, ...] | None = None,
    remedy: str = "",
    auto: Auto = "refused",
) -> Key:
    return Key(path=path, standing=Standing.WORKS, note=note, accepts=accepts, remedy=remedy, auto=auto)


def subsumed(path: str, shape: Shape, why: str, *, accepts: tuple[object, ...] | None = None, remedy: str = "") -> Key:
    return Key(
        path=path, standing=Standing.SUBSUMED, note=why, shape=shape, accepts=accepts, remedy=remedy, auto="default"
    )


def refused(
    path: str,
    why: str,
    remedy: str,
    *,
    accepts: tuple[object, ...] = (),
    switch: str = "",
    off: tuple[object, ...] = (False,),
) -> Key:
    return Key(path=path, standing=Standing.REFUSED, note=why, remedy=remedy, accepts=accepts, switch=switch, off=off)

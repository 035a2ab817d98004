"""Local variables of the libraries that call: what users tell Accelerate and Transformers, and these pass on to nobody.

They are found by the names of a module and of a function in it. Where a library has other names by then nothing is
found, and nothing is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

_FRAMES_MAX: Final = 8
"""How far up the caller may be: between stand wrappers, of theirs and of ours."""


def locals_of(module: str, function: str) -> Mapping[str, Any]:
    """The local variables of the nearest caller that is this function; nothing if it is not among the nearest ones."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        above = frame.f_back
        if above is None:
            break
        frame = above
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == module:
            return dict(frame.f_locals)
    return {}

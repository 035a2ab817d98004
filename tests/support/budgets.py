"""Host budgets for engines of tests: one in which everything stays, and the smallest that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from infinity.errors import BudgetError

ROOM_BYTES: Final = 64 << 20


def smallest_budget_bytes(initialized: Callable[[int], Any]) -> int | None:
    """What the error for a budget of one page names as the smallest that works; None where that page is enough.

    Args:
        initialized: an engine with the budget, in bytes.
    """
    try:
        engine = initialized(4096)
    except BudgetError as error:
        return error.smallest_bytes
    engine.destroy()
    return None

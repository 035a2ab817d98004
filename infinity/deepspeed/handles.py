"""What DeepSpeed's asynchronous gathers give back: weights here are there on return, and nothing is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MultipleAllGatherHandles:
    """Several handles waited for as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self.handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        """Wait for each."""
        for handle in self.handles:
            handle.wait(handle_dependency=handle_dependency)

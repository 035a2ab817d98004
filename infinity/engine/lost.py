"""What a backward that failed has taken with it, and who is told so: nobody steps without it unaware."""

from __future__ import annotations

from enum import Enum, auto

from infinity.errors import EngineStateError


class Lost(Enum):
    """Gradients that a backward which failed has taken with it: plain torch would go on with some of its own."""

    NOTHING = auto()
    LAST = auto()
    """Its own."""
    EARLIER = auto()
    """Those of the step's micro-batches before it, too."""

    def refuse(self, call: str) -> EngineStateError:
        """The error of a call that would go on without them."""
        if self is Lost.LAST:
            return EngineStateError(
                f"{call}: the last backward failed, and its gradients are gone: call engine.zero_grad() and go on with "
                "the forward of this batch or of another"
            )
        return EngineStateError(
            f"{call}: a backward failed, and with its gradients those of the step's micro-batches before it are gone: "
            "call engine.zero_grad(), and begin the step anew with its first micro-batch"
        )

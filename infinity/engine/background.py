"""What goes on beside training: one piece of work at most, which all ranks ask about between steps."""

from __future__ import annotations

import logging
from typing import Protocol

_log = logging.getLogger(__name__)


class Work(Protocol):
    def is_ready(self, *, wait: bool) -> bool:
        """All ranks call it between steps: whether all can go on with it; with ``wait`` they can. An error is no end of
        it: ranks that diverge are told so, and each still has the work."""

    def go_on(self) -> bool:
        """All ranks call it then: whether it is over now. Raises its error, which ends it."""

    def abandon(self, reason: str) -> None:
        """The engine ends before it is over."""


class Background:
    """``work``: None where there is none."""

    def __init__(self) -> None:
        self.work: Work | None = None

    def advance(self, *, wait: bool = False) -> None:
        """Let the work come to an end, if it can, or ``wait`` for it. Collective. Raises its error, once."""
        while self.work is not None and self.work.is_ready(wait=wait):
            work, self.work = self.work, None
            if not work.go_on():
                self.work = work

    def end(self, *, finish: bool) -> None:
        """The engine ends, and nobody may hear of an error. ``finish``: the work may still be waited for."""
        if self.work is not None and finish:
            try:
                self.advance(wait=True)
            except Exception:  # noqa: BLE001 (the end goes on)
                _log.exception("what went on beside training has failed")
        if self.work is not None:
            _log.error("the engine ends before its last save: call engine.wait_for_checkpoint() before the end")
            self.work.abandon("the engine has ended")
            self.work = None

"""One call at a time, whoever makes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from io_daemon.errors import WorldError


class Turn:
    """Threads wait for their turn. A signal's handler that wants one within the call that it has interrupted, of the
    same thread, is refused: that call could not end before it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._is_taken = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises WorldError in such a handler."""
        with self.lock:
            if self._is_taken:
                raise WorldError(
                    "a signal's handler needs the I/O daemon while the call that it has interrupted does: let the "
                    "handler note that the signal came, and do the rest between two steps"
                )
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False

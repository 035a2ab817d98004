"""Collectives, counted: how often, how many bytes, how long they took this rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from infinity.config.observing import CommsLogger

_log = logging.getLogger(__name__)


@dataclass
class Tally:
    """Collectives of one kind and size."""

    count: int = 0
    seconds: float = 0.0


@dataclass
class CommsLog:
    """What a rank has sent and received. ``section`` None counts nothing."""

    section: CommsLogger | None = None
    tallies: dict[tuple[str, int], Tally] = field(default_factory=dict)
    """What was counted, by operation and bytes of a message."""

    @contextmanager
    def timed(self, operation: str, message_bytes: int, what: str = "") -> Iterator[None]:
        """Around one collective; of an asynchronous one, around its start."""
        section = self.section
        if section is None or not section.enabled or not (section.prof_all or operation in section.prof_ops):
            yield
            return
        start_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - start_s
        tally = self.tallies.setdefault((operation, message_bytes), Tally())
        tally.count += 1
        tally.seconds += seconds
        if section.verbose:
            reason = f" | {what}" if section.debug else ""
            _log.info("%s | %d bytes | %.3f ms%s", operation, message_bytes, 1e3 * seconds, reason)

    def summary(self) -> str:
        """A table of everything counted, one line an operation and size."""
        lines = [f"{'operation':<16} {'bytes':>14} {'count':>8} {'total ms':>12} {'mean ms':>10}"]
        for (operation, message_bytes), tally in sorted(self.tallies.items()):
            total_ms = 1e3 * tally.seconds
            mean_ms = total_ms / tally.count
            lines.append(f"{operation:<16} {message_bytes:>14} {tally.count:>8} {total_ms:>12.2f} {mean_ms:>10.3f}")
        return "\n".join(lines)

"""Lines that a configuration asks for are seen: printed where the script has configured no logging."""

from __future__ import annotations

import logging
import sys
from typing import Final

from infinity.config import Config

OBSERVED: Final = "infinity.observe"
"""The logger of all of them."""


class _Printed(logging.Handler):
    """Prints what no handler of the script's gets."""

    def emit(self, record: logging.LogRecord) -> None:
        if "is_printed" not in vars(record) and not _is_handled(logging.getLogger(record.name)):
            vars(record)["is_printed"] = True  # by a logger below
            # a warning goes where logging would have put it, had nothing asked for lines
            print(self.format(record), file=sys.stderr if record.levelno >= logging.WARNING else None, flush=True)


_PRINTED: Final = _Printed()
_PRINTED.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))


def asks_for_lines(config: Config) -> bool:
    """Whether something in it is there to be read in the log."""
    profiles, logs = config.flops_profiler, config.comms_logger
    return (
        config.dump_state
        or config.wall_clock_breakdown
        or config.memory_breakdown
        or (profiles.enabled and profiles.output_file is None)
        or (logs.enabled and logs.verbose)
        or ("steps_per_print" in config.model_fields_set and config.steps_per_print > 0)
    )


def print_unheard(name: str) -> None:
    """From now on what the logger and those below it say, from level INFO on where it has none, is printed. A handler
    that the script gives to it or to one above, before or later, gets it instead, and before it decides on levels."""
    logger = logging.getLogger(name)
    if _is_handled(logger):
        return
    logger.addHandler(_PRINTED)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def _is_handled(logger: logging.Logger | None) -> bool:
    while logger is not None:
        if any(handler is not _PRINTED for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False

"""The logger that DeepSpeed's users set levels of and write to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch.distributed as dist

from infinity.deepspeed.trainers import refuse_dropped
from infinity.errors import ConfigError


class _TrainersLogger(logging.Logger):
    """Transformers' Trainer sets its level just before it drops what its user passed, and calls nothing else here."""

    def setLevel(self, level: int | str) -> None:  # noqa: N802 (the name is logging's)
        refuse_dropped()
        super().setLevel(level)


logger = logging.getLogger("infinity.deepspeed")
logger.__class__ = _TrainersLogger  # whoever has asked for it by its name keeps it
_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the ranks that are named; without names, or with -1 among them, on all."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else -1
    if not ranks or -1 in ranks or rank in ranks or rank == -1:
        logger.log(level, "[Rank %d] %s", rank, message)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...], level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log as ``log_dist`` does, the first time that it is called so."""
    _log_once(message, tuple(ranks or ()), level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of ``custom_logger``, by default of ``logger``, and of its handlers, from a name such as "info"."""
    level = _LEVELS.get(log_level_str.lower())
    if level is None:
        raise ConfigError("log_level_str", log_level_str, f"one of {', '.join(_LEVELS)}")
    chosen = custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)

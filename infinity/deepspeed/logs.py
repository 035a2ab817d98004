"""The logger that DeepSpeed's users set levels of and write to."""

from __future__ import annotations

import functools
import logging
import sys
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


class LoggerFactory:
    """Makes loggers that write to standard output."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """The logger of that name, with one more handler. Raises ValueError without a name."""
        if name is None:
            raise ValueError("a logger needs a name")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        handler = logging.StreamHandler(stream=sys.stdout)
        handler.setLevel(level)
        handler.setFormatter(
            logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
        )
        made.addHandler(handler)
        return made


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """The message with this rank's number; None where torch.distributed runs and it is not among ``ranks``, which
    [-1] makes all."""
    runs = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if runs else -1
    return None if runs and (not ranks or not (ranks[0] == -1 or rank in ranks)) else f"[Rank {rank}] {message}"


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print what ``get_dist_msg`` gives, whatever the level of logs."""
    if (told := get_dist_msg(message, ranks)) is not None:
        print(told, flush=True)


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log what ``get_dist_msg`` gives."""
    if (told := get_dist_msg(message, ranks)) is not None:
        logger.log(level, "%s", told)


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

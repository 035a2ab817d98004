"""Which schedule a training follows: the configuration's, or what the user passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Scheduler
from infinity.errors import ConfigError
from infinity.update.schedules import build_schedule

Client = LRScheduler | Callable[[Optimizer], LRScheduler]
"""A scheduler on the optimizer that was passed too, or a function from the engine's optimizer to one."""


def choose_schedule(
    section: Scheduler | None, given: Client | None, *, optimizer: Optimizer | None, passed: Optimizer | None
) -> LRScheduler | None:
    """The schedule that ``engine.step()`` steps after each update.

    Args:
        section: the configuration's.
        given: what the user passed instead; anything with a ``step()`` is a scheduler.
        optimizer: the engine's; None where nothing trains.
        passed: the optimizer object that the user passed, whose groups the engine's shares.
    """
    if given is None:
        return build_schedule(section, optimizer) if section is not None and optimizer is not None else None
    if section is not None:
        raise ConfigError("scheduler", section.type, "a scheduler was passed too: remove one")
    if _is_scheduler(given):
        return _checked(given, passed, "pass both, or a function from optimizer to scheduler")
    if not callable(given):
        raise ConfigError("lr_scheduler", given, "must be a scheduler, or a function from optimizer to scheduler")
    if optimizer is None:
        return None
    made = given(optimizer)
    if not _is_scheduler(made):
        raise ConfigError("lr_scheduler", made, "is what the function returned: it must return a scheduler")
    return _checked(made, optimizer, "the function must use the one that it gets")


def _is_scheduler(given: object) -> bool:
    return callable(getattr(given, "step", None)) and not isinstance(given, type)


def _checked(scheduler: Any, optimizer: Optimizer | None, remedy: str) -> LRScheduler:
    """``scheduler`` must drive ``optimizer``, as far as can be seen, and need nothing of ``engine.step()``."""
    name = type(scheduler).__name__
    driven = getattr(scheduler, "optimizer", optimizer)
    if driven is not optimizer:
        raise ConfigError("lr_scheduler", name, f"it drives another optimizer than the one passed: {remedy}")
    needed = [
        parameter.name
        for parameter in inspect.signature(scheduler.step).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    if needed:
        raise ConfigError(
            "lr_scheduler",
            name,
            f"its step() needs {', '.join(needed)}, which engine.step() does not know: do not pass it, and step it "
            "yourself after engine.step(); what it writes into the optimizer's groups holds",
        )
    return cast(LRScheduler, scheduler)

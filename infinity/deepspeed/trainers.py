"""What Transformers' Trainer drops without a word."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from infinity.deepspeed.callers import locals_of
from infinity.errors import ConfigError

_asked: WeakSet[Any] = WeakSet()
"""Trainers that had none of their users': what they have later they have made."""


def refuse_dropped() -> None:
    """The Trainer is about to make an optimizer and a schedule of its arguments, in place of what its user has passed;
    what Accelerate has wrapped is of a ``train()`` before, and its own.

    Raises:
        ConfigError: the Trainer has an optimizer or a schedule.
    """
    found = locals_of("transformers.integrations.deepspeed", "deepspeed_init")
    if not found or found["inference"]:
        return
    trainer = found["trainer"]
    if trainer in _asked:
        return
    for name, method in (("optimizer", "create_optimizer()"), ("lr_scheduler", "create_scheduler()")):
        kind = type(getattr(trainer, name, None))
        if kind is not type(None) and not kind.__module__.startswith("accelerate."):
            raise ConfigError(
                f"trainer.{name}",
                kind.__name__,
                "under a DeepSpeed configuration the Trainer drops it and makes one of its arguments: leave it out of "
                f"Trainer(optimizers=...), and set self.{name} in a subclass whose {method} returns it",
            )
    _asked.add(trainer)

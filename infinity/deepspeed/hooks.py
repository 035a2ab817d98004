"""What scripts take DeepSpeed's hooks off a model through, and put them on again: preference trainers do so around
``generate``, inside ``GatheredParameters``.

infinity's hooks stay on: they leave gathered weights as they lie, and nothing else slows a forward down.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class DeepSpeedZeRoOffload:
    """The hooks of a model at stage 3, of which none can be taken off."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        for param in module.parameters():
            if hasattr(param, "ds_id"):
                vars(param).setdefault("ds_active_sub_modules", set())
        vars(module)["ds_external_parameters"] = _external_parameters

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """They have stayed on."""


def _external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """A module has none: weights are found wherever they are used."""
    return iter(())

"""What scripts take DeepSpeed's hooks off a model through, and put them on again: preference trainers do so around
``generate``, inside ``GatheredParameters``.

What infinity needs stays on: it leaves gathered weights as they lie, and does not slow a forward down. The one hook
that can be taken off notes that a forward has gone by, which is what scripts ask the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from infinity.plan.registered import parameters


class DeepSpeedZeRoOffload:
    """The hooks of a model at stage 3."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self._coordinator = Coordinator()
        for param in parameters(module):
            if hasattr(param, "ds_id"):
                vars(param).setdefault("ds_active_sub_modules", set())
        vars(module)["ds_external_parameters"] = _external_parameters
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put on what was taken off; what the coordinator knew of the order of weights is forgotten."""
        if not self.forward_hooks:
            self._coordinator.has_trace = False
            self.forward_hooks = [module.register_forward_hook(self._coordinator.note)]

    def remove(self) -> None:
        """Take them off the model."""
        for hook in self.forward_hooks:
            hook.remove()
        self.forward_hooks = []

    def get_param_coordinator(self) -> Coordinator:
        """Whom scripts ask whether a forward has gone by."""
        return self._coordinator


class Coordinator:
    """Says whether a forward has gone by since the hooks were put on. The order of weights is the daemon's, and does
    not depend on it."""

    has_trace = False

    def note(self, *_given: object) -> None:
        """A forward has ended."""
        self.has_trace = True

    def is_complete_trace(self) -> bool:
        """Whether one has gone by."""
        return self.has_trace

    def is_invalid_trace(self) -> bool:
        """Whether none has."""
        return not self.has_trace


def _external_parameters() -> Iterator[tuple[str, nn.Parameter]]:
    """A module has none: weights are found wherever they are used."""
    return iter(())

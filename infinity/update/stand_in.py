"""The step of a torch optimizer on other parameters than its own: pieces of them, with their pieces of its state.

A stand-in has the optimizer's class and attributes for one call. So every optimizer's arithmetic is its own code.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from infinity.update.rule import Options

State = dict[str, Any]

_OWN = ("state", "param_groups", "step")
"""Attributes that a stand-in does not share; a schedule puts a ``step`` of its own on the object."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_FUSED_ON: dict[type[Optimizer], tuple[str, ...]] = {
    Adam: ("cpu", "cuda"),
    AdamW: ("cpu", "cuda"),
    SGD: ("cpu", "cuda"),
    Adagrad: ("cpu",),
}


class StandIn:
    def __init__(self, optimizer: Optimizer, *, prefers_fused: bool = False) -> None:
        """``prefers_fused``: torch's fused step is taken where there is one, since no user's code says otherwise."""
        self.of = type(optimizer)
        self._prefers_fused = prefers_fused
        self._attributes = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        self._attributes.update((name, OrderedDict()) for name in _HOOKS)

    def step(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], states: Sequence[State], options: Options
    ) -> list[State]:
        """One step of all ``params`` in place; the states after it, in which tensors are those given or new ones.

        Raises ValueError if the optimizer keeps numbers where each call would change them.
        """
        optimizer = object.__new__(self.of)
        group = {**options, "params": list(params)}
        vars(optimizer).update(
            self._attributes,
            state=defaultdict(dict, zip(params, states, strict=True)),
            param_groups=[group],
        )
        before = self._numbers(optimizer)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        with torch.no_grad():
            self.of.step(optimizer)
        for param in params:
            param.grad = None
        if changed := [name for name, value in self._numbers(optimizer).items() if value != before.get(name)]:
            raise ValueError(f"keeps {', '.join(changed)} for all parameters together")
        return [optimizer.state[param] for param in params]

    def chosen(self, options: Options, device: torch.device) -> Options:
        """``options`` with the fused step chosen, where it is preferred and there is one."""
        if (
            not self._prefers_fused
            or options.get("fused", False) is not None
            or options.get("foreach") is not None
            or options.get("differentiable")
        ):
            return options
        return {**options, "fused": device.type in _FUSED_ON.get(self.of, ()) or None}

    @staticmethod
    def _numbers(optimizer: Optimizer) -> dict[str, float]:
        """Numbers outside ``state``: of the group and of the object."""
        found = {**vars(optimizer), **optimizer.param_groups[0]}
        return {name: value for name, value in found.items() if type(value) in (int, float)}

"""The step of a torch optimizer on other parameters than its own: pieces of them, with their pieces of its state.

A stand-in has the optimizer's class and attributes for one call. So every optimizer's arithmetic is its own code.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.optim.optimizer as torchs
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from infinity.update.rule import Options
from infinity.update.watched import Asked, ById, Watched, glance, noted_in

State = dict[str, Any]


class Stepped(NamedTuple):
    """Parameters of one group: lists of one length."""

    params: Sequence[torch.Tensor]
    grads: Sequence[torch.Tensor]
    states: Sequence[State]


_OWN = ("state", "param_groups", "step")
"""Attributes that a stand-in does not share; a schedule puts a ``step`` of its own on the object."""
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
NOT_OPTIONS = ("params", "param_names")
"""Entries of a group that are not its options: they are of the parameters that it had."""
_KNOWN = ("torch.optim.", "infinity.")
"""Modules whose optimizers look at nothing but elements, or are known to look at more."""
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
        self.is_foreign = not f"{self.of.__module__}.".startswith(_KNOWN)
        """Whether somebody else wrote it, and may look at anything."""
        self.asked = Asked()
        self._optimizer, self._prefers_fused = optimizer, prefers_fused
        self.look()

    def look(self) -> None:
        """It has the attributes that the optimizer has now, until the next look."""
        self._attributes = {name: value for name, value in vars(self._optimizer).items() if name not in _OWN}
        self._attributes.update((name, OrderedDict()) for name in _HOOKS)

    def step(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], states: Sequence[State], options: Options
    ) -> list[State]:
        """One step of all ``params`` in place; the states after it, in which tensors are those given or new ones.

        Raises ValueError if the optimizer keeps numbers where each call would change them, or makes of a parameter
        another of its shape or dtype.
        """
        return self.step_groups([Stepped(params, grads, states)], options)[0]

    def step_groups(self, groups: Sequence[Stepped], options: Options) -> list[list[State]]:
        """One step of several groups, all of the same ``options``, as ``step``."""
        optimizer = object.__new__(self.of)
        options = {name: value for name, value in options.items() if name not in NOT_OPTIONS}
        watched = any(isinstance(param, Watched) for group in groups for param in group.params)
        states: Any = ById() if watched else defaultdict(dict)
        vars(optimizer).update(
            self._attributes,
            state=states,
            param_groups=[{**options, "params": list(group.params)} for group in groups],
        )
        for group in groups:
            for param, grad, state in zip(*group, strict=True):
                states[param], param.grad = state, grad
                if self.is_foreign:
                    param._is_param = True  # an instance of nn.Parameter
        before = self._kept_beside(optimizer)
        memory = [(param, param.detach()) for group in groups for param in group.params] if self.is_foreign else ()
        with torch.no_grad(), _no_hooks_of_all(), noted_in(self.asked):
            self.of.step(optimizer)
        for group in groups:
            for param in group.params:
                param.grad = None
        for param, where in memory:
            _put_back(param, where)
        if changed := [name for name, value in self._kept_beside(optimizer).items() if value != before.get(name)]:
            raise ValueError(f"keeps {', '.join(changed)} for all parameters together: keep it in self.state[param]")
        return [[states[param] for param in group.params] for group in groups]

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

    def _kept_beside(self, optimizer: Optimizer) -> dict[str, object]:
        """Numbers outside ``state``: of the group and of the object. Of somebody's own all that can be seen."""
        own = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        group = {name: value for name, value in optimizer.param_groups[0].items() if name not in NOT_OPTIONS}
        found = {**own, **group}  # a group may count its steps under the name of a method
        if self.is_foreign:
            return {name: glance(value) for name, value in found.items()}
        return {name: value for name, value in found.items() if type(value) in (int, float)}


def _put_back(param: torch.Tensor, where: torch.Tensor) -> None:
    """What an optimizer has put in the place of a parameter's memory (``p.data = ...``) is where that was."""
    with torch.no_grad():
        if (param.shape, param.dtype) != (where.shape, where.dtype):
            raise ValueError(f"makes {param.dtype} {tuple(param.shape)} of {where.dtype} {tuple(where.shape)}")
        if param.data_ptr() != where.data_ptr():
            where.copy_(param)
            param.data = where


@contextmanager
def _no_hooks_of_all() -> Iterator[None]:
    """Hooks that were registered for the steps of all optimizers are not called: a stand-in's is none of the user's."""
    hooks: list[dict[int, Any]] = [torchs._global_optimizer_pre_hooks, torchs._global_optimizer_post_hooks]
    if not any(hooks):
        yield
        return
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)

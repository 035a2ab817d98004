"""The caller's autocast: its cache of casts may not become a second copy of the model, nor change what is summed.

Autocast casts a weight once and keeps the cast until its outermost context ends: all of the model's, in the end. So the
cache is emptied whenever casts of more than ``KEPT_NUMEL`` weights may be in it. A weight that is used before and after
that is cast twice, and its two gradients are summed in fp32 where torch sums them in the narrow dtype: other bits. Such
a use is refused by name. So it is in another call from outside, if the caller's context still lasts: which a cast of a
tensor of our own tells, since the cache ends with the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from infinity.errors import WeightsError
from infinity.plan.registered import children, modules, parameters
from infinity.tiers.inference import outside_inference
from infinity.weights.param import ShardedParam

KEPT_NUMEL: Final = 1 << 20
"""Casts of so many weights are no second copy of a model that is worth sharding."""

NEVER_CAST: Final = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase, nn.Embedding)
"""Modules whose operations take their weights as they are, also under autocast."""


class CastOnce:
    """Watches uses of weights while modules run under autocast, inside one call from outside."""

    def __init__(self, model: nn.Module, params: Iterable[ShardedParam], device: torch.device) -> None:
        self._device = device.type
        self._may_be_on = torch.amp.is_autocast_available(device.type)
        by_id = {id(param.param): param for param in params}
        self._own = {module: [by_id[id(p)] for p in _used_by(module)] for module in modules(model)}
        self._used_at: dict[int, tuple[int, int]] = {}
        """Parameter index -> how often the cache had been emptied when it was used, and of which generation it was."""
        self._num_emptied = 0
        self._numel = 0
        self._watching: Any = None
        self._ours = torch.ones(1, 1, device=device, requires_grad=True)
        self._cast_of_ours: Any = None
        """The node of its cast, as the last call from outside left it in the cache."""

    def begin_call(self, module: nn.Module, *, within_another: bool) -> None:
        """``within_another``: of this thread's or of one that waits for it. Autocast's cache is one for all threads."""
        if not within_another and not self._goes_on():
            self._used_at.clear()
            self._numel = 0
        if self.watch():
            self._note(module, ())  # a hook that is registered in its call does not see it

    def watch(self) -> bool:
        """Whether autocast is on and casts are kept, from now on watched until the call from outside ends."""
        if not (self._is_on and torch.is_autocast_cache_enabled()):
            return False
        if self._watching is None:
            self._watching = register_module_forward_pre_hook(self._note)
        return True

    def end_call(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None
        if torch._C._current_graph_task_id() == -1:  # what checkpointing recomputes has a context of its own
            self._cast_of_ours = self._cast() if self._is_on else None

    def _goes_on(self) -> bool:
        """Whether the caller is in the same outermost context as at the end of the last call from outside."""
        nesting = torch.autocast_increment_nesting() - 1
        torch.autocast_decrement_nesting()
        if nesting == 0:
            return False
        return not self._is_on or self._cast_of_ours is self._cast()

    def _cast(self) -> Any:
        """The node of the cast of our own tensor: the same as long as it is in the cache."""
        with (
            _disable_current_modes(),
            outside_inference(),
            torch.enable_grad(),
            saved_tensors_hooks(lambda saved: saved, lambda saved: saved),  # the user's own see nothing of it
        ):
            product = torch.mm(self._ours, self._ours)
        return None if product.grad_fn is None else product.grad_fn.next_functions[0][0]

    def release(self, numel: int) -> None:
        """A call has given up so many weights."""
        if self._is_on:
            self._numel += numel
            if self._numel > KEPT_NUMEL:
                self.empty()

    def empty(self) -> None:
        """Nothing may be kept."""
        if self._is_on:
            torch.clear_autocast_cache()
            self._num_emptied += 1
            self._numel = 0

    def use(self, params: Iterable[ShardedParam]) -> None:
        """Raises WeightsError for a parameter whose cast was there, and is there no more. (Without gradients a second
        cast is as good as the first.)"""
        if self._watching is None:
            return
        for param in params:
            now = (self._num_emptied, param.generation)
            if (
                self._used_at.setdefault(param.index, now) != now
                and param.dtype is torch.float32
                and torch.is_grad_enabled()
            ):
                raise WeightsError(
                    param.name,
                    "is used in two calls of modules under autocast: torch would cast it once, and sum its gradients "
                    "in the narrow dtype",
                    'write "bf16": {"enabled": true} instead of autocast, or call '
                    "torch.set_autocast_cache_enabled(False)",
                )

    def _note(self, module: nn.Module, _args: Any) -> None:
        self.use(self._own.get(module, ()))

    @property
    def _is_on(self) -> bool:
        return self._may_be_on and torch.is_autocast_enabled(self._device)


def _used_by(module: nn.Module) -> list[nn.Parameter]:
    """What a call of the module may cast: its own parameters, and those of children that are never called."""
    if isinstance(module, NEVER_CAST):
        return []
    # attention uses the weights of its output's projection without calling it
    found = list(parameters(module, recurse=isinstance(module, nn.MultiheadAttention)))
    for child in children(module):
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            found += _used_by(child)
    return found

"""The caller's autocast: its cache of casts may not become a second copy of the model, nor change what is summed.

Autocast casts a weight once and keeps the cast until its outermost context ends: all of the model's, in the end. So the
cache is emptied whenever a call gives up weights. Then a weight used in two calls of modules is cast twice, and its two
gradients are summed in fp32 where torch sums them in the narrow dtype: other bits. Such a use is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from infinity.errors import WeightsError
from infinity.weights.param import ShardedParam


class CastOnce:
    """Watches calls of modules while one from outside runs under autocast."""

    def __init__(self, model: nn.Module, params: Iterable[ShardedParam], device: torch.device) -> None:
        self._device = device.type
        self._may_be_on = torch.amp.is_autocast_available(device.type)
        by_id = {id(param.param): param for param in params}
        self._own = {
            # attention uses the weights of its output's projection without calling it
            module: [by_id[id(p)] for p in module.parameters(recurse=isinstance(module, nn.MultiheadAttention))]
            for module in model.modules()
        }
        self._seen: set[int] = set()
        self._watching: Any = None

    def begin_call(self, module: nn.Module) -> None:
        self._seen.clear()
        in_backward = torch._C._current_graph_task_id() != -1
        if self._is_on and not in_backward and torch.is_grad_enabled() and torch.is_autocast_cache_enabled():
            self._note(module, ())  # a hook that is registered in its call does not see it
            self._watching = register_module_forward_pre_hook(self._note)

    def end_call(self) -> None:
        if self._watching is not None:
            self._watching.remove()
            self._watching = None
        self.empty()

    def empty(self) -> None:
        """A call has given up weights."""
        if self._is_on:
            torch.clear_autocast_cache()

    def use(self, params: Iterable[ShardedParam]) -> None:
        """Raises WeightsError for a parameter that another call of a module has used already."""
        if self._watching is None or torch._C._current_graph_task_id() != -1:
            return
        for param in params:
            if param.index in self._seen and param.dtype is torch.float32:
                raise WeightsError(
                    param.name,
                    "is used in two calls of modules under autocast: torch would cast it once, and sum its gradients "
                    "in the narrow dtype",
                    'write "bf16": {"enabled": true} instead of autocast, or call '
                    "torch.set_autocast_cache_enabled(False)",
                )
            self._seen.add(param.index)

    def _note(self, module: nn.Module, _args: Any) -> None:
        self.use(self._own.get(module, ()))

    @property
    def _is_on(self) -> bool:
        return self._may_be_on and torch.is_autocast_enabled(self._device)

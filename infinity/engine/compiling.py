"""``engine.compile``: torch's compiler over the model's own forward, where its weights stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from infinity.engine.runtime import Runtime
from infinity.errors import EngineStateError


class Compiled:
    """The model's forward, compiled or as it is. The engine's hooks on the model stay outside of the graph."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._own_forward: Callable[..., Any] | None = None
        """A forward that the model's instance, not its class, had before."""
        self.is_compiled = False

    def compile(self, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
        """Compile the forward; where it is compiled already nothing happens.

        Raises EngineStateError where weights come and go: a graph would keep what stands for them.
        """
        self._runtime.refuse_over("compile")
        leaving = [group.name for group in self._runtime.sharded.groups if not group.persistent]
        if leaving:
            raise EngineStateError(
                f"compile(): {leaving[0]} comes and goes, and a compiled graph would keep the placeholders of its "
                "weights: use zero_optimization.stage 2, or a stage3_param_persistence_threshold above the largest "
                "parameter"
            )
        module: nn.Module = self._runtime.module
        if not self.is_compiled:
            self._own_forward = vars(module).get("forward")
            module.forward = torch.compile(module.forward, backend=backend, **options)
            self.is_compiled = True

    def undo(self) -> None:
        """The model has its own forward again."""
        if self.is_compiled:
            del self._runtime.module.forward
            if self._own_forward is not None:
                self._runtime.module.forward = self._own_forward
            self.is_compiled = False

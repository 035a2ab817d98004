"""``loss.backward()`` without the engine: a backward that reaches the engine's outputs is one of its own.

Each output of a forward carries a hook. The first one that a backward reaches opens the phase that ``engine.backward``
opens, and autograd's callback at the end of that backward closes it. Autograd calls nobody where a backward fails; that
is noticed at the engine's next call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from infinity.engine.loop import TrainingLoop
from infinity.errors import EngineStateError
from infinity.states import StepPhase


class UsersBackward:
    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop
        self._open: AbstractContextManager[None] | None = None
        self._is_scaled = False

    def watch(self, outputs: Any) -> None:
        """``outputs``: what a forward returned, nested."""
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale; the next backward is of what this returns."""
        if self._loop.update is None:
            raise EngineStateError("there is no optimizer: pass one to initialize(), or write the section optimizer")
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None):
            raise EngineStateError("scale() takes a scalar with a graph; for others call output.backward(gradient)")
        self._is_scaled = True
        scale = self._loop.update.scale.value
        return loss if scale == 1.0 else loss.float() * scale

    def settle(self) -> None:
        """A backward that failed half-way ends now, as one of the engine's would have: the step is unapplied."""
        if self._open is None or torch._C._current_graph_task_id() != -1:
            return
        error = EngineStateError("a backward that the script ran ended with an error")
        opened, self._open = self._open, None
        try:
            opened.__exit__(type(error), error, None)
        except EngineStateError as raised:
            if raised is not error:
                raise

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        loop = self._loop
        if self._open is None:
            if loop.phases.phase is StepPhase.BACKWARD:
                return None  # the engine's own
            self._begin()
        accumulated = loop.config.gradient_accumulation_steps
        return gradient / accumulated if accumulated > 1 else None

    def _begin(self) -> None:
        loop = self._loop
        if loop.config.io_daemon.update_in_backward:
            raise EngineStateError(
                "io_daemon.update_in_backward needs engine.backward(loss), which knows whether another backward follows"
            )
        scale = None if loop.update is None else loop.update.scale
        if scale is not None and (scale.dynamic or scale.value != 1.0) and not self._is_scaled:
            raise EngineStateError(
                "the loss of fp16 is scaled: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._is_scaled = False
        opened = loop.around_backward("loss.backward()", may_be_last=False)
        opened.__enter__()
        self._open = opened
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

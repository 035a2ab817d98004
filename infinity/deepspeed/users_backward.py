"""``loss.backward()`` without the engine: a backward that reaches its outputs or parameters is one of its own.

Each output of a forward carries a hook. The first one that a backward reaches opens the phase that ``engine.backward``
opens, and autograd's callback at the end of that backward closes it; so does the first gradient of a parameter, where
none of the outputs came before it. ``torch.autograd.grad`` gives parameters nothing, and opens nothing.

The loss is the user's and is not divided by the number of micro-batches, the gradients that arrive at parameters are:
whatever way they took, through one output, through several in a row, or beside all of them. Autograd calls nobody
where a backward fails; that is noticed at the engine's next call.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from infinity.engine.loop import TrainingLoop
from infinity.errors import EngineStateError
from infinity.states import StepPhase
from infinity.weights.param import ShardedParam


class UsersBackward:
    opened: ClassVar[weakref.WeakSet[UsersBackward]] = weakref.WeakSet()
    """Those that a backward has reached since somebody cleared it."""

    def __init__(self, loop: TrainingLoop, *, by_accelerate: bool = False) -> None:
        """``by_accelerate``: it made the engine, and steps it where it has run the backward, nowhere else."""
        self._loop, self._by_accelerate = loop, by_accelerate
        self._open: AbstractContextManager[None] | None = None
        self._end: weakref.ref[_End] | None = None
        """What autograd calls at the end of the backward that runs; dead where none does."""
        self._is_scaled = False
        self._has_run = False
        """Whether the model has since the last of these backwards: another one is of a step of its own, perhaps."""
        self._num_runs = 0
        """Backwards of such since the last update."""
        loop.runtime.meet_backward, loop.settle_backward = self._reach_param, self.settle

    def watch(self, outputs: Any) -> None:
        """``outputs``: what a forward returned, nested."""
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                self._has_run = True
                each.register_hook(self._reach_output)  # type: ignore[no-untyped-call]

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale; the next backward is of what this returns."""
        if self._loop.update is None:
            raise EngineStateError("there is no optimizer: pass one to initialize(), or write the section optimizer")
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None):
            raise EngineStateError("scale() takes a scalar tensor with a graph; for others, tensor.backward(gradient)")
        self._is_scaled = True
        scale = self._loop.update.scale.value
        return loss if scale == 1.0 else loss.float() * scale

    def settle(self) -> None:
        """A backward that failed half-way ends now, as one of the engine's would have: the step is unapplied."""
        if self._open is None or self._awaits_end:
            return
        error = EngineStateError("a backward that the script ran ended with an error")
        opened, self._open = self._open, None
        try:
            opened.__exit__(type(error), error, None)
        except EngineStateError as raised:
            if raised is not error:
                raise

    def _reach_output(self, _gradient: torch.Tensor) -> None:
        self.settle()
        if self._loop.phases.phase is StepPhase.BACKWARD or self._awaits_end:
            return
        self._await_end()
        try:
            reached = any(param.is_reached() for param in self._loop.runtime.sharded.params)
        except RuntimeError:
            return  # torch.autograd.grad with respect to parameters
        if reached:  # else the first gradient opens the phase, if one comes: checkpointing may hide parameters
            self._begin()

    def _reach_param(self, _param: ShardedParam) -> None:
        if not self._awaits_end:
            self._await_end()
        self._begin()

    @property
    def _awaits_end(self) -> bool:
        return self._end is not None and self._end() is not None

    def _await_end(self) -> None:
        end = _End(self)
        self._end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _begin(self) -> None:
        loop = self._loop
        if loop.config.io_daemon.update_in_backward:
            raise EngineStateError(
                "io_daemon.update_in_backward is true: call engine.backward(loss), which knows whether another one "
                "follows, or write false for it"
            )
        scale = None if loop.update is None else loop.update.scale
        if scale is not None and (scale.dynamic or scale.value != 1.0) and not self._is_scaled:
            raise EngineStateError(
                "Loss scaling is required with fp16: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        accumulation = loop.config.gradient_accumulation_steps
        if self._by_accelerate and self._has_run:
            self._refuse_unstepped(accumulation)
        self._is_scaled = False
        opened = loop.around_backward("loss.backward()", may_be_last=False, divisor=accumulation)
        opened.__enter__()
        self._open = opened
        UsersBackward.opened.add(self)

    def _refuse_unstepped(self, accumulation: int) -> None:
        """Raises EngineStateError where the model has run and gone back as often as belongs to one update, and nobody
        has stepped."""
        if self._loop.num_backwards == 0:
            self._num_runs = 0
        if self._num_runs >= accumulation:
            raise EngineStateError(
                f"loss.backward() {self._num_runs} times, and no step: under DeepSpeed Accelerate's optimizer.step() "
                "does nothing, accelerator.backward(loss) steps: write that instead of loss.backward(), or call "
                "model.step() behind each, with gradient_accumulation_steps where one update is of several"
            )
        self._has_run = False
        self._num_runs += 1

    def close(self) -> None:
        """The backward is over."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)


class _End:
    """Belongs to one backward: autograd calls it at the end, or drops it where the backward fails."""

    def __init__(self, backward: UsersBackward) -> None:
        self._backward = backward

    def __call__(self) -> None:
        self._backward.close()

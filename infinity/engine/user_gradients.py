"""``param.grad`` between passes: what a user may put there, and what only the engine has.

Autograd's gradients are taken as they appear, so that ``param.grad`` is empty after a backward; asking for it is
refused, since None would be wrong. Where the engine has none, a user may put one, which is the user's until a step;
also before there is an engine.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, NoReturn

import torch
from torch import nn

from infinity.engine.phases import Phases
from infinity.states import StepPhase
from infinity.update.reducer import Reducer
from infinity.weights import access
from infinity.weights.owners import known_owner_of
from infinity.weights.param import ShardedParam
from infinity.weights.sharded_model import ShardedModel

_ZEROING: Final = frozenset(inspect.unwrap(of.zero_grad).__code__ for of in (nn.Module, torch.optim.Optimizer))
_FRAMES_MAX: Final = 6
"""So far up the stack it is looked for: torch's ``zero_grad`` is the fifth or the sixth."""


def _asked_to_zero() -> bool | None:
    """The ``set_to_none`` with which torch's ``zero_grad`` asks, of a module or an optimizer; None: somebody else does.
    It finds no gradient, as the engine has taken it, and so would say nothing."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return None
        if frame.f_code in _ZEROING:
            return bool(frame.f_locals["set_to_none"])
        frame = frame.f_back
    return None


class UserGradients:
    def __init__(self, reducer: Reducer, sharded: ShardedModel, phases: Phases) -> None:
        self._reducer, self._group_of, self._phases = reducer, sharded.group_of, phases
        self._put: dict[int, ShardedParam] = {}
        self.forget: Callable[[ShardedParam], None] = lambda _param: None
        """Takes a parameter's gradient out of the running step."""
        self.note_zeroed: Callable[..., None] = lambda _index, *, set_to_none: None
        """Hears of ``zero_grad`` of the model or of the user's optimizer: of each parameter without a gradient."""
        given, sharded.given_gradients = sharded.given_gradients, {}
        for index, gradient in given.items():
            param = sharded.params[index]
            self.set(param, gradient.to(param.param.device, param.dtype))

    def get(self, param: ShardedParam) -> torch.Tensor | None:
        is_described = torch._guards.TracingContext.try_get() is not None  # by a compiler, which looks at all there is
        is_taken = not is_described and self._is_taken(param)
        gradient = access.own_gradient(param.param)
        set_to_none = _asked_to_zero() if is_taken or gradient is None else None
        if is_taken:
            self._take_back(param, may=set_to_none is not None)
        if set_to_none is not None:
            self.note_zeroed(param.index, set_to_none=set_to_none)
        return gradient

    def set(self, param: ShardedParam, gradient: torch.Tensor | None) -> None:
        if self._is_taken(param):
            self._take_back(param, may=gradient is None)
        elif gradient is not None and self._phases.phase is not StepPhase.IDLE:
            self._refuse(param.param)
        if gradient is None:
            access.drop_gradient(param.param)
            self.note_zeroed(param.index, set_to_none=True)
        else:
            access.put_gradient(param.param, gradient)
            self._put[param.index] = param

    def take(self) -> None:
        """What was put belongs to the step: as the gradients of a backward whose reduction was put off."""
        put, self._put = self._put, {}
        for index, param in put.items():
            if access.own_gradient(param.param) is not None:
                self._reducer.take_put(self._group_of[index], param)

    def drop(self) -> None:
        """``zero_grad``: what was put is gone."""
        put, self._put = self._put, {}
        for param in put.values():
            access.drop_gradient(param.param)

    def _take_back(self, param: ShardedParam, *, may: bool) -> None:
        """What the engine has is dropped between passes, where the user wants that; nothing else is done to it here."""
        if not may or self._phases.phase is not StepPhase.IDLE:
            self._refuse(param.param)
        self.forget(param)

    def _is_taken(self, param: ShardedParam) -> bool:
        return self._reducer.holds(param.index) or self._group_of[param.index].has_gradient_of(param)

    @staticmethod
    def _refuse(param: nn.Parameter) -> NoReturn:
        known_owner_of(param).refuse(
            param,
            "has its gradient in the engine's store, where param.grad does not reach",
            "read it by infinity.utils.safe_get_full_grad(param), replace it by safe_set_full_grad(), clip by "
            '"gradient_clipping" in the config or engine.clip_grad_norm_(), clear by engine.zero_grad(); its norm is '
            "engine.get_global_grad_norm()",
        )

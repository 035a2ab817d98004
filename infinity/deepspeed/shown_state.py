"""Masters, states and gradients where DeepSpeed's optimizers have them: this rank's part, read from the engine's store.

Scripts compare and log them. What they get are copies, and a write to one is refused by the parameter's name as soon as
anything stands on it (``weights/shard_copies.py``); the names that write are ``safe_set_full_fp32_param`` and the like.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.engine import Engine
from infinity.engine.runtime import Runtime
from infinity.errors import EngineStateError
from infinity.states import StepPhase
from infinity.update.optimizer import ShardedOptimizer
from infinity.update.rule import numbers_of
from infinity.update.stored_state import FixedState
from infinity.weights import shard_copies
from io_daemon.shared.protocol import ObjectKind


class ShownState(FixedState):
    """``optimizer.state``: for each parameter that was stepped and of which this rank has a part its states by name, to
    be read. It cannot be changed."""

    def __init__(self, optimizer: ShardedOptimizer, engine: Engine) -> None:
        super().__init__()
        self._optimizer, self._engine = weakref.ref(optimizer), weakref.ref(engine)
        self._groups = WeakIdKeyDictionary()
        """The param group of a flat part that was handed out."""

    def masters(self) -> list[torch.Tensor]:
        """For each param group this rank's part of the fp32 weights, 1-D; a key of the states of all of them."""
        parts = []
        for number, params in enumerate(self._params()):
            parts.append(self._flat(params, None, "the fp32 partition of its group"))
            self._groups[parts[-1]] = number
        return parts

    def gradients(self) -> dict[int, list[torch.Tensor]]:
        """By the number of each param group this rank's part of its parameters' gradients, 1-D, fp32; zeros where a
        parameter has none. Empty before the step's first backward. Collective where ranks reduce by steps."""
        runtime = self._runtime()
        runtime.reducer.settle()
        if not runtime.reducer.has_any:
            return {}
        groups = enumerate(self._params())
        return {number: [_gradient(runtime, param) for param in params] for number, params in groups}

    def __getitem__(self, key: Any) -> FixedState:
        runtime, rule = self._runtime(), self._of().rule
        is_group = key in self._groups
        params: list[nn.Parameter] = self._params()[self._groups[key]] if is_group else [key]
        params = [param for param in params if self._has_part(param)]
        if not params:
            raise KeyError("this rank has no part of it")
        histories = {self._history(param) for param in params}
        if histories == {None}:
            return FixedState()  # as torch's is before the first step
        if len(histories) > 1:
            raise EngineStateError(
                "parameters of the group were stepped different numbers of times: read optimizer.state[param] of each"
            )
        shown: dict[str, Any] = {
            label: self._flat(params, label, f"optimizer.state[…][{label!r}]") for label in rule.states
        }
        if not is_group and not runtime.sharded.policy.shards_states:
            shown = {label: runtime.sharded_param(key).unflattened(values) for label, values in shown.items()}
        (history,) = histories
        for label, number in numbers_of(rule.numbers, history or (), torch.device("cpu")).items():
            shown[label] = number
            if isinstance(number, torch.Tensor):
                copy = shard_copies.hand_out(runtime, params[0], number.view(1), f"optimizer.state[…][{label!r}]")
                shown[label] = copy.view(number.shape)
        return FixedState(shown)

    @property
    def _is_over(self) -> bool:
        """Whether nobody holds the engine any more: there are no states then."""
        return self._engine() is None or self._optimizer() is None

    def __iter__(self) -> Iterator[nn.Parameter]:
        if self._is_over:
            return iter(())
        return (param for group in self._params() for param in group if self._history(param) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        return not self._is_over and self._history(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        """The states of the parameter; ``default`` if there are none, as before its first step."""
        if key not in self:
            return default
        return self[key]

    keys: Any = Mapping.keys
    values: Any = Mapping.values
    items: Any = Mapping.items

    def _of(self) -> ShardedOptimizer:
        optimizer = self._optimizer()
        if optimizer is None:
            raise EngineStateError("the state's optimizer is gone")
        return optimizer

    def _params(self) -> list[list[nn.Parameter]]:
        return [list(group["params"]) for group in self._of().param_groups]

    def _runtime(self) -> Runtime:
        engine = self._engine()
        if engine is None:
            raise EngineStateError("the state's engine is gone")
        engine._runtime.refuse_over("reading the optimizer's state")
        engine._runtime.states.check_phase("read", StepPhase.IDLE, StepPhase.FORWARD)
        return engine._runtime

    def _history(self, param: Any) -> tuple[float, ...] | None:
        """What was counted of the parameter; None before its first step, and of what this rank has no part."""
        runtime, engine = self._runtime(), self._engine()
        update = engine._loop.update if engine is not None else None
        if update is None or not self._has_part(param):
            return None
        return update.histories[runtime.sharded_param(param).index]

    def _has_part(self, param: Any) -> bool:
        """False of what is none of the model's, too."""
        runtime = self._runtime()
        try:
            return runtime.io.own_range(runtime.sharded_param(param))[1] > 0
        except KeyError:
            return False

    def _flat(self, params: Sequence[nn.Parameter], state: str | None, through: str) -> torch.Tensor:
        """This rank's part of ``state`` of the parameters, of the masters if it is None, in one copy."""
        runtime = self._runtime()
        if not params:
            return torch.empty(0, device="cpu")
        kind = runtime.states.kind(state)
        parts = [runtime.states.read(runtime.sharded_param(param), kind, whole=False) for param in params]
        flat = torch.cat([torch.empty(0, device="cpu"), *(part for part in parts if part is not None)])
        return shard_copies.hand_out(runtime, params[0], flat, through)


def _gradient(runtime: Runtime, param: nn.Parameter) -> torch.Tensor:
    sharded = runtime.sharded_param(param)
    values = runtime.states.read(sharded, ObjectKind.GRAD, whole=False)
    if values is None:
        values = torch.zeros(runtime.io.own_range(sharded)[1], device="cpu")
    return shard_copies.hand_out(runtime, param, values, "optimizer.averaged_gradients")

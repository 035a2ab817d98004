"""What stands at ``optimizer.state``, where torch has tensors by parameter: the state is in the engine's store."""

from __future__ import annotations

from collections import defaultdict
from types import MethodType
from typing import Any, NoReturn

import torch

from infinity.errors import EngineStateError

_BEFORE = "_infinity_before"
REMEDY = (
    "read it with infinity.utils.safe_get_full_optimizer_state(param, name), write it with "
    "safe_set_full_optimizer_state, keep it with engine.save_checkpoint()"
)


def _refuse(_state: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise EngineStateError(f"the optimizer's state is in the engine's store, not in optimizer.state: {REMEDY}")


_refused: Any = _refuse


class FixedState(dict[Any, Any]):
    """Refuses to be changed, copied or saved: what is done to it would be done to nothing."""

    __setitem__ = __delitem__ = pop = popitem = setdefault = update = clear = copy = _refused
    __copy__ = __deepcopy__ = __reduce_ex__ = __eq__ = __or__ = __ior__ = _refused

    def __repr__(self) -> str:
        return "<in the engine's store>"


class StoredState(FixedState):
    """Refuses to be read, too."""

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = keys = values = items = get = _refused


def retire(optimizer: torch.optim.Optimizer) -> None:
    """The user's own optimizer has been taken over: its groups are shared, what else it had is the engine's."""

    def step(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise EngineStateError(
            f"step() of the {type(optimizer).__name__} that was passed to infinity.initialize(): its gradients and its "
            "state are the engine's: call engine.step(), or step() of the optimizer that initialize() returned"
        )

    def add_param_group(_self: Any, group: dict[str, Any]) -> NoReturn:
        refuse_group(group)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a schedule made before warns
    optimizer.state = StoredState()  # type: ignore[assignment]
    optimizer.__dict__[_BEFORE] = {
        name: optimizer.__dict__.get(name) for name in ("step", "add_param_group", "state_dict")
    }
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    optimizer.state_dict = MethodType(_refuse, optimizer)  # type: ignore[method-assign]


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """Before another engine takes it over: what ``retire`` did is undone."""
    if isinstance(optimizer.state, FixedState):
        optimizer.state = defaultdict(dict)
        for name, method in optimizer.__dict__.pop(_BEFORE).items():
            if method is None:
                delattr(optimizer, name)
            else:  # a schedule's, say, which counts steps
                setattr(optimizer, name, method)


def refuse_group(group: dict[str, Any]) -> NoReturn:
    """A param group that comes after ``initialize`` would not be trained."""
    given = group.get("params", ())
    shapes = [tuple(p.shape) for p in ([given] if isinstance(given, torch.Tensor) else given) if hasattr(p, "shape")]
    raise EngineStateError(
        f"add_param_group() of parameters of shapes {shapes} after infinity.initialize(), which made their shards and "
        "state: give the optimizer all groups before it, with lr 0 for what is to be trained later"
    )

"""What stands at ``optimizer.state``, where torch has tensors by parameter: the state is in the engine's store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from types import MethodType
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch

from infinity.errors import EngineStateError

_BEFORE = "_infinity_before"
_REPLACED = ("step", "add_param_group", "state_dict", "load_state_dict")
REMEDY = (
    "read it with infinity.utils.safe_get_full_optimizer_state(param, name), write it with "
    "safe_set_full_optimizer_state, keep it with engine.save_checkpoint(); where it lies in "
    "memory, begin anew with optimizer.load_state_dict({**optimizer.state_dict(), 'state': {}})"
)


def _refuse(_state: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise EngineStateError(f"the optimizer's state is in the engine's store, not in optimizer.state: {REMEDY}")


_refused: Any = _refuse


class Packing(Protocol):
    """An optimizer's ``state_dict`` and ``load_state_dict`` without their hooks."""

    def pack(self) -> dict[str, Any]:
        """Copies of this rank's states in torch's form."""

    def unpack(self, packed: Mapping[str, Any]) -> None:
        """Take what ``pack`` gave. Raises where it does not fit, and then changes nothing."""


class FixedState(dict[Any, Any]):
    """Refuses to be changed, copied or saved: what is done to it would be done to nothing."""

    __setitem__ = __delitem__ = pop = popitem = setdefault = update = clear = copy = _refused
    __copy__ = __deepcopy__ = __reduce_ex__ = __eq__ = __or__ = __ior__ = _refused

    def __repr__(self) -> str:
        return "<in the engine's store>"


class StoredState(FixedState):
    """Refuses to be read, too."""

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = keys = values = items = get = _refused


def retire(optimizer: torch.optim.Optimizer, successor: Packing) -> None:
    """The user's own optimizer has been taken over: its groups are shared, what else it had is the engine's.

    ``successor``: who has its states now.
    """
    following = ref(successor)

    def step(_self: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise EngineStateError(
            f"step() of the {type(optimizer).__name__} that was passed to infinity.initialize(): its gradients and its "
            "state are the engine's: call engine.step(), or step() of the optimizer that initialize() returned"
        )

    def add_param_group(_self: Any, group: dict[str, Any]) -> NoReturn:
        refuse_group(group)

    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        found = following()
        if found is None or type(self).state_dict is not torch.optim.Optimizer.state_dict:
            _refuse(self)
        return with_dict_hooks(self, found.pack)

    def load_state_dict(self: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        found = following()
        if found is None or type(self).load_state_dict is not torch.optim.Optimizer.load_state_dict:
            refuse_load()
        with_load_hooks(self, state_dict, found.unpack)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # else a schedule made before warns
    optimizer.state = StoredState()  # type: ignore[assignment]
    optimizer.__dict__[_BEFORE] = {name: optimizer.__dict__.get(name) for name in _REPLACED}
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = MethodType(add_param_group, optimizer)  # type: ignore[method-assign]
    optimizer.state_dict = MethodType(state_dict, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(load_state_dict, optimizer)  # type: ignore[method-assign]


def has_step_of_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody has put another ``step`` on the object than its class's, which the engine would not call.

    Torch's schedulers put one there that calls the class's and counts.
    """
    own = vars(optimizer).get("step")
    return own is not None and unwrap(getattr(own, "__func__", own)) is not unwrap(type(optimizer).step)


def check_retired(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Raises EngineStateError if the optimizer was given other groups or a state since ``retire``."""
    same_groups = list(map(id, optimizer.param_groups)) == list(map(id, groups))
    if not (same_groups and isinstance(optimizer.state, FixedState)):
        raise EngineStateError(
            f".{'state' if same_groups else 'param_groups'} of the {type(optimizer).__name__} that was passed to "
            "infinity.initialize() was replaced, which the engine does not see: change the options of its groups, such "
            "as lr, only, and load with engine.load_checkpoint()"
        )


def check_shown(optimizer: torch.optim.Optimizer) -> None:
    """Raises EngineStateError if the engine's own optimizer was given another ``state``, which nobody would read."""
    if not isinstance(optimizer.state, FixedState):
        raise EngineStateError(
            f".state of the engine's optimizer was replaced, and its state is in the engine's store: {REMEDY}"
        )


@contextmanager
def hooks_around_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Call what the user registered to be called before and after its ``step``, as torch does."""
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        if hook(optimizer, (optimizer,), {}) is not None:
            raise EngineStateError(
                "a hook of register_step_pre_hook() gave other arguments for step(), which an engine's has none of: "
                "return None from it"
            )
    yield
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (optimizer,), {})


def with_dict_hooks(optimizer: torch.optim.Optimizer, pack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """``pack()`` between the hooks that were registered for ``state_dict()``, as torch calls them."""
    for before in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        before(optimizer)
    packed = pack()
    for after in list(optimizer._optimizer_state_dict_post_hooks.values()):
        packed = after(optimizer, packed) or packed
    return packed


def with_load_hooks(
    optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], unpack: Callable[[Mapping[str, Any]], None]
) -> None:
    """``unpack(packed)`` between the hooks that were registered for ``load_state_dict()``, as torch calls them."""
    packed = dict(packed)
    for before in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        packed = before(optimizer, packed) or packed
    unpack(packed)
    for after in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        after(optimizer)


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """Before another engine takes it over: what ``retire`` did is undone."""
    if isinstance(optimizer.state, FixedState):
        optimizer.state = defaultdict(dict)
        for name, method in optimizer.__dict__.pop(_BEFORE).items():
            if method is None:
                delattr(optimizer, name)
            else:  # a schedule's, say, which counts steps
                setattr(optimizer, name, method)


def refuse_load() -> NoReturn:
    raise EngineStateError(
        "load_state_dict() of an optimizer whose state is in the engine's store: load what engine.save_checkpoint() "
        "wrote with engine.load_checkpoint(), or write single states with "
        "infinity.utils.safe_set_full_optimizer_state(param, value, name)"
    )


def refuse_group(group: dict[str, Any]) -> NoReturn:
    """A param group that comes after ``initialize`` would not be trained."""
    given = group.get("params", ())
    shapes = [tuple(p.shape) for p in ([given] if isinstance(given, torch.Tensor) else given) if hasattr(p, "shape")]
    raise EngineStateError(
        f"add_param_group() of parameters of shapes {shapes} after infinity.initialize(), which made their shards and "
        "state: give the optimizer all groups before it, with lr 0 for what is to be trained later"
    )

"""What an optimizer that somebody wrote asks of the parameters it steps, beside their elements.

Parts of parameters are given to it in their place: they have no shape, attributes or identity of theirs. So in its dry
run they are told apart by a class that takes notes, and whoever asked for more than elements gets whole parameters, or
is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

DEPTH_MAX: Final = 4
"""How deep attributes of attributes are looked at."""
LENGTH_MAX: Final = 64
"""Parts of one value up to which each is looked at; of more, how many they are."""
_OPAQUE: Final = (type, ModuleType, FunctionType, MethodType, nn.Module)
_tensor: Any = torch.Tensor
_QUESTIONS: Final = ("size", "dim", "ndimension", "numel", "nelement", "stride", "__len__")
_SHAPES: Final = frozenset(
    [_tensor.shape.__get__, _tensor.ndim.__get__, torch.numel, *(getattr(_tensor, name) for name in _QUESTIONS)]
)


@dataclass
class Asked:
    """Notes of one optimizer's dry run."""

    shape: bool = False
    """It looked at shapes, or at something else that parts have not as the whole has it, such as a sum."""
    identity: bool = False
    attributes: set[str] = field(default_factory=set)


_torchs: Any = vars(torch.Tensor)["__torch_function__"].__func__
_noting: Asked | None = None
"""The notes of the optimizer whose step runs."""


@contextmanager
def noted_in(asked: Asked) -> Iterator[None]:
    """What is asked of watched tensors inside is noted there."""
    global _noting  # C++ calls the class below, which has no other way to know
    _noting = asked
    try:
        yield
    finally:
        _noting = None


class Watched(torch.Tensor):
    """A part of a parameter, or what was computed of one; an instance of ``nn.Parameter``, as these are."""

    _is_param = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _noting is not None and func in _SHAPES and _numel(args[0]) > 1:
            _noting.shape = True
        try:
            found = _torchs(cls, func, types, args, kwargs or {})
        except Exception:
            if _noting is not None:
                _noting.shape = True  # who catches it does something else where it succeeds, as on more dimensions
            raise
        if _noting is not None and isinstance(found, torch.Tensor):
            of = [_numel(each) for each in args if isinstance(each, torch.Tensor)]
            _noting.shape |= bool(of) and _numel(found) < max(of)  # of several elements one, as a norm
        return found

    def __getattr__(self, name: str) -> Any:
        if _noting is not None:
            _noting.attributes.add(name)
        raise AttributeError(f"'Parameter' object has no attribute {name!r}")

    def __hash__(self) -> int:
        if _noting is not None:
            _noting.identity = True
        return id(self)


def _numel(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.numel()


class ById(defaultdict[Any, dict[str, Any]]):
    """``optimizer.state`` of tensors whose hash takes notes."""

    def __init__(self) -> None:
        super().__init__(dict)
        self._keys: dict[int, torch.Tensor] = {}

    def __getitem__(self, param: Any) -> dict[str, Any]:
        self._keys[id(param)] = param
        return super().__getitem__(id(param))

    def __setitem__(self, param: Any, state: dict[str, Any]) -> None:
        self._keys[id(param)] = param
        super().__setitem__(id(param), state)

    def __contains__(self, param: object) -> bool:
        return super().__contains__(id(param))

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._keys.values()))

    def get(self, param: Any, default: Any = None) -> Any:
        return super().get(id(param), default)

    def setdefault(self, param: Any, default: Any = None) -> Any:
        self._keys[id(param)] = param
        return super().setdefault(id(param), default)

    def keys(self) -> Any:
        return list(self._keys.values())

    def items(self) -> Any:
        return [(param, self[param]) for param in self._keys.values()]


# What it has beside its state


def glance(value: object, depth: int = DEPTH_MAX) -> object:
    """What shows that a value was changed in place, or by another: numbers and words themselves, of tensors the count
    of writes, of what holds others theirs."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, Mapping | list | tuple) and depth and len(value) <= LENGTH_MAX:
        if isinstance(value, Mapping):
            return tuple((id(key), glance(each, depth - 1)) for key, each in value.items())
        return tuple(glance(each, depth - 1) for each in value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return id(value), len(value)
    if depth and hasattr(value, "__dict__") and not isinstance(value, _OPAQUE):
        return id(value), glance(vars(value), depth - 1)
    return id(value)


def steppers_in(value: object, depth: int = DEPTH_MAX) -> list[str]:
    """The classes of optimizers and schedules that a value holds."""
    if isinstance(value, Optimizer | LRScheduler):
        return [type(value).__name__]
    if not depth:
        return []
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, (torch.Tensor, *_OPAQUE)):
        parts = list(vars(value).values())
    if len(parts) > LENGTH_MAX:
        return []
    return [name for part in parts for name in steppers_in(part, depth - 1)]

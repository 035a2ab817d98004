"""What torch's dispatcher does with an operation that reached a placeholder: it is refused by the parameter's name.

Whatever asks a tensor's class (``access``) has had the weights lent before it comes here. So has a scripted function,
which asks none, and is asked about here. What comes here has not: functions that take tensors as plain data
(``torch.tensor(param)``, ``x.new_tensor(param)``), a node of autograd that kept the parameter itself. Nothing is lent
to them: nobody knows which update's weights they mean. Nor may another tensor take the parameter's memory over: there
is none, and not all that torch does with memory asks anybody (``share_memory_()`` would end the process).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.errors import WeightsError
from infinity.weights import access, owners, placeholder

_watching = threading.Lock()


def _asked(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """What is made of other operations goes on to those: one that asks for size or dtype alone reads nothing."""
    with access.raw():
        answer = operation.decompose(*args, **kwargs)
    if answer is NotImplemented:
        _refuse(operation, args, kwargs)
    return answer


def _refuse(operation: Any, *arguments: Any) -> NoReturn:
    tensors = (leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
    tensor = next(filter(placeholder.is_held_by, tensors))
    _refuse_by_name(
        tensor,
        f"is sharded, and {operation} reads it past Python, where its weights cannot be lent",
        "pass a copy, param.clone(), or do it inside infinity.zero.GatheredParameters(param)",
    )


def _refuse_to_give(taking: torch.Tensor, given: torch.Tensor) -> NoReturn:
    """``taking.data = given``, where one of them is a placeholder."""
    _refuse_by_name(
        given if placeholder.is_held_by(given) else taking,
        "is sharded: another tensor cannot take its memory over (tensor.data = param), which is given back",
        "give it a copy, tensor.data = param.clone()",
    )


def _refuse_by_name(tensor: torch.Tensor, problem: str, remedy: str) -> NoReturn:
    param = access.param_behind(tensor)
    if param is None:
        param = _param_with_memory_of(tensor)
    if param is not None:
        owners.known_owner_of(param).refuse(param, problem, remedy)
    raise WeightsError("a parameter that is no more", problem, remedy)


def _param_with_memory_of(tensor: torch.Tensor) -> nn.Parameter | None:
    memory = placeholder.identity_of(tensor)
    with access.raw():
        for param in owners.owned():
            if placeholder.is_held_by(param) and placeholder.identity_of(param) == memory:
                return param
    return None


def _lending(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """``torchs`` call of something scripted, for which weights are lent: its operations run past Python."""

    def run(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        return torchs(scripted, *args, **kwargs)

    @wraps(torchs)
    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        if any(access.param_behind(leaf) is not None for leaf in tree_leaves((args, kwargs))):
            return access.lend(run, (scripted, *args), kwargs)
        return run(scripted, *args, **kwargs)

    return call


def watch() -> None:
    """From now on placeholders are watched, in every thread, for the process's life."""
    with _watching:  # torch takes one registration, and several threads may make their first engines at once
        _watch()


@cache
def _watch() -> Any:
    make: Any = torch.library.Library
    everything, metadata = make("_", "IMPL"), make("aten", "IMPL")
    scripted: Any = torch._C
    for kind in (scripted.ScriptFunction, scripted.ScriptMethod):
        kind.__call__ = _lending(kind.__call__)
    everything.fallback(_asked, placeholder.KEY)
    metadata.impl("_has_compatible_shallow_copy_type", _refuse_to_give, placeholder.KEY)
    return everything, metadata  # torch would take back what they have registered with them

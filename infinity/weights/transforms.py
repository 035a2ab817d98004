"""What stands between an operation and its kernel: transforms of ``torch.func``, inside which tensors that are made
belong to the transform, and no other is written; and modes, which see every operation and may answer in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_cleared: Any = temporarily_clear_interpreter_stack
_without_a_mode: Any = _pop_mode_temporarily
_modes_of_functions: Any = _get_current_function_mode_stack
PROBLEM: Final = "in a transform of torch.func, which sees no sharded weights"
REMEDY: Final = "keep them whole with zero_optimization.stage 2, or compute the gradient with engine.backward()"


def is_inside() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def modes_of_users(*, of_functions: bool) -> list[str]:
    """The modes that are not torch's, which count or change what operations give, by their classes' names.
    ``of_functions``: also those that see functions of torch, where a backward is one."""
    kinds: list[Any] = [type(mode) for mode in _get_current_dispatch_mode_stack()]
    handlers = [(kind.__name__, kind.__torch_dispatch__.__module__) for kind in kinds]
    if of_functions:
        kinds = [type(mode) for mode in _modes_of_functions()]
        handlers += [(kind.__name__, kind.__torch_function__.__module__) for kind in kinds]
    return [name for name, module in handlers if not module.startswith("torch.")]


def outside() -> AbstractContextManager[Any]:
    """Inside the context it is as if no transform ran, and no mode: for what the engine does on its own between the
    model's operations, as writing to weights and talking to other ranks. A mode that the user has entered is for the
    user's operations: selective checkpointing counts them, and gives a recomputation results by their numbers."""
    if is_inside() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return _outside()
    return nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with ExitStack() as left:
        if is_inside():
            left.enter_context(_cleared())
        left.enter_context(_disable_current_modes())
        while torch._C._len_torch_function_stack():
            left.enter_context(_without_a_mode())
        yield


def apart(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``function`` runs ``outside``."""

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with outside():
            return function(*args, **kwargs)

    return run

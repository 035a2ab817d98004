"""Transforms of ``torch.func``, inside which tensors that are made belong to the transform, and no other is written."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

_cleared: Any = temporarily_clear_interpreter_stack
PROBLEM: Final = "in a transform of torch.func, which sees no sharded weights"
REMEDY: Final = "keep them whole with zero_optimization.stage 2, or compute the gradient with engine.backward()"


def is_inside() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside() -> AbstractContextManager[Any]:
    """Inside the context it is as if no transform ran: for what the engine does on its own between the model's
    operations, as writing to weights and talking to other ranks."""
    return _cleared() if is_inside() else nullcontext()

"""The casts that a model's own code makes of its weights, ``weight.float()``, known by their memory.

Of a cast that an operation saves a note is kept, and backward casts anew (``saved_tensors``). What was written to it
meanwhile would be lost then, and torch counts but a part of that: not what goes through ``cast.detach().data``, an
array or an address. So whoever reaches for the memory of a cast is noticed (``arrays``), and from then on that memory
is kept for backward, as in plain torch. A cast that autocast makes is not known here: nobody has it but autograd.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.multiprocessing import reductions

from infinity.weights import placeholder, transforms

CASTING: Final = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
"""Methods of a parameter that may cast it."""

_storage_reference: Any = reductions.StorageWeakRef


class Cast:
    """What the notes of one cast have in common."""

    __slots__ = ("memory",)

    def __init__(self) -> None:
        self.memory: torch.UntypedStorage | None = None
        """The cast's own, once somebody has reached for it; None: cast anew."""


_known: dict[int, tuple[Any, Cast | None]] = {}
"""A weak reference to the memory, by its identity, and what is noted of the cast; None: somebody has reached for it."""


def noted(made: Any) -> Any:
    """What a parameter's method has made. If that is a cast, it is known from now on."""
    if isinstance(made, torch.Tensor) and not transforms.is_inside() and source_of(made) is not None:
        _forget_the_gone()
        memory = placeholder.storage_of(made)
        _known[memory._cdata] = (_storage_reference(memory), Cast())
    return made


def source_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf that the tensor was cast from, if autograd knows it for a cast of one."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def is_of_one(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies in the memory of a cast."""
    return _find(tensor) is not None


def reach(tensor: torch.Tensor) -> None:
    """Somebody reaches for the tensor's memory. If it is a cast's, that is kept by all that has noted the cast."""
    found = _find(tensor)
    if found is not None and found[1] is not None:
        memory = placeholder.storage_of(tensor)
        found[1].memory = memory
        _known[memory._cdata] = (found[0], None)


def to_be_made_again(whole: torch.Tensor) -> Cast | None:
    """What is to be noted of a cast that an operation saves; None where the operation is to keep it itself."""
    found = _find(whole)
    if found is not None:
        return found[1]
    return Cast() if whole.dtype is torch.get_autocast_dtype(whole.device.type) else None


def _find(tensor: torch.Tensor) -> tuple[Any, Cast | None] | None:
    if not _known:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided:
            return None
        try:
            return _known.get(placeholder.identity_of(tensor))
        except RuntimeError:  # a tensor without a storage: a wrapper of the user's
            return None


def _forget_the_gone() -> None:
    """A weak reference keeps the identity from being another's."""
    for identity, (memory, _) in list(_known.items()):
        if memory.expired():
            _known.pop(identity, None)

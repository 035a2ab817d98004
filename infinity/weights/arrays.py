"""Memory of weights in other hands: what is written through it leaves no trace that torch would show.

A tensor and its views share a count of writes, but ``tensor.numpy()`` hands out their memory itself, and asks no class:
``param.data[0].numpy()``, a view that was made in forward or inside ``no_grad``, all look at the weights; and
``param[0].data`` has a count of its own. So torch's methods are wrapped, once for the process, and so is ``data``. An
array of weights that are here can be written to where that is kept; elsewhere it is read-only, and numpy refuses,
though ``torch.from_numpy`` does not. A storage, an address and another tensor over the memory (``set_``, ``data =``)
have no such flag. Whichever it is, the parameter remembers what its weights are, and so finds what was written. Other
tensors' cost a look-up by their storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
from torch.autograd.graph import increment_version

from infinity.weights import placeholder, shard_copies
from infinity.weights.access import param_behind, raw, watch_data
from infinity.weights.owners import known_owner_of, owner_of, refuse_memory
from infinity.weights.param import ShardedParam
from infinity.weights.saved_tensors import source_of_cast

_tensor: Any = torch.Tensor
_torchs_numpy: Any = torch.Tensor.numpy
_torchs_dlpack: Any = torch.Tensor.__dlpack__
_torchs_data: Any = torch._C.TensorBase.data
REACHES: Final = ("untyped_storage", "storage", "data_ptr", "set_")
"""Methods that reach past their tensor, or one they are given, into its memory."""


class Lender(Protocol):
    """Whoever has weights in memory."""

    @property
    def resident(self) -> Mapping[int, ShardedParam]:
        """Parameters whose weights are here, by the identity of their storage."""

    def lend_array(self, param: ShardedParam) -> bool:
        """Somebody gets the memory of a parameter's weights, which is told: whether what is written to it is kept."""


_lenders: WeakSet[Lender] = WeakSet()


def watch(lender: Lender) -> None:
    """Its weights are looked for behind arrays from now on."""
    _lenders.add(lender)
    watch_methods()


@cache
def watch_methods() -> None:
    """Torch's methods that reach into memory ask here first, for the life of the process."""
    _tensor.numpy, _tensor.__dlpack__ = _numpy, _dlpack
    for name in REACHES:
        setattr(_tensor, name, _reaching(getattr(_tensor, name)))
    watch_data(property(_take, _give, _torchs_data.__delete__, _torchs_data.__doc__))


def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    array = _torchs_numpy(tensor, force=force)
    found = _lender_of(tensor)
    if found is not None and not found[0].lend_array(found[1]):
        array.setflags(write=False)
    return array


_numpy.__doc__ = _torchs_numpy.__doc__
_numpy.__name__ = "numpy"


def _dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if (param := param_behind(tensor)) is not None:
        refuse_memory(known_owner_of(param), param, "__dlpack__")
    found = _lender_of(tensor)
    if found is not None and not found[0].lend_array(found[1]):
        refuse_memory(known_owner_of(found[1].param), found[1].param, "__dlpack__")
    return _torchs_dlpack(tensor, *args, **kwargs)


_dlpack.__doc__ = _torchs_dlpack.__doc__
_dlpack.__name__ = "__dlpack__"


def _reaching(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """``torchs`` method, after which weights that were reached on the CPU are known to have been. Torch's own code asks
    for storages to tell them apart, and is not heeded."""

    @wraps(torchs)
    def reach(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            if torchs.__name__ == "set_":
                shard_copies.check_given(tensor)
            for reached in (tensor, *args):
                if isinstance(reached, torch.Tensor) and reached.is_cpu and (found := _lender_of(reached)) is not None:
                    found[1].lend_memory()
        return torchs(tensor, *args, **kwargs)

    return reach


def _take(tensor: torch.Tensor) -> Any:
    """``tensor.data``. Torch's has a count of writes of its own; of a view of weights that are here, or of a cast of
    sharded ones, it has theirs."""
    is_counted = _lender_of(tensor) is not None or _is_of_cast(tensor)
    return tensor.detach() if is_counted else _torchs_data.__get__(tensor)


def _give(taking: torch.Tensor, given: Any) -> None:
    """``taking.data = given``: another tensor over the same memory, with a count of writes of its own."""
    shard_copies.check_given(taking)
    if isinstance(given, torch.Tensor) and given.is_cpu and (found := _lender_of(given)) is not None:
        with raw():
            is_another = placeholder.identity_of(taking) != placeholder.identity_of(given)
        if is_another:
            found[1].lend_memory()
    is_written = _is_of_cast(taking)
    _torchs_data.__set__(taking, given)
    if is_written:
        increment_version(taking)


def _is_of_cast(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a cast of sharded weights, which backward makes anew unless it was written."""
    if param_behind(tensor) is not None:
        return False
    with raw():
        source = source_of_cast(tensor if tensor._base is None else tensor._base)
    owner = None if source is None else owner_of(source)
    return owner is not None and owner.shards_weights


def _lender_of(tensor: torch.Tensor) -> tuple[Lender, ShardedParam] | None:
    if param_behind(tensor) is not None or tensor.layout is not torch.strided:
        return None
    with raw():
        key = placeholder.identity_of(tensor)
    for lender in _lenders:
        if (param := lender.resident.get(key)) is not None:
            return lender, param
    return None

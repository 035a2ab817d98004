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
from types import FrameType
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from infinity.weights import casts, placeholder, shard_copies
from infinity.weights.access import param_behind, raw, watch_data
from infinity.weights.owners import known_owner_of, refuse_memory
from infinity.weights.param import ShardedParam

_tensor: Any = torch.Tensor
_torchs_numpy: Any = torch.Tensor.numpy
_torchs_dlpack: Any = torch.Tensor.__dlpack__
_torchs_to_dlpack: Any = torch._C._to_dlpack
_torchs_data: Any = torch._C.TensorBase.data
REACHES: Final = ("untyped_storage", "storage", "data_ptr", "set_", "apply_", "map_", "map2_")
"""Methods that reach past their tensor, or one they are given, into its memory."""
COLLECTIVES: Final = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "_allgather_base"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of a process group, under the names of several releases, that write to their first argument."""


_ROOM_OF_COLLECTIVES: Final = "infinity.tiers."
_FRAMES_MAX: Final = 8
"""So far up the stack it is looked for: torch has one or two functions in between."""


class Lender(Protocol):
    """Whoever has weights in memory."""

    @property
    def resident(self) -> Mapping[int, ShardedParam]:
        """Parameters whose weights are here, by the identity of their storage."""

    @property
    def left_behind(self) -> Mapping[int, ShardedParam]:
        """Parameters whose weights were in that memory, which somebody has still: what is written there is lost."""

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
    for place in (torch, torch.utils.dlpack):
        vars(place)["to_dlpack"] = _to_dlpack
    for name in COLLECTIVES if dist.is_available() else ():
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _writing(getattr(dist.ProcessGroup, name)))
    watch_data(property(_take, _give, _torchs_data.__delete__, _torchs_data.__doc__))


def _numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
    array = _torchs_numpy(tensor, force=force)
    if not _lends_array(tensor):
        array.setflags(write=False)
    return array


_numpy.__doc__ = _torchs_numpy.__doc__
_numpy.__name__ = "numpy"


def _dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _check_dlpack(tensor)
    return _torchs_dlpack(tensor, *args, **kwargs)


def _check_dlpack(tensor: torch.Tensor) -> None:
    if (param := param_behind(tensor)) is not None:
        refuse_memory(known_owner_of(param), param, "__dlpack__")
    if not _lends_array(tensor):
        _refuse(tensor, "__dlpack__")


_dlpack.__doc__ = _torchs_dlpack.__doc__
_dlpack.__name__ = "__dlpack__"


@wraps(_torchs_to_dlpack)
def _to_dlpack(tensor: torch.Tensor) -> Any:
    _check_dlpack(tensor)
    return _torchs_to_dlpack(tensor)


def _reaching(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """``torchs`` method, after which weights that were reached on the CPU are known to have been. Torch's own code asks
    for storages to tell them apart, and is not heeded."""

    @wraps(torchs)
    def reach(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            if torchs.__name__ == "set_":
                shard_copies.check_given(tensor)
            for reached in (tensor, *args):
                if isinstance(reached, torch.Tensor):
                    _lend_memory_of(reached, torchs.__name__)
        return torchs(tensor, *args, **kwargs)

    return reach


def _writing(torchs: Callable[..., Any]) -> Callable[..., Any]:
    """``torchs`` collective, which counts no write, after which weights that it has written to are known to be."""

    @wraps(torchs)
    def write(group: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves(args[:1]):
            if isinstance(tensor, torch.Tensor) and not (_lender_of(tensor) and _is_called_by_an_engine()):
                _lend_memory_of(tensor, torchs.__name__)
        return torchs(group, *args, **kwargs)

    return write


def _is_called_by_an_engine() -> bool:
    """Whether a collective is the engine's own, which knows what it writes: it has them in one room."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_MAX):
        if frame is None:
            return False
        if frame.f_globals.get("__name__", "").startswith(_ROOM_OF_COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _take(tensor: torch.Tensor) -> Any:
    """``tensor.data``. Torch's has a count of writes of its own; of a view of weights that are here it has theirs."""
    if _lender_of(tensor) is not None:
        return tensor.detach()
    casts.reach(tensor)
    return _torchs_data.__get__(tensor)


def _give(taking: torch.Tensor, given: Any) -> None:
    """``taking.data = given``: another tensor over the same memory, with a count of writes of its own."""
    shard_copies.check_given(taking)
    if isinstance(given, torch.Tensor) and not _have_one_memory(taking, given):
        _lend_memory_of(given, "data")
    is_written = casts.is_of_one(taking)
    _torchs_data.__set__(taking, given)
    if is_written:
        increment_version(taking)


def _have_one_memory(*tensors: torch.Tensor) -> bool:
    with raw():
        are_strided = all(tensor.layout is torch.strided for tensor in tensors)
        return are_strided and len({placeholder.identity_of(tensor) for tensor in tensors}) == 1


def _lends_array(tensor: torch.Tensor) -> bool:
    """Somebody gets the tensor's memory as an array: whether what is written there is the tensor's."""
    found = _lender_of(tensor)
    if found is None:
        casts.reach(tensor)
        return True
    return _is_here(tensor, found[1]) and found[0].lend_array(found[1])


def _lend_memory_of(tensor: torch.Tensor, by: str) -> None:
    """Somebody gets the tensor's memory, where no write is counted: weights, on the CPU, and casts know it. Raises
    WeightsError, telling ``by`` what, where weights have left it."""
    found = _lender_of(tensor)
    if found is None:
        casts.reach(tensor)
    elif not _is_here(tensor, found[1]):
        _refuse(tensor, by)
    elif tensor.is_cpu:
        found[1].lend_memory()


def _is_here(tensor: torch.Tensor, param: ShardedParam) -> bool:
    return param.lies_in(placeholder.identity_of(tensor))


def _refuse(tensor: torch.Tensor, by: str) -> None:
    """Raises WeightsError for weights, here or not, whose memory is not to be had."""
    if (found := _lender_of(tensor)) is not None:
        refuse_memory(known_owner_of(found[1].param), found[1].param, by)


def _lender_of(tensor: torch.Tensor) -> tuple[Lender, ShardedParam] | None:
    """Who lends the weights that are in the tensor's memory, or were there, and whose they are."""
    if param_behind(tensor) is not None or tensor.layout is not torch.strided:
        return None
    with raw():
        key = placeholder.identity_of(tensor)
    for lender in _lenders:
        if (param := lender.resident.get(key) or lender.left_behind.get(key)) is not None:
            return lender, param
    return None

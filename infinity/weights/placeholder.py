"""What a sharded parameter holds while its weights are elsewhere: a tensor that no operation of torch can read.

``access`` answers where torch asks a tensor's class. Some things ask no class: ``torch.tensor(param)``, another tensor
that takes the parameter's memory over (``tensor.data = param``), C++ that was handed the parameter. They do ask the
dispatcher. So a placeholder has a dispatch key that torch keeps for others and has no kernels for, ``DeferredInit``;
it is asked before autograd is, and its one fallback (``dispatcher``) refuses by name. What reads memory without the
dispatcher (dlpack, ``tolist``) finds none, and torch raises a RuntimeError.

``param.data = placeholder`` takes key and memory over, ``param.data = weights`` the ordinary keys. Torch allows that
on the devices of ``_DEVICES``; elsewhere (on the meta device nothing can be read anyway) it is one NaN expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn

import torch

from infinity.tiers.inference import outside_inference

KEY: Final = "DeferredInit"
_DEVICES: Final = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
_KEY: Any = torch._C._dispatch_key_parse(KEY)
_KEYS: Any = torch._C.DispatchKeySet(_KEY)
storage_of: Any = torch._C.TensorBase.untyped_storage
"""Torch's own ``untyped_storage``, which nobody is told about (``arrays``)."""
_set_data: Any = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]


class _Wrapper(torch.Tensor):
    """Torch adds dispatch keys to tensors of a subclass alone; what takes its data over gets them, too."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        raise AssertionError(f"{func} is called with what only placeholders are made of")


def make(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A tensor of that shape, dtype and device, without memory."""
    if torch.device(device).type not in _DEVICES:
        return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))
    make_wrapper: Any = torch.Tensor._make_wrapper_subclass
    with outside_inference():
        wrapper = make_wrapper(_Wrapper, tuple(shape), dtype=dtype, device=device, _extra_dispatch_keys=_KEYS)
        torch._C._set_throw_on_mutable_data_ptr(wrapper)
        made = torch.empty(0, dtype=dtype, device=device)
        put(made, wrapper)
    return made


def put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data`` where one of them is a placeholder: the owners' way, which nobody is asked about."""
    with unasked():  # whose end no interrupt comes before
        _set_data(tensor, data)


def is_held_by(tensor: torch.Tensor) -> bool:
    """Whether what the tensor holds is a placeholder."""
    return bool(torch._C._dispatch_keys(tensor).has(_KEY))


def identity_of(tensor: torch.Tensor) -> int:
    """What all tensors have in common that share one memory, or hold one placeholder."""
    return int(storage_of(tensor)._cdata)


def unasked() -> AbstractContextManager[None]:
    """Inside, the dispatcher asks nobody: for metadata and views, which read nothing, and for ``data =``."""
    guard: AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(_KEYS)
    return guard

"""Torch's constructors as they are, under the names by which Transformers puts them back while ``zero.Init`` lasts.

``Init`` replaces none of them: what is made inside is staged when a module registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """``fn``, whose floating-point results are cast to a dtype, and made on a device where none is named."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is not None and made.is_floating_point():
            made.data = made.data.to(target_fp_dtype)
        return made

    return wrapped


def get_new_tensor_fn_for_dtype(
    target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """A stand-in for ``torch.Tensor.__new__`` whose floating-point results have a dtype and a device."""

    def new_tensor(_cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = torch.empty(0, device=target_device).new_empty(*(args or (0,)), **kwargs)
        return made.to(target_fp_dtype) if target_fp_dtype is not None and made.is_floating_point() else made

    return new_tensor

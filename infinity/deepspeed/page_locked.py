"""Memory that the kernel keeps in RAM: ``deepspeed.utils.pin_memory.NativePinnedMemory``."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from infinity.errors import ConfigError

_libc: Final = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


class NativePinnedMemory:
    """Gives tensors in page-locked memory, and knows them and their views again. A tensor's memory is given back with
    the last tensor that lies in it, or by ``unpin``; the devices are not told of it."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        """First address -> the address behind the last."""

    def pin(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """A tensor of the same elements in page-locked memory, by default a copy.

        Raises ConfigError where the process may not lock so much.
        """
        pinned = self.pin_empty(tensor, tensor.shape if match_shape else (tensor.numel(),))
        return pinned.copy_(tensor.reshape(pinned.shape)) if make_copy else pinned

    def pin_empty(self, example: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """A tensor of ``shape`` and of the dtype of ``example`` there."""
        described = torch.empty(tuple(shape), dtype=example.dtype, device="meta")
        pages = mmap.mmap(-1, max(1, described.nbytes))
        flat = torch.frombuffer(pages, dtype=torch.uint8)
        begin = flat.data_ptr()
        if _libc.mlock(ctypes.c_void_p(begin), ctypes.c_size_t(len(pages))):
            raise ConfigError("shape", tuple(shape), f"{os.strerror(ctypes.get_errno())}: raise `ulimit -l`")
        pinned = flat[: described.nbytes].view(example.dtype).view(described.shape)
        self._ends[begin] = begin + len(pages)
        weakref.finalize(pages, self._ends.pop, begin, None)  # the kernel unlocks what is unmapped
        pinned.ds_pinned = True  # type: ignore[attr-defined]
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that this object gave."""
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return False
        return any(begin <= tensor.data_ptr() < end for begin, end in self._ends.items())

    def unpin(self, tensor: torch.Tensor) -> bool:
        """Unlock the memory that the tensor begins in; False if it is none of this object's. The values stay."""
        begin = tensor.data_ptr()
        if begin not in self._ends:
            return False
        _libc.munlock(ctypes.c_void_p(begin), ctypes.c_size_t(self._ends[begin] - begin))
        del self._ends[begin]
        tensor.ds_pinned = False  # type: ignore[attr-defined]
        return True

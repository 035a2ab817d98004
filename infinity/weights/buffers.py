"""Buffers stay whole on every rank and follow rank 0's, exactly as DDP has them with ``broadcast_buffers``.

DDP sends them when it is made, and before every forward unless the last one ran without gradients or in ``no_sync()``:
so an evaluation takes rank 0's once, and the first training forward after it keeps what each rank has, which is still
the same unless the evaluation changed it. They are written in place, version counters kept, since autograd may have
saved them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import nn

from infinity.tiers.collectives import Collectives


class FollowedBuffers:
    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        """Collective: every rank has rank 0's afterwards."""
        self._module, self._collectives = module, collectives
        self._due = True
        self._broadcast()

    def before_forward(self, *, in_no_sync: bool = False) -> None:
        if self._due:
            self._broadcast()
        self._due = torch.is_grad_enabled() and not in_no_sync

    def _broadcast(self) -> None:
        if self._collectives.world_size == 1:
            return
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for buffer in self._module.buffers():  # asked anew: buffers are often replaced
            if buffer.device.type != "meta" and buffer.numel():
                by_kind.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        for buffers in by_kind.values():
            values = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            self._collectives.broadcast(values, f"broadcast {values.numel()} elements of buffers of {values.dtype}")
            for buffer, value in zip(buffers, torch.split(values, [b.numel() for b in buffers]), strict=True):
                write_buffer(buffer, value.view(buffer.shape))


def write_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Give it other contents, in place and without a new version."""
    if any(stride == 0 and size > 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
        buffer.data = value.clone()  # an expanded one cannot be written
    else:
        buffer.data.copy_(value)


def move_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype, *, kept: Sequence[str] | Literal["auto"] = "auto"
) -> None:
    """Buffers go to ``device``; those in fp32 take the weights' dtype, others keep what they were made with.

    Args:
        kept: patterns of full names of buffers that stay fp32, found anywhere in a name, * for any characters; "auto":
            what the model's modules list themselves, as transformers' do.
    """
    patterns = list(_own_patterns(model, dtype)) if kept == "auto" else [_regular(name) for name in kept]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        stays = buffer.dtype is not torch.float32 or any(re.search(pattern, name) for pattern in patterns)
        buffer.data = buffer.data.to(device=device, dtype=None if stays else dtype)


def _own_patterns(model: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    """``_keep_in_fp32_modules_strict`` is for all 16-bit dtypes, ``_keep_in_fp32_modules`` for fp16 alone."""
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype is torch.float16 else [])]
    for prefix, module in model.named_modules():
        for name in (name for each in lists for name in getattr(module, each, None) or ()):
            yield f"^{re.escape(prefix)}[.].*{_regular(name)}" if prefix else _regular(name)


def _regular(pattern: str) -> str:
    return ".*".join(re.escape(part) for part in pattern.split("*"))

"""Plain torch on several ranks: gradients are averaged as DDP does, and buffers come from rank 0.

The mean is added up in the order of ranks, wherever in a bucket an element would lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.plain_engine import PlainEngine


class AveragingEngine(PlainEngine):
    """``each``: every backward's gradients are averaged by themselves; else those of micro-batches before the last are
    summed on their ranks, and averaged with the first that the last one gives, as behind ``no_sync()``."""

    def __init__(self, module: nn.Module, *, each: bool, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
        self._each = each
        self._sums: dict[Tensor, Tensor] = {}
        for hook in self._hooks:
            hook.remove()
        self._is_due = True
        """Whether the next forward takes rank 0's buffers: DDP's do unless the last one ran without gradients."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_due:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        self._is_due = torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        before = {param: param.grad for param in self.module.parameters()}
        for param in before:
            param.grad = None
        summing = [
            param.register_post_accumulate_grad_hook(self._sum)  # type: ignore[no-untyped-call]
            for param in before
            if param.requires_grad and not self._each
        ]
        scaled = super().backward(loss, retain_graph)
        for hook in summing:
            hook.remove()
        travels = self._each or self.micro_steps + 1 == self.accumulation
        for param, averaged in before.items():
            gradient = param.grad.detach() if self._each and param.grad is not None else None
            param.grad = averaged
            if not travels:
                continue
            gradient = mean(gradient if self._each else self._sums.pop(param, None), param)
            if gradient is not None:
                self._add(param, gradient)
        return scaled

    def _sum(self, param: Tensor) -> None:
        """In the dtype in which micro-batches add up, where they do before they travel; re-entrant checkpoints give
        several gradients in one backward."""
        if param.grad is None:  # a function of the user's may give none for what it was given
            return
        gradient = param.grad.detach().float() if self.accumulation > 1 else param.grad.detach()
        param.grad = None
        self._sums[param] = self._sums[param] + gradient if param in self._sums else gradient

    def _add(self, param: nn.Parameter, gradient: Tensor) -> None:
        master = self._master_of.get(param)
        if master is not None and self.accumulation > 1:
            gradient = gradient.float().clone(memory_format=self._layout)
            master.grad = gradient if master.grad is None else master.grad + gradient
        else:
            param.grad = gradient if param.grad is None else param.grad + gradient

    def drop_gradients(self, params: Iterable[nn.Parameter]) -> None:
        super().drop_gradients(params := list(params))
        for param in params:
            self._sums.pop(param, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._sums.clear()


@torch.no_grad()
def mean(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    """The mean over ranks of what they have; None where no rank has any."""
    dtypes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(dtypes, None if gradient is None else gradient.dtype)
    dtype = next((dtype for dtype in dtypes if dtype is not None), None)
    if dtype is None:
        return None
    mine = torch.zeros(like.shape, dtype=dtype) if gradient is None else gradient
    parts = [torch.empty(like.shape, dtype=dtype) for _ in dtypes]
    dist.all_gather(parts, mine.detach().contiguous() / len(parts))
    return torch.empty_like(like, dtype=dtype).copy_(sum(parts[1:], parts[0]))

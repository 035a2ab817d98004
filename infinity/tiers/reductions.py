"""The mean of gradients over ranks, added up in the order of the ranks wherever an element lies.

Libraries' own reductions begin at another rank for each part of a message. With more than two ranks the bits of a sum
would then depend on what a bucket holds, and so on the stage. gloo scatters a sum by reducing all of it everywhere:
exchanging the parts and adding them up here sends half of that. NCCL's are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

gather: Final[Callable[..., Any]] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter: Final[Callable[..., Any]] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Reducing(Protocol):
    """A reduction under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object:
        """Block until the result is there."""


class Scaled:
    """A library's reduction whose result is multiplied by what the division before it left."""

    def __init__(self, work: dist.Work, output: torch.Tensor, factor: float) -> None:
        self._work, self._output, self._factor = work, output, factor

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._output.mul_(self._factor)


class OrderedScatter:
    """``output`` [numel] becomes this rank's part of the sum over ranks of ``full`` [world_size * numel]."""

    def __init__(self, output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, factor: float) -> None:
        self._output, self._factor = output, factor
        self._num_ranks = dist.get_world_size(group)
        self._received = torch.empty_like(full)
        self._work: dist.Work = dist.all_to_all_single(self._received, full, group=group, async_op=True)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        first, *others = self._received.view(
            self._num_ranks, self._output.numel()
        ).unbind()  # of which there may be none
        self._output.copy_(first)
        for part in others:
            self._output.add_(part)
        if self._factor != 1.0:
            self._output.mul_(self._factor)


class OrderedReduce:
    """``full`` becomes its sum over ranks. Padding makes equal parts of it.

    Parts are added up on their ranks and handed out from there. That has a process group of its own: one rank may add
    up before it sends the next ``full``, another after. A rank that asks ``is_completed`` never waits for others.
    """

    def __init__(
        self,
        full: torch.Tensor,
        group: dist.ProcessGroup,
        handing_out: dist.ProcessGroup,
        world_size: int,
        factor: float,
    ) -> None:
        self._full, self._handing_out = full, handing_out
        part_numel = -(-full.numel() // world_size)
        padded = full
        if part_numel * world_size != full.numel():
            padded = torch.nn.functional.pad(full, (0, part_numel * world_size - full.numel()))
        self._padded = padded
        self._part = torch.empty(part_numel, dtype=full.dtype, device=full.device)
        self._scatter = OrderedScatter(self._part, padded, group, factor)
        self._work: dist.Work | None = None

    def is_completed(self) -> bool:
        if self._work is None and self._scatter.is_completed():
            self._hand_out()
        return self._work is not None and self._work.is_completed()

    def wait(self) -> None:
        if self._work is None:
            self._hand_out()
        if self._work is None:
            raise AssertionError("what was reduced is not handed out")
        self._work.wait()
        if self._padded is not self._full:
            self._full.copy_(self._padded[: self._full.numel()])

    def _hand_out(self) -> None:
        self._scatter.wait()
        self._work = gather(self._padded, self._part, group=self._handing_out, async_op=True)

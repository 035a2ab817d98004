"""Collectives of a rank whose peers are not there: for ``infinity trace``, which runs one rank of a job of many.

They have the sizes of the real ones, also on the meta device, and no meaning: a peer is taken to send what this rank
has itself. Nothing is sent, so no time passes for it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from infinity.tiers.collectives import Collectives


class Done(dist.Work):
    """Issued and over."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class AbsentPeers(Collectives):
    """The peers of rank 0, which owns the most of every parameter: padding lies with the last ranks."""

    def __init__(self, world_size: int) -> None:
        super().__init__(None)
        self.world_size = world_size

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        output.view(self.world_size, -1).copy_(shard)

    def reduce_scatter_mean(self, output: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """The mean over ranks that all have this rank's gradients."""
        output.copy_(full[: output.numel()])
        return Done()

    def all_reduce_mean(self, full: torch.Tensor) -> dist.Work:
        """It is this rank's own."""
        return Done()

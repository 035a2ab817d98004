"""The collectives, in one place: torch 2.13 renamed two of them and deprecated the old names.

All take contiguous 1-D tensors. With one rank they are copies, and no process group is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from infinity.errors import WorldError

Result = TypeVar("Result")

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Collectives among the ranks that share one model; ``group`` None means one rank, no communication."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._reduce_group = None if group is None else dist.new_group(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def of_world(cls) -> Collectives:
        """The default process group, if there is one."""
        return cls(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    def close(self) -> None:
        """Let go of the process groups. Idempotent.

        A group that something still refers to outlives ``dist.destroy_process_group``, and a thread of gloo's that
        lets go of a tensor while the interpreter ends aborts the process (pytorch's AsyncBarrierWork, seen 1 in 9).
        """
        if self._reduce_group is not None and dist.is_initialized():
            dist.destroy_process_group(self._reduce_group)
        self._group = self._reduce_group = None

    @staticmethod
    def world_size_of_world() -> int:
        """Without making a group: 1 where torch.distributed is not in use."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        """``output`` [world_size * numel] becomes the shards [numel] of all ranks in order."""
        if self._group is None:
            output.copy_(shard)
        else:
            _gather(output, shard, group=self._group)

    def reduce_scatter_mean(self, output: torch.Tensor, full: torch.Tensor) -> dist.Work:
        """Issue: ``output`` [numel] becomes this rank's part of the mean over ranks of ``full`` [world_size * numel].

        Divides first, as DDP does, so that sums stay in range. ``full`` is overwritten. Reductions have a process
        group of their own: ranks may reach them at different points of their gathers without a deadlock.
        """
        full.div_(self.world_size)
        work: dist.Work = _scatter(output, full, op=dist.ReduceOp.SUM, group=self._reduce_group, async_op=True)
        return work

    def sum(self, tensor: torch.Tensor) -> None:
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)

    def max(self, tensor: torch.Tensor) -> None:
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0."""
        if self._group is not None:
            dist.broadcast(tensor, src=dist.get_global_rank(self._group, 0), group=self._group)

    def broadcast_object(self, value: object) -> Any:
        """``value`` of rank 0."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def gather_objects(self, value: object) -> list[Any]:
        """``value`` of every rank, in rank order."""
        if self._group is None:
            return [value]
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, value, group=self._group)
        return box

    def together(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` on every rank; if it fails on any, every rank raises: its own error, or who failed how."""
        result: Result | None = None
        error: BaseException | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 (raised again below, after the other ranks know)
            error = raised
        failures = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise WorldError(f"rank {rank} failed: {failure}")
        return cast(Result, result)

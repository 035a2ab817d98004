"""``PartitionedTensor``: a tensor of which each rank of a group keeps a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from infinity.deepspeed.numbers import partition_uniform


class PartitionedTensor:
    """Keeps this rank's part of ``tensor``, which all ranks of ``group`` have alike, and gathers the whole again."""

    def __init__(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None, partition_meta: torch.Tensor | None = None
    ) -> None:
        self.group = group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_size, self.orig_device = list(tensor.size()), tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(
        cls,
        meta: torch.Tensor,
        local_part: torch.Tensor,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None = None,
    ) -> PartitionedTensor:
        """The tensor that ``to_meta`` described, with this rank's part of it.

        Args:
            meta: what ``to_meta`` gave on this rank.
            local_part: this rank's ``local_data``.
            group: the same ranks.
            device: where the whole is to lie; by default where the part does.
        """
        if meta.dtype != torch.long:
            raise AssertionError(f"meta is what to_meta() gives, of torch.long, not {meta.dtype}")
        made = cls(torch.empty(0, device="cpu"), group)
        num_dims, *numbers = meta.tolist()
        made.orig_size, (num_parts, rank, *made.partition) = numbers[:num_dims], numbers[num_dims:]
        if (num_parts, rank) != (made.num_parts, made.rank):
            here = f"rank {made.rank} of {made.num_parts}"
            raise AssertionError(f"meta is of rank {rank} of {num_parts}, not of {here}")
        made.orig_device = torch.device(device) if device is not None else local_part.device
        made.local_data = local_part.detach()
        return made

    def full(self, device: torch.device | str | None = None) -> torch.Tensor:
        """The whole tensor, a copy. Collective."""
        longest = max(end - begin for begin, end in zip(self.partition, self.partition[1:], strict=False))
        own = self.local_data.new_zeros(longest)
        own[: self.local_data.numel()] = self.local_data
        parts = [torch.empty_like(own) for _ in range(self.num_parts)]
        dist.all_gather(parts, own, group=self.group)
        lengths = (end - begin for begin, end in zip(self.partition, self.partition[1:], strict=False))
        whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        return whole.view(self.orig_size).to(self.orig_device if device is None else device)

    def to_meta(self) -> torch.Tensor:
        """Numbers that describe the tensor: its size, how many parts, which this is, and where each begins."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """This rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The size of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> Sequence[int]:
        """The size of the whole."""
        return self.orig_size

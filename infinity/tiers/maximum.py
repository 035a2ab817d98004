"""The largest of each element over all ranks, in as many rounds as the number of ranks has bits.

gloo hands what ranks gather or reduce around a ring: of 4,096 ranks that takes 4,095 messages one behind another,
before every gather of weights. A maximum is the same whoever is counted twice, so each rank tells one that is 1, 2, 4,
... places further what it knows by then, as ranks do in a barrier: 12 messages.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from infinity.tiers.reductions import gather

RING_MAX: Final = 8
"""Ranks up to which gloo's ring is as quick: its steps are taken in gloo's own thread, each round of ours in Python."""
ROUNDS_MAX: Final = 32
_TAGS: Final = 1 << 31


def spread_maximum(values: torch.Tensor, group: dist.ProcessGroup, number: int, timeout_s: float) -> None:
    """``values``, dense and on the CPU, become the maximum over the ranks of ``group``. Collective.

    Args:
        number: how many came before it in the group, and itself: no message of one is taken for one of another.
        timeout_s: for each round.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)  # which refuse a group that was destroyed
    timeout = timedelta(seconds=timeout_s)
    if world_size <= RING_MAX:
        found = torch.empty(world_size * values.numel(), dtype=values.dtype, device="cpu")
        gather(found, values.view(-1), group=group, async_op=True).wait(timeout)
        values.copy_(found.view(world_size, *values.shape).amax(0))
        return
    peers: Any = group
    received = values.clone()
    for number_of_round in range((world_size - 1).bit_length()):
        distance, tag = 1 << number_of_round, (number * ROUNDS_MAX + number_of_round) % _TAGS
        sending = peers.send([values], (rank + distance) % world_size, tag)
        peers.recv([received], (rank - distance) % world_size, tag).wait(timeout)
        sending.wait()
        torch.maximum(values, received, out=values)

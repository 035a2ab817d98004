"""What each rank learns of all others, and in how many messages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity.tiers import maximum
from infinity.tiers.maximum import spread_maximum

TIMEOUT_S = 30.0


class CountedGroup:
    """Ranks as threads, over gloo, whose messages are counted."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        self.rank, self.world_size, self.num_sent = rank, world_size, 0
        self._group = gloo(store, rank, world_size, timedelta(seconds=TIMEOUT_S))

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        self.num_sent += 1
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._group.recv(tensors, source, tag)


@pytest.mark.parametrize(("world_size", "num_messages"), [(9, 4), (12, 4), (16, 4), (17, 5), (33, 6)])
def test_all_ranks_know_the_largest_after_as_many_messages_as_their_number_has_bits(
    world_size: int, num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maximum, "dist", _Asked)
    store: Any = dist.HashStore()  # type: ignore[attr-defined]

    def work(rank: int) -> tuple[list[int], list[int], int]:
        group: Any = CountedGroup(store, rank, world_size)
        values, others = torch.tensor([rank, -rank, rank * 7 % world_size]), torch.tensor([-rank])
        spread_maximum(values, group, 1, TIMEOUT_S)
        num_sent = group.num_sent
        spread_maximum(others, group, 2, TIMEOUT_S)
        return values.tolist(), others.tolist(), num_sent

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(work, range(world_size)))
    largest = max(rank * 7 % world_size for rank in range(world_size))
    assert found == [([world_size - 1, 0, largest], [0], num_messages)] * world_size


class _Asked:
    """What is asked of torch.distributed about groups that it has not made."""

    @staticmethod
    def get_rank(group: CountedGroup) -> int:
        return group.rank

    @staticmethod
    def get_world_size(group: CountedGroup) -> int:
        return group.world_size

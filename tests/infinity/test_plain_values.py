"""Rank 0's values of a model that was built in memory, on all ranks: in few collectives, and each in its own memory."""

from __future__ import annotations

import torch
from torch import nn

from infinity.engine.build import _broadcast_plain
from infinity.weights.together import TOGETHER_NUMEL, together
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks


def test_parameters_of_one_kind_go_together() -> None:
    sizes = [5, TOGETHER_NUMEL - 5, 1, TOGETHER_NUMEL + 1, 2, 3]
    tensors = [torch.empty(size, device="meta") for size in sizes]
    tensors.append(torch.empty(1, dtype=torch.bfloat16, device="meta"))
    found = [[tensor.numel() for tensor in several] for several in together(tensors, torch.Tensor.detach)]
    assert found == [[5, TOGETHER_NUMEL - 5], [1], [TOGETHER_NUMEL + 1], [2, 3], [1]]


def test_a_hundred_parameters_are_one_broadcast() -> None:
    def work(collectives: ThreadedCollectives) -> list[torch.Tensor]:
        params = [nn.Parameter(torch.full((3, 4), float(number + collectives.rank))) for number in range(100)]
        params[1].data = params[1].data.clone().t()
        before = [param.data_ptr() for param in params]
        _broadcast_plain(params, collectives)
        assert collectives.said == ["broadcast 100 parameters of rank 0, 1200 elements of torch.float32"]
        assert [param.data_ptr() for param in params] == before
        assert params[1].stride() == (1, 4)
        return [param.detach().clone() for param in params]

    for shown in zip(*on_ranks(3, work), strict=True):
        assert all(torch.equal(each, shown[0]) for each in shown)


def test_one_rank_alone_copies_nothing() -> None:
    def work(collectives: ThreadedCollectives) -> None:
        _broadcast_plain([nn.Parameter(torch.ones(3))], collectives)
        assert collectives.said == []

    on_ranks(1, work)

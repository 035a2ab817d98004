"""Buffers follow rank 0's: which are sent, when, and that they are written where they are. Ranks are threads here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity.tiers.collectives import Collectives
from infinity.weights.buffers import FollowedBuffers
from tests.support.threaded_ranks import ThreadedCollectives, on_ranks


class Buffered(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.arange(6.0).view(2, 3) + 10 * rank)
        self.register_buffer("variance", torch.full((4,), 0.5 + rank))
        self.register_buffer("count", torch.tensor(7 + rank))
        self.register_buffer("turned", (torch.arange(6.0).view(2, 3) * (rank + 1)).t())
        self.register_buffer("shared", torch.tensor([1.0 + rank]).expand(3))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("absent", torch.zeros(2, device="meta"))


def values(module: nn.Module) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in module.named_buffers() if not buffer.is_meta}


def test_every_buffer_is_rank_0s_where_it_is_and_in_its_dtype() -> None:
    def work(collectives: ThreadedCollectives) -> dict[str, Any]:
        module = Buffered(collectives.rank)
        places = {
            name: buffer.data_ptr() for name, buffer in module.named_buffers() if name not in ("shared", "absent")
        }
        versions = {name: buffer._version for name, buffer in module.named_buffers()}
        FollowedBuffers(module, collectives)
        assert {name: module.get_buffer(name).data_ptr() for name in places} == places
        assert {name: buffer._version for name, buffer in module.named_buffers()} == versions, "autograd may have them"
        assert module.get_buffer("turned").stride() == (1, 3)
        assert collectives.said == [
            "broadcast 19 elements of buffers of torch.float32",
            "broadcast 1 elements of buffers of torch.int64",
        ]
        return values(module)

    first, second = on_ranks(2, work)
    assert first == second == values(Buffered(0))


def test_they_are_sent_before_a_forward_unless_the_last_one_ran_without_gradients() -> None:
    def work(collectives: ThreadedCollectives) -> list[int]:
        module = nn.Module()
        module.register_buffer("seen", torch.zeros(1))
        followed = FollowedBuffers(module, collectives)
        sent = []
        for with_gradients in (True, True, False, False, True, True):
            num_said = len(collectives.said)
            with torch.set_grad_enabled(with_gradients):
                followed.before_forward()
            sent.append(len(collectives.said) - num_said)
        return sent

    assert on_ranks(2, work) == [[1, 1, 1, 0, 0, 1]] * 2


def test_a_buffer_that_was_replaced_is_followed_too() -> None:
    def work(collectives: ThreadedCollectives) -> float:
        module = nn.Module()
        module.register_buffer("seen", torch.zeros(1))
        followed = FollowedBuffers(module, collectives)
        module.seen = torch.full((1,), 3.0 + collectives.rank)
        followed.before_forward()
        return float(module.seen)

    assert on_ranks(2, work) == [3.0, 3.0]


def test_one_rank_sends_nothing() -> None:
    module = Buffered(0)
    followed = FollowedBuffers(module, Collectives(None))
    followed.before_forward()
    assert values(module) == values(Buffered(0))

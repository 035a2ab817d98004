"""Arrays of weights' memory, over a lender that takes notes: who is told, and what can be written to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights import access, arrays, owners
from infinity.weights.param import ShardedParam
from tests.infinity.weights.test_access import NotedOwner


class Lender:
    def __init__(self, *, keeps: bool) -> None:
        self.resident: dict[int, ShardedParam] = {}
        self.left_behind: dict[int, ShardedParam] = {}
        self.keeps = keeps
        self.asked: list[ShardedParam] = []

    def lend_array(self, param: ShardedParam) -> bool:
        self.asked.append(param)
        return self.keeps


class Weights:
    """A parameter whose weights are here."""

    def __init__(self, lender: Lender) -> None:
        param = nn.Parameter(torch.arange(6.0))
        owners.adopt(param, NotedOwner())
        cpu = torch.device("cpu")
        self.sharded = ShardedParam(0, "p", param, torch.float32, cpu, lender.resident, left_behind=lender.left_behind)
        access.hide(param, self.sharded.placeholder)
        self.sharded.allocate().copy_(torch.arange(6.0))
        self.sharded.show()
        self.view = param.detach()[2:]
        arrays.watch(cast(arrays.Lender, lender))
        arrays.watch(cast(arrays.Lender, lender))


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def lender(request: pytest.FixtureRequest) -> Lender:
    return Lender(keeps=request.param)


@pytest.fixture
def weights(lender: Lender) -> Iterator[Weights]:
    made = Weights(lender)
    yield made
    owners.disown(made.sharded.param)


def test_an_array_of_weights_can_be_written_to_where_that_is_kept(lender: Lender, weights: Weights) -> None:
    array = weights.view.numpy()
    assert lender.asked == [weights.sharded]
    assert array.flags.writeable is lender.keeps
    assert array.tolist() == [2, 3, 4, 5]


def test_other_tensors_arrays_are_torchs(lender: Lender, weights: Weights) -> None:
    other = torch.arange(3.0)
    other.numpy()[0] = 5
    np.from_dlpack(other)
    assert other.tolist() == [5, 1, 2]
    with pytest.raises(RuntimeError, match="requires grad"):
        other.requires_grad_().numpy()
    assert other.numpy(force=True).tolist() == [5, 1, 2]
    assert lender.asked == []
    assert weights.view.shape == (4,)


def test_dlpack_hands_out_weights_only_where_writes_are_kept(lender: Lender, weights: Weights) -> None:
    if lender.keeps:
        array: Any = np.from_dlpack(weights.view)
        assert array.tolist() == [2, 3, 4, 5]
    else:
        with pytest.raises(WeightsError, match="__dlpack__ would reach into memory"):
            weights.view.__dlpack__()
    assert lender.asked == [weights.sharded]


def test_it_is_known_when_another_tensor_takes_the_memory_over(weights: Weights) -> None:
    """By itself it leaves no trace: the other tensor counts its own writes, and may be gone before anybody looks."""
    param, kept = weights.sharded.param, torch.zeros(6)
    kept.data = torch.ones(6)
    param.data = param.data  # nobody else has it
    assert [weights.sharded.is_lent] == [False]
    with torch.no_grad():
        between = torch.empty(0)
        between.data = param.data[2:]
        other = torch.empty(0)
        other.data = between
    assert weights.sharded.is_lent
    assert not weights.sharded.is_written()
    other.add_(1)
    del other, between
    assert weights.sharded.is_written()


def test_what_is_elsewhere_has_no_memory_to_hand_out(weights: Weights) -> None:
    elsewhere = NotedOwner().make()
    with pytest.raises(WeightsError, match="__dlpack__ would reach into memory"):
        elsewhere.__dlpack__()
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match="layout"):
        sparse.numpy()
    assert weights.view.shape == (4,)

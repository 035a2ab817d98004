"""Param groups: each parameter once, lists never merged, small and frozen parameters apart."""

from __future__ import annotations

import torch
from torch import nn

from infinity.plan.grouping import group_params
from tests.support.work import lines_run


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_each_parameter_is_in_exactly_one_group() -> None:
    model = Model()
    for numel_max in (1, 300, 10**9):
        for persistent in (0, 50, 10**9):
            groups = group_params(model, numel_max=numel_max, persistent_numel_max=persistent)
            ids = [id(p) for group in groups for p in group.params]
            assert len(ids) == len(set(ids))
            assert set(ids) == {id(p) for p in model.parameters()}


def test_elements_of_a_list_stay_apart() -> None:
    model = Model()
    groups = group_params(model, numel_max=10**9, persistent_numel_max=0)
    anchors = [group.anchor for group in groups]
    assert anchors == [model.embedding, *model.blocks]


def test_weights_of_two_dtypes_are_apart_and_those_of_one_together() -> None:
    model = Model().requires_grad_(False)
    for block in model.blocks:
        block.get_submodule("up").bfloat16()
    for persistent_numel in (0, None):
        groups = group_params(model, numel_max=10**9, persistent_numel_max=persistent_numel)
        assert [{param.dtype for param in group.params} for group in groups] == [{group.dtype} for group in groups]
        as_one = group_params(
            model, numel_max=10**9, persistent_numel_max=persistent_numel, dtype_of=lambda _: torch.float16
        )
        assert {group.dtype for group in as_one} == {torch.float16}
        assert len(as_one) < len(groups)


def test_subtrees_above_the_limit_are_opened() -> None:
    model = Model()
    groups = group_params(model, numel_max=300, persistent_numel_max=0)
    anchors = [group.anchor for group in groups]
    assert model.blocks[0] not in anchors
    assert model.blocks[0].get_submodule("up") in anchors


def test_small_parameters_are_persistent() -> None:
    model = Model()
    groups = group_params(model, numel_max=10**9, persistent_numel_max=32)
    assert groups[0].persistent
    assert groups[0].anchor is None
    assert all(p.numel() <= 32 for p in groups[0].params)
    assert all(p.numel() > 32 for group in groups[1:] for p in group.params)


def test_frozen_parameters_have_groups_of_their_own() -> None:
    model = Model()
    model.blocks[0].get_submodule("up").requires_grad_(False)
    groups = group_params(model, numel_max=10**9, persistent_numel_max=0)
    for group in groups:
        assert {p.requires_grad for p in group.params} == {group.trainable}


def test_persistent_parameters_are_bounded_together() -> None:
    """What comes first and still fits stays whole; a larger one is passed over."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 1))  # 32, 4, 8, 2, 2, 1 elements

    def chosen(total: int | None, numel_max: int = 10) -> list[int]:
        groups = group_params(model, numel_max=10**9, persistent_numel_max=numel_max, persistent_total_max=total)
        return [p.numel() for group in groups if group.persistent for p in group.params]

    assert chosen(None) == chosen(17) == [4, 8, 2, 2, 1]
    assert chosen(16) == [4, 8, 2, 2]
    assert chosen(11) == [4, 2, 2, 1]
    assert chosen(1) == [1]
    assert chosen(0) == []
    assert chosen(45, numel_max=40) == [32, 4, 8, 1]


def test_persistent_parameters_are_cut_into_buckets() -> None:
    """In their order, so that backward completes one after the other; a larger parameter is a bucket of its own."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2), nn.Linear(2, 1))  # 32, 4, 8, 2, 2, 1 elements
    model[1].bias.requires_grad_(False)

    def buckets(numel: int | None) -> list[list[int]]:
        groups = group_params(model, numel_max=1, persistent_numel_max=None, bucket_numel=numel)
        assert all(group.persistent for group in groups)
        return [[p.numel() for p in group.params] for group in groups]

    assert buckets(None) == buckets(47) == [[32, 4, 8, 2, 1], [2]]
    assert buckets(12) == [[32], [4, 8], [2, 1], [2]]
    assert buckets(1) == buckets(0) == [[32], [4], [8], [2], [1], [2]]


def test_buckets_of_many_parameters_cost_each_of_them_once() -> None:
    """In lines run: all small parameters of a model are in one bucket, and each one's coming once summed it anew."""

    def work(num_params: int) -> int:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(num_params)])
        return lines_run(
            lambda: group_params(model, numel_max=1, persistent_numel_max=1, bucket_numel=10**9), "infinity/plan"
        )

    few, many = work(50), work(400)
    assert many <= 8 * few, f"{few} lines for 50 parameters, {many} for 400"

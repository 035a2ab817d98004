"""One sharded parameter without an engine: how weights lie, appear, are written to, leave, and are outlived."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from infinity.errors import EngineStateError
from infinity.weights import access, owners, placeholder
from infinity.weights.param import ShardedParam, flattened, memory_order

CPU = torch.device("cpu")
WAYS: dict[str, torch.Tensor] = {
    "plain": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "sliced": torch.arange(48.0).view(4, 12)[::2, :6],
    "a column": torch.arange(24.0).view(6, 4)[:, :1],
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(2, 0, 3),
}


def test_the_order_of_memory_is_from_the_longest_stride_to_the_shortest() -> None:
    assert memory_order(torch.ones(2, 3, 4)) == [0, 1, 2]
    assert memory_order(torch.ones(2, 3, 4).permute(1, 2, 0)) == [2, 0, 1]
    assert memory_order(torch.ones(1, 1).expand(1, 1)) == [0, 1]


@pytest.fixture(params=WAYS)
def values(request: pytest.FixtureRequest) -> torch.Tensor:
    return WAYS[request.param]


@pytest.fixture
def sharded(values: torch.Tensor) -> Iterator[ShardedParam]:
    made = make(values)
    yield made
    owners.disown(made.param)


def make(values: torch.Tensor, resident: dict[int, ShardedParam] | None = None) -> ShardedParam:
    param = nn.Parameter(values.clone(memory_format=torch.preserve_format))
    owner: Any = object()
    owners.adopt(param, cast(owners.Owner, owner))
    sharded = ShardedParam(3, "p", param, torch.float32, CPU, resident)
    access.hide(param, sharded.placeholder)
    return sharded


def fill(sharded: ShardedParam, values: torch.Tensor) -> None:
    sharded.allocate().copy_(flattened(values, sharded.order))


def test_weights_lie_as_they_did_without_holes(sharded: ShardedParam, values: torch.Tensor) -> None:
    flat = flattened(values, sharded.order)
    if WAYS["sliced"] is not values and WAYS["a column"] is not values and values.numel():
        assert flat.data_ptr() == values.data_ptr(), "a view"
        assert sharded.layout.stride() == values.stride()
    fill(sharded, values)
    assert sharded.show(), "nobody wrote to it"
    assert torch.equal(sharded.param.detach(), values)
    assert memory_order(sharded.param.detach()) == memory_order(sharded.layout)
    assert torch.equal(sharded.unflattened(flat.contiguous()), values)
    assert sharded.hide()


def test_a_sharded_parameter_keeps_its_shape_and_no_element(sharded: ShardedParam, values: torch.Tensor) -> None:
    assert sharded.param.shape == values.shape
    assert type(sharded.param) is access.ShardedParameter
    assert placeholder.is_held_by(sharded.param)
    with access.raw(), pytest.raises(RuntimeError, match="data pointer"):
        sharded.param.data_ptr()


def test_the_layout_is_of_the_weights_own_dtype() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    assert ShardedParam(0, "p", param, torch.bfloat16, CPU).layout.dtype is torch.bfloat16
    assert ShardedParam.layout_for(param.double()).dtype is torch.float64


def test_gradients_are_flattened_as_the_weights_are(sharded: ShardedParam, values: torch.Tensor) -> None:
    expected = flattened(values, sharded.order)
    for gradient in (values, values.contiguous(), values.clone(memory_format=torch.preserve_format)):
        flat = sharded.flat_gradient(gradient)
        assert flat.shape == (values.numel(),)
        assert torch.equal(flat, expected)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    """Torch's SGD adds its entries one by one, and others refuse it: made dense, it comes to other bits."""
    sharded = make(torch.ones(4, 2))
    places = torch.tensor([[1, 1, 3]])
    gradient = torch.sparse_coo_tensor(places, torch.ones(3, 2), (4, 2), check_invariants=True)
    with pytest.raises(EngineStateError, match=rf"^{sharded.name}: its gradient is sparse.*sparse=False"):
        sharded.flat_gradient(gradient)


def test_a_part_of_the_users_own_values_in_the_order_of_memory() -> None:
    values = torch.arange(6.0).view(2, 3).t()
    sharded = ShardedParam(0, "p", nn.Parameter(values), torch.float32, CPU)
    assert sharded.own_values(1, 4).tolist() == [1, 2, 3, 4]


def test_shows_are_counted_and_a_write_is_told_at_the_last() -> None:
    sharded = make(torch.ones(3))
    assert [sharded.is_shown, sharded.is_changed] == [False, False]
    fill(sharded, torch.ones(3))
    sharded.show()
    sharded.show()
    assert type(sharded.param) is access.LentParameter
    with access.raw(), torch.no_grad():
        sharded.param.mul_(2)
    assert [sharded.is_shown, sharded.is_changed] == [True, True]
    assert sharded.hide(), "somebody else still has it"
    assert type(sharded.param).__name__ == "LentParameter"
    assert not sharded.hide()
    assert [type(sharded.param).__name__, sharded.is_shown] == ["ShardedParameter", False]
    sharded.show()
    assert not sharded.is_changed, "since they were shown"
    assert sharded.hide()


def lent() -> tuple[ShardedParam, torch.UntypedStorage]:
    """Weights of ones that are shown, and their memory in other hands."""
    sharded = make(torch.ones(3))
    fill(sharded, torch.ones(3))
    sharded.show()
    storage = sharded.param.untyped_storage()  # nobody watches: the parameter is told by hand
    sharded.lend_memory()
    return sharded, storage


def test_memory_in_other_hands_is_looked_at_for_as_long_as_somebody_has_it() -> None:
    sharded, storage = lent()
    assert [sharded.is_lent, sharded.is_written()] == [True, False]
    storage[0] = 7
    assert [sharded.is_written(), sharded.is_changed] == [True, False]
    sharded.overlook_change()
    assert not sharded.is_written()
    assert sharded.is_lent, "the storage is still there"
    with torch.no_grad():
        sharded.allocate().copy_(torch.full((3,), 2.0))
    sharded.count_update()
    assert not sharded.is_written(), "by an update"
    del storage
    assert not sharded.is_written()
    assert not sharded.is_lent


def test_memory_that_is_lent_twice_is_compared_with_what_it_was_at_first() -> None:
    sharded, storage = lent()
    storage[0] = 7
    sharded.lend_memory()
    assert sharded.is_written()


def test_memory_that_has_gone_cannot_be_lent() -> None:
    sharded = make(torch.ones(3))
    sharded.lend_memory()
    assert [sharded.is_lent, sharded.is_written()] == [False, False]


def test_what_was_written_to_hidden_weights_is_told_when_they_are_shown() -> None:
    sharded, storage = lent()
    assert sharded.hide()
    storage[0] = 7
    assert not sharded.show()


def test_showing_what_is_not_there_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError, match="p is shown without"):
        make(torch.ones(3)).show()


def test_an_update_of_what_is_shown_is_no_write_of_the_users() -> None:
    sharded = make(torch.ones(3))
    fill(sharded, torch.ones(3))
    sharded.show()
    with torch.no_grad():
        sharded.allocate().copy_(torch.full((3,), 2.0))
    assert sharded.is_changed, "autograd sees it"
    sharded.count_update()
    assert [sharded.is_changed, sharded.generation] == [False, 1]
    assert sharded.hide()
    sharded.count_update()
    assert sharded.generation == 2


def test_memory_that_is_there_is_taken_again_and_goes_with_its_last_view() -> None:
    resident: dict[int, ShardedParam] = {}
    sharded = make(torch.ones(3), resident)
    first = sharded.allocate().data_ptr()
    assert sharded.allocate().data_ptr() == first
    assert list(resident.values()) == [sharded]
    assert sharded.full is not None
    assert list(resident) == [sharded.full.untyped_storage()._cdata]
    assert not sharded.full.is_inference()
    sharded.drop()
    assert [resident, getattr(sharded, "full")] == [{}, None]  # noqa: B009 (mypy takes it for what it was)
    sharded.drop()  # nothing is there
    assert not sharded.has_outliving_views()


def test_views_that_outlive_their_weights_are_remembered_until_they_go() -> None:
    sharded = make(torch.ones(3))
    kept = []
    for _ in range(2):
        fill(sharded, torch.ones(3))
        assert sharded.full is not None
        kept.append(sharded.full[1:])
        sharded.drop()
    assert sharded.has_outliving_views()
    kept.pop(0)
    assert sharded.has_outliving_views()
    kept.pop()
    assert not sharded.has_outliving_views()
    fill(sharded, torch.ones(3))
    sharded.drop()
    assert not sharded.has_outliving_views()


def test_weights_made_in_inference_mode_are_ordinary_ones() -> None:
    sharded = make(torch.ones(3))
    with torch.inference_mode():
        sharded.allocate()
        assert sharded.full is not None
        assert not sharded.full.is_inference()


def test_what_autograd_keeps_of_the_parameter_itself_is_seen() -> None:
    sharded = make(torch.ones(3))
    fill(sharded, torch.ones(3))
    assert not sharded.is_kept_unseen(), "it is not shown"
    sharded.show()
    assert not sharded.is_kept_unseen()
    with access.raw():
        view = sharded.param[1:]
        assert not sharded.is_kept_unseen(), "a view is none"
        product = sharded.param * torch.ones(3, requires_grad=True)
    assert sharded.is_kept_unseen()
    del product
    assert not sharded.is_kept_unseen()
    del view
    assert sharded.hide()
    assert not sharded.is_kept_unseen()


def test_the_accumulator_is_held_once_it_was_shown_unless_it_is_frozen() -> None:
    for trains in (True, False):
        sharded = make(torch.ones(3))
        sharded.param.requires_grad_(trains)
        fill(sharded, torch.ones(3))
        assert sharded._accumulator is None
        sharded.show()
        held: Any = sharded._accumulator
        assert (held is not None) is trains
        sharded.hide()
        sharded.show()
        assert sharded._accumulator is held
        sharded.hide()

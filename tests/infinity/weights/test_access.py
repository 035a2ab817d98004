"""What a parameter with an owner answers itself, what it asks its owner, what is lent; the owner only takes notes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights import access, dispatcher, owners, placeholder

dispatcher.watch()  # as whoever makes placeholders does: this file is right alone, too
VALUES = torch.arange(6.0).view(2, 3)

dispatcher.watch()


class NotedOwner(owners.Owner):
    """Has the weights of some parameters."""

    def __init__(self, *, keeps_writes: bool = False) -> None:
        self.keeps_writes = keeps_writes  # type: ignore[misc]
        self.weights: dict[int, torch.Tensor] = {}
        self.log: list[tuple[Any, ...]] = []
        self.gradient: torch.Tensor | None = None

    def make(self, values: torch.Tensor = VALUES) -> nn.Parameter:
        param = nn.Parameter(values.clone())
        self.weights[id(param)] = values.clone()
        owners.adopt(param, self)
        self.hide(param)
        return param

    def hide(self, param: nn.Parameter) -> None:
        access.hide(param, placeholder.make(self.weights[id(param)].shape, torch.float32))

    @contextmanager
    def borrow(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        self.log.append(("borrow", *params))
        for param in params:
            access.show(param, self.weights[id(param)])
        try:
            yield
        finally:
            for param in params:
                self.hide(param)

    @contextmanager
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> Iterator[None]:
        with self.borrow(params):
            yield
        self.log.append(("kept", *params))  # not where it is only dropped

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        return access.ShardedAlias.of(param)

    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        return self.weights[id(param)].flatten()[:2].clone()

    def is_persistent(self, param: nn.Parameter) -> bool:
        return False

    def layout_of(self, param: nn.Parameter) -> torch.Tensor:
        return torch.empty(3, 2, device="meta").t()

    def gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return self.gradient

    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor | None) -> None:
        self.log.append(("gradient", gradient))

    def set_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        self.log.append(("data", data))

    def copy(self, param: nn.Parameter) -> nn.Parameter:
        self.log.append(("copy",))
        return nn.Parameter(torch.zeros(1))

    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        raise WeightsError("named", problem, remedy)

    @property
    def num_loans(self) -> int:
        return sum(entry[0] == "borrow" for entry in self.log)


@pytest.fixture
def owner() -> NotedOwner:
    return NotedOwner()


def state(param: nn.Parameter) -> str:
    return type(param).__name__


def test_a_parameter_changes_hands_and_stays_the_same_object(owner: NotedOwner) -> None:
    param = owner.make()
    assert [state(param), owners.owner_of(param)] == ["ShardedParameter", owner]
    assert isinstance(param, nn.Parameter)
    access.show(param, VALUES.clone())
    assert state(param) == "UnshardedParameter"
    owners.disown(param)
    assert [state(param), owners.owner_of(param)] == ["Parameter", None]
    assert owners.owner_of(nn.Parameter(VALUES)) is None
    owners.disown(param)  # nobody's already


def test_facts_are_answered_without_a_loan(owner: NotedOwner) -> None:
    param = owner.make()
    assert (param.shape, param.dtype, param.dim(), param.numel(), len(param)) == ((2, 3), torch.float32, 2, 6, 2)
    assert param.requires_grad
    assert param.requires_grad_(False).requires_grad is False
    assert "sharded=True" in repr(param)
    assert {param: 1}[param] == 1
    assert owner.num_loans == 0


def test_layout_is_what_the_owner_says(owner: NotedOwner) -> None:
    param = owner.make()
    assert param.stride() == (1, 2)
    assert param.stride(1) == 2
    assert [param.is_contiguous(), param.detach().stride(), owner.num_loans] == [False, (1, 2), 0]


def test_an_operation_gets_the_weights_for_its_time(owner: NotedOwner) -> None:
    param, other = owner.make(), owner.make(VALUES + 10)
    assert torch.equal(param * 2, VALUES * 2)
    assert torch.equal(torch.cat([param, other]), torch.cat([VALUES, VALUES + 10]))
    assert torch.equal(torch.add(VALUES, other=param), VALUES * 2), "by keyword, too"
    assert [len(entry) - 1 for entry in owner.log] == [1, 2, 1]
    assert torch.equal(param @ param.t(), VALUES @ VALUES.t())
    assert [state(each) for each in (param, other)] == ["ShardedParameter"] * 2


def test_each_owner_lends_its_own(owner: NotedOwner) -> None:
    second = NotedOwner()
    mine, theirs, also_mine = owner.make(), second.make(VALUES + 1), owner.make(VALUES + 2)
    assert torch.equal(torch.stack([mine, theirs, also_mine]).sum(0), 3 * VALUES + 3)
    assert [entry[1:] for entry in owner.log] == [(mine, also_mine)]
    assert [entry[1:] for entry in second.log] == [(theirs,)]


def test_a_failed_operation_gives_the_weights_back(owner: NotedOwner) -> None:
    param = owner.make()
    with pytest.raises(RuntimeError):
        param @ torch.ones(7)
    assert state(param) == "ShardedParameter"


WRITES = {
    "method": lambda param: param.mul_(2),
    "item": lambda param: param.__setitem__(0, 1.0),
    "operator": lambda param: param.__iadd__(1),
    "function": lambda param: torch.neg_(param),
    "alias": lambda param: param.detach().mul_(2),
    "list": lambda param: torch._foreach_mul_([torch.ones(1), param], 2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_refused_before_anything_is_lent_unless_the_owner_keeps_them(write: Any) -> None:
    owner = NotedOwner()
    param = owner.make()
    with torch.no_grad(), pytest.raises(WeightsError, match="changed in place"):
        write(param)
    assert owner.num_loans == 0
    keeper = NotedOwner(keeps_writes=True)
    param = keeper.make()
    with torch.no_grad():
        write(param)
    assert keeper.num_loans == 1
    assert not torch.equal(keeper.weights[id(param)], VALUES)


def test_writing_into_something_else_from_a_weight_is_no_write(owner: NotedOwner) -> None:
    param, target = owner.make(), torch.zeros(2, 3)
    target.add_(param.detach())
    target += param.detach()
    target[0] = param.detach()[0]
    assert torch.equal(target[1], 2 * VALUES[1])
    assert torch.equal(param + 1 - 1, VALUES), "nor is arithmetic"
    assert bool((param == VALUES).all())


@pytest.mark.parametrize(
    "reach", ["data_ptr", "untyped_storage", "storage", "share_memory_", "pin_memory", "__dlpack__"]
)
def test_memory_that_is_given_back_cannot_be_reached(owner: NotedOwner, reach: str) -> None:
    param = owner.make()
    for tensor in (param, param.detach()):
        with pytest.raises(WeightsError, match="reach into memory"):
            getattr(tensor, reach)()
    assert owner.num_loans == 0


def test_gradients_and_data_are_the_owners_affair(owner: NotedOwner) -> None:
    param = owner.make()
    owner.gradient = torch.ones(2, 3)
    assert param.grad is owner.gradient
    param.grad = None
    del param.grad
    assert owner.log == [("gradient", None)] * 2
    replacement = torch.zeros(1)
    param.data = replacement
    assert owner.log[-1] == ("data", replacement)
    num_entries = len(owner.log)
    param.data = param.data
    param.data = param
    assert len(owner.log) == num_entries
    with pytest.raises(WeightsError, match="changed in place"):
        param.detach().data = replacement
    other = owner.make()
    param.data = other.detach()
    assert owner.log[-1][0] == "data"


def test_the_same_is_asked_while_the_weights_are_here(owner: NotedOwner) -> None:
    param = owner.make()
    owner.gradient = torch.ones(2, 3)
    with owner.borrow([param]):
        assert state(param) == "UnshardedParameter"
        assert param.grad is owner.gradient
        param.grad = None
        replacement = torch.zeros(1)
        param.data = replacement
        assert owner.log[-2:] == [("gradient", None), ("data", replacement)]
        version = param._version
        with torch.no_grad():
            param.data.mul_(2)
        assert param._version > version, "what is written to .data shows"
        assert copy.deepcopy(param).shape == (1,)
        loaded = pickle.loads(pickle.dumps(param))
        assert state(loaded) == "Parameter"
        assert torch.equal(loaded, param)


def test_copies_are_the_owners_and_pickles_are_refused(owner: NotedOwner) -> None:
    param = owner.make()
    first, second = copy.deepcopy([param, param])
    assert first is second
    assert [entry for entry in owner.log if entry[0] == "copy"] == [("copy",)]
    for tensor in (param, param.detach()):
        with pytest.raises(WeightsError, match=r"pickled.*full_state_dict"):
            pickle.dumps(tensor)


def test_the_dialects_attributes_are_the_owners_answers(owner: NotedOwner) -> None:
    param, other = owner.make(), owner.make()
    assert isinstance(param, access.ShardedParameter)
    assert (param.ds_shape, param.ds_numel, param.ds_persist) == ((2, 3), 6, False)
    assert param.ds_tensor.tolist() == [0, 1]
    assert param.ds_id == param.ds_id != other.ds_id  # type: ignore[attr-defined]
    assert param.ds_status.name == "NOT_AVAILABLE"
    with owner.borrow([param]):
        assert param.ds_status.name == "AVAILABLE"
    assert param.ds_summary()["shape"] == (2, 3)
    assert not hasattr(nn.Parameter(VALUES), "ds_id")


def test_weights_stay_until_they_are_given_up_as_often_as_they_were_asked_for(owner: NotedOwner) -> None:
    param, other = owner.make(), owner.make()
    assert isinstance(param, access.ShardedParameter)
    param.partition()
    param.all_gather([param, other, nn.Parameter(VALUES)])
    assert [state(param), state(other)] == ["UnshardedParameter"] * 2
    param.partition()
    assert [state(param), state(other)] == ["ShardedParameter", "UnshardedParameter"]
    assert owner.log[-1] == ("kept", param)
    param.partition([param, other])
    assert [state(param), state(other)] == ["ShardedParameter"] * 2
    assert owner.log[-1] == ("kept", other)


# Aliases.


def test_an_alias_says_what_the_weights_are_today(owner: NotedOwner) -> None:
    param = owner.make()
    aliases = [param.detach(), param.data, param.detach().detach(), param.detach().data]
    assert all(type(alias) is access.ShardedAlias and alias.param is param for alias in aliases)
    assert owner.num_loans == 0
    assert "sharded=True" in repr(aliases[0])
    owner.weights[id(param)] = VALUES + 5
    for alias in aliases:
        assert alias.requires_grad is False
        assert torch.equal(alias * 1, VALUES + 5)
    copied = copy.deepcopy(aliases[0])
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, VALUES + 5)


class Pair(NamedTuple):
    first: Any
    second: Any


def test_aliases_are_found_wherever_arguments_hold_them(owner: NotedOwner) -> None:
    param = owner.make()
    alias = param.detach()

    def total(values: Any) -> torch.Tensor:
        assert all(type(each) is not access.ShardedAlias for each in torch.utils._pytree.tree_leaves(values))
        return sum(torch.utils._pytree.tree_leaves(values), torch.zeros(2, 3))

    for structure in ([alias], (alias,), {"a": alias}, Pair(alias, 0), [{"b": (alias, [0])}]):
        found = access.lend(total, (structure,), {})
        assert torch.equal(found, VALUES)
        assert torch.equal(access.lend(total, (), {"values": structure}), VALUES)
    found = access.lend(lambda pair: pair, (Pair(alias, 3),), {})
    assert isinstance(found, Pair)
    assert found.second == 3


def test_an_unreadable_alias_is_refused_and_says_its_facts(owner: NotedOwner) -> None:
    entry = owner.make().detach().make_unreadable()  # type: ignore[attr-defined]
    assert (entry.shape, entry.dtype) == ((2, 3), torch.float32)
    with pytest.raises(WeightsError, match="state dict"):
        entry.clone()
    assert owner.num_loans == 0


def test_a_weight_that_cannot_be_found_is_said_to_be() -> None:
    with pytest.raises(TypeError, match="takes a sharded parameter where it is not found"):
        access.lend(len, ([],), {})


def test_a_tensor_that_is_set_goes_to_who_keeps_writes_and_nothing_else_does(owner: NotedOwner) -> None:
    keeper, new = NotedOwner(keeps_writes=True), torch.zeros(1)
    param: Any = keeper.make()
    assert param.set_(new) is param
    assert keeper.log[-1] == ("data", new)
    others: Any = owner.make()
    refused: list[tuple[Any, ...]] = [(), (new, 0), (new.untyped_storage(),)]
    for source in refused:
        with pytest.raises(WeightsError, match="set_ would reach into memory"):
            param.set_(*source)
    with pytest.raises(WeightsError, match="set_ would reach into memory"):
        param.set_(new, storage_offset=0)
    with pytest.raises(WeightsError, match="set_ would reach into memory"):
        others.set_(new)


def test_new_weights_are_refused_by_who_says_nothing_of_them(owner: NotedOwner) -> None:
    with pytest.raises(WeightsError, match="cannot be given new weights"):
        owner.overwrite([(owner.make(), lambda first, numel: torch.zeros(numel))])


def test_memory_is_given_by_who_keeps_writes_alone(owner: NotedOwner) -> None:
    assert access.memory_of(VALUES) is VALUES
    for tensor in ((param := owner.make()), param.detach()):
        with pytest.raises(WeightsError, match="share its memory"):
            access.memory_of(tensor)
    kept = NotedOwner(keeps_writes=True).make()
    for tensor in (kept, kept.detach()):
        found = access.memory_of(tensor)
        assert type(found) is torch.Tensor
        assert torch.equal(found, VALUES)


# What comes out.


def test_an_array_of_numpys_cannot_be_written_to(owner: NotedOwner) -> None:
    array = owner.make().detach().numpy()
    assert not array.flags.writeable
    assert array.tolist() == VALUES.tolist()


def test_a_parameter_that_is_returned_is_itself(owner: NotedOwner) -> None:
    param = owner.make()
    assert access.lend(lambda each: each, (param,), {}) is param


def test_a_gradient_is_taken_seen_and_dropped(owner: NotedOwner) -> None:
    param = owner.make()
    gradient = torch.ones(2, 3)
    for look in (access.take_gradient, access.own_gradient):
        with access.raw():
            param.grad = gradient
        assert look(param) is gradient
    assert access.own_gradient(param) is gradient
    access.drop_gradient(param)
    assert access.own_gradient(param) is None
    assert access.take_gradient(param) is None

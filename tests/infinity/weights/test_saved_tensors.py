"""What autograd's hooks make of tensors: notes of weights, the rest as it is, over parameters without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from infinity.errors import WeightsError
from infinity.weights import saved_tensors
from infinity.weights.param import ShardedParam
from infinity.weights.saved_tensors import (
    SavedByUser,
    SavedCast,
    SavedTensor,
    SavedTensors,
    SavedWeights,
    stale_graphs_named,
)

VALUES = torch.arange(12.0).view(3, 4) - 5


def test_only_what_torch_says_of_writes_is_said_in_our_words() -> None:
    ours = WeightsError("block", "was modified by an inplace operation", "do not")
    for error in (RuntimeError("out of memory"), ours, ValueError("modified by an inplace operation")):
        with pytest.raises(type(error)) as raised, stale_graphs_named("block"):
            raise error
        assert raised.value is error
    with pytest.raises(WeightsError, match=r"^block cannot be differentiated: x modified by an inplace operation: "):  # noqa: SIM117
        with stale_graphs_named("block"):
            raise RuntimeError("x modified by an inplace operation. Hint: none")


class Fixture:
    """A parameter whose weights are here, as while a module is called."""

    def __init__(self, values: torch.Tensor = VALUES) -> None:
        self.resident: dict[int, ShardedParam] = {}
        self.param = nn.Parameter(values.clone())
        self.sharded = ShardedParam(0, "p", self.param, torch.float32, torch.device("cpu"), self.resident)
        self.sharded.allocate()
        self.brought: list[ShardedParam] = []
        self.cast: list[ShardedParam] = []
        self.saved = SavedTensors({id(self.param): self.sharded}, self.resident, self.bring, self.cast.extend)
        self.values = values
        self.fill()

    def fill(self) -> None:
        full = self.sharded.full
        assert full is not None
        full.copy_(self.values)
        self.param.data = full

    def bring(self, param: ShardedParam) -> torch.Tensor:
        self.brought.append(param)
        if param.full is None:
            param.allocate()
            self.fill()
        assert param.full is not None
        return param.full

    def drop(self) -> None:
        self.param.data = torch.full((), torch.nan).expand(self.values.shape)
        self.sharded.drop()

    def packed(self, *tensors: torch.Tensor) -> list[Any]:
        """What the hooks of a call make of tensors."""
        with self.saved.around_call():
            pack: Any = saved_tensors._top()
            return [pack[0](tensor) for tensor in tensors]

    def unpacked(self, packed: Any) -> torch.Tensor:
        with self.saved.around_call():
            hooks: Any = saved_tensors._top()
            found: torch.Tensor = hooks[1](packed)
            return found


def test_views_of_weights_become_notes_and_come_back_as_they_lay() -> None:
    fixture = Fixture()
    views = [
        self_view(fixture.param) for self_view in (lambda p: p, lambda p: p.t(), lambda p: p[1:, ::2], torch.flatten)
    ]
    expected = [view.detach().clone() for view in views]
    notes = fixture.packed(*views)
    assert all(type(note) is SavedWeights and note.param is fixture.sharded for note in notes)
    strides = [view.stride() for view in views]
    del views
    fixture.drop()
    for note, values, stride in zip(notes, expected, strides, strict=True):
        found = fixture.unpacked(note)
        assert torch.equal(found, values)
        assert found.stride() == stride
    assert fixture.brought == [fixture.sharded] * 4


def test_weights_that_an_update_has_changed_are_refused_by_name() -> None:
    fixture = Fixture()
    (note,) = fixture.packed(fixture.param.t())
    fixture.sharded.count_update()
    with pytest.raises(WeightsError, match=r"p.*modified by an inplace operation"):
        fixture.unpacked(note)
    (again,) = fixture.packed(fixture.param.t())
    assert torch.equal(fixture.unpacked(again), VALUES.t())


def test_everything_else_is_kept_with_its_version() -> None:
    fixture = Fixture()
    tensor = torch.ones(3)
    (note,) = fixture.packed(tensor)
    assert type(note) is SavedTensor
    assert fixture.unpacked(note) is tensor
    tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; expected version 0"):
        fixture.unpacked(note)
    assert fixture.brought == []


def test_an_output_is_kept_without_its_history() -> None:
    fixture = Fixture()
    output = torch.ones(3, requires_grad=True) * 2
    (note,) = fixture.packed(output)
    assert note.tensor is not output
    assert note.tensor.grad_fn is None
    assert note.tensor.data_ptr() == output.data_ptr()
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        fixture.unpacked(note)


def test_views_in_another_guise_are_no_weights() -> None:
    """Another dtype, conjugated, sparse, or without a storage: kept themselves."""
    fixture = Fixture()
    bits = fixture.param.detach().view(torch.int32)
    sparse = torch.eye(3).to_sparse()
    for tensor in (bits, sparse):
        (note,) = fixture.packed(tensor)
        assert type(note) is SavedTensor
    assert fixture.saved.find(fixture.param.detach()[0]) is fixture.sharded
    assert fixture.saved.find(torch.ones(3)) is None
    assert fixture.saved.find(bits) is None
    assert fixture.saved.find(sparse) is None


def test_a_view_of_weights_that_have_gone_keeps_their_memory_whatever_is_written_to_the_parameter() -> None:
    fixture = Fixture()
    view = fixture.param[1:]
    fixture.drop()
    (note,) = fixture.packed(view)
    assert type(note) is SavedTensor
    assert note.version is None
    assert torch.equal(fixture.unpacked(note), VALUES[1:])


# Casts.


def test_what_autocast_has_cast_is_cast_again() -> None:
    fixture = Fixture()
    with torch.autocast("cpu", torch.bfloat16), fixture.saved.around_call():
        cast = fixture.param.to(torch.bfloat16)
        notes = fixture.packed(cast, cast.t())
    assert all(type(note) is SavedCast for note in notes)
    del cast
    fixture.drop()
    assert torch.equal(fixture.unpacked(notes[0]), VALUES.bfloat16())
    assert torch.equal(fixture.unpacked(notes[1]), VALUES.bfloat16().t())


def test_what_an_operation_under_autocast_saves_is_no_cast_that_is_kept() -> None:
    """Inside the operation torch says that autocast is off."""
    fixture = Fixture()
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fixture.saved.around_call():
        output = nn.functional.linear(x, fixture.param)
    assert fixture.cast == [fixture.sharded]
    fixture.drop()
    output.float().sum().backward()  # type: ignore[no-untyped-call]
    assert fixture.brought == [fixture.sharded]
    assert x.grad is not None
    assert torch.equal(x.grad, VALUES.bfloat16().float().sum(0).bfloat16().float().expand(2, 4))


def test_other_casts_are_kept() -> None:
    fixture = Fixture()
    earlier = fixture.param.to(torch.bfloat16)  # of weights that may have been others
    with fixture.saved.around_call():
        others = [
            earlier,
            torch.view_as_complex(fixture.param.view(3, 2, 2).double()),
            (fixture.param * 2).to(torch.bfloat16),
            fixture.param.detach().to(torch.bfloat16),
            torch.ones(3, 4, requires_grad=True).to(torch.bfloat16),
        ]
        written = fixture.param.to(torch.bfloat16)
        with torch.no_grad():
            written.add_(1)
        notes = fixture.packed(*others, written)
    assert [type(note) for note in notes] == [SavedTensor] * 6


# Whole graphs, and the user's own hooks.


def gradient_of(fixture: Fixture, *, drop: bool = True) -> torch.Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    with fixture.saved.around_call():
        output = (x @ fixture.param.t()).square().sum()
    if drop:
        fixture.drop()
    torch.autograd.backward(output)
    assert x.grad is not None
    return x.grad


def expected_gradient() -> torch.Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.backward((x @ VALUES.t()).square().sum())
    assert x.grad is not None
    return x.grad


def test_backward_has_the_weights_brought() -> None:
    fixture = Fixture()
    assert torch.equal(gradient_of(fixture), expected_gradient())
    assert fixture.brought


class UserHooks:
    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self.num_unpacked = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        self.packed.append(tensor)
        return ("user", tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        self.num_unpacked += 1
        found: torch.Tensor = packed[1]
        return found


def test_save_on_cpu_around_a_call_sees_everything_but_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, user = Fixture(), UserHooks()
    monkeypatch.setattr(UserHooks.pack, "__module__", "torch.autograd.graph")
    with saved_tensors_hooks(user.pack, user.unpack):
        assert torch.equal(gradient_of(fixture), expected_gradient())
        notes = fixture.packed(torch.ones(2), fixture.sharded.layout)
    assert user.packed
    assert user.num_unpacked > 0
    assert all(tensor.shape != (3, 4) or tensor.is_meta for tensor in user.packed)
    assert type(notes[0]) is SavedByUser


def test_hooks_of_the_users_around_a_call_see_weights_and_a_parameter_as_one() -> None:
    fixture, user = Fixture(), UserHooks()
    with saved_tensors_hooks(user.pack, user.unpack):
        assert torch.equal(gradient_of(fixture), expected_gradient())
        (noted,) = fixture.packed(fixture.param)
    assert any(tensor.shape == (4, 3) for tensor in user.packed), "the weight's transpose"
    assert type(noted[1]) is SavedWeights
    assert isinstance(user.packed[-1], nn.Parameter)
    assert user.packed[-1] is not fixture.param


def test_hooks_of_the_users_inside_a_call_see_every_tensor_and_never_the_parameter() -> None:
    fixture, user = Fixture(), UserHooks()
    x = torch.ones(2, 4, requires_grad=True)
    beside = fixture.saved.beside_user_hooks
    with fixture.saved.around_call(), saved_tensors_hooks(user.pack, user.unpack), beside(), beside():
        output = torch.nn.functional.linear(x, fixture.param).square().sum()
        top: Any = saved_tensors._top()
        noted = top[0](fixture.param)
    alias = user.packed[-1]
    assert [type(part) for part in noted] == [str, SavedWeights], "which keeps no memory"
    assert any(tensor.numel() == 12 for tensor in user.packed)
    assert all(tensor is not fixture.param for tensor in user.packed)
    assert alias.requires_grad
    assert alias.data_ptr() == fixture.param.data_ptr()
    torch.autograd.backward(output)
    assert x.grad is not None
    assert torch.equal(x.grad, expected_gradient())


def test_ours_are_pushed_once_and_not_inside_of_themselves() -> None:
    fixture = Fixture()
    assert saved_tensors._top() is None
    with fixture.saved.around_call():
        first = saved_tensors._top()
        with fixture.saved.around_call(), fixture.saved.beside_user_hooks():
            assert saved_tensors._top() == first
    assert saved_tensors._top() is None
    with fixture.saved.beside_user_hooks():
        assert saved_tensors._top() is None


def test_checkpointing_sees_the_same_in_forward_and_when_it_is_recomputed() -> None:
    fixture = Fixture()

    def part(x: torch.Tensor) -> torch.Tensor:
        with fixture.saved.around_call():
            assert type(fixture.saved._params) is dict
            return (x @ fixture.param.t()).square()

    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.backward(checkpoint(part, x, use_reentrant=False).sum())
    assert x.grad is not None
    assert torch.equal(x.grad, expected_gradient())


def test_hooks_may_be_switched_off() -> None:
    assert saved_tensors.hooks_are_allowed()
    with torch.autograd.graph.disable_saved_tensors_hooks("off"):
        assert not saved_tensors.hooks_are_allowed()


def test_inside_the_users_hooks_an_operation_of_its_own_shows_them_every_tensor() -> None:
    """Checkpointing counts what it sees, and a weight that was borrowed for one operation may be held in the other."""
    fixture = Fixture()
    x = torch.ones(2, 4, requires_grad=True)
    seen: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.shape)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed),
        fixture.saved.beside_user_hooks(),
        fixture.saved.around_call(),
    ):
        x @ fixture.param.t()
    assert sorted(seen) == [torch.Size([2, 4]), torch.Size([4, 3])]


def test_another_owners_hooks_around_a_call_pass_on_what_is_not_theirs() -> None:
    """A model that calls another engine's: each notes its own weights, and backward finds both."""
    outer, inner = Fixture(), Fixture()
    x = torch.ones(2, 4, requires_grad=True)
    with outer.saved.around_call(), inner.saved.around_call(), outer.saved.beside_user_hooks():
        first: Any = saved_tensors._top()
        y = torch.nn.functional.linear(x, outer.param)
        z = torch.nn.functional.linear(torch.cat([y, y[:, :1]], 1), inner.param).square().sum()
        theirs = first[0](outer.param)
        with inner.saved.beside_user_hooks():
            top: Any = saved_tensors._top()
            own = top[0](inner.param)
    assert first[0].owner is outer.saved
    assert type(own) is type(theirs) is SavedWeights
    torch.autograd.backward(z)
    assert x.grad is not None


def test_hooks_that_an_interrupt_has_left_pass_all_on_once_their_engine_is_over() -> None:
    left, fixture = Fixture(), Fixture()
    stays = left.saved.around_call()
    stays.__enter__()  # and nobody leaves it
    try:
        left.saved.end()
        assert torch.equal(gradient_of(fixture), expected_gradient())
    finally:
        stays.__exit__(None, None, None)


def test_backward_goes_by_the_weights_that_were_brought_whatever_another_thread_does_with_them() -> None:
    """Its evaluation may give them up and gather them anew, into memory that holds anything until it is filled."""
    fixture = Fixture()
    (note,) = fixture.packed(fixture.param.t())

    def bring(param: ShardedParam) -> torch.Tensor:
        weights = fixture.bring(param)
        fixture.drop()
        param.allocate().fill_(torch.nan)
        return weights

    fixture.saved._bring = bring
    assert torch.equal(fixture.unpacked(note), VALUES.t())

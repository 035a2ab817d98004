"""An optimizer that was taken over: what it had is the engine's, says so whatever is asked, and can be given back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from infinity.errors import EngineStateError
from infinity.update.stored_state import StoredState, refuse_group, retire, take_back

ASKED: dict[str, Callable[[StoredState], Any]] = {
    "get": lambda state: state[0],
    "set": lambda state: state.__setitem__(0, 1),
    "delete": lambda state: state.__delitem__(0),
    "iterate": lambda state: list(state),
    "length": len,
    "contains": lambda state: 0 in state,
    "truth": bool,
    "items": lambda state: state.items(),
    "keys": lambda state: state.keys(),
    "values": lambda state: state.values(),
    "get with default": lambda state: state.get(0),
    "pop": lambda state: state.pop(0, None),
    "popitem": lambda state: state.popitem(),
    "setdefault": lambda state: state.setdefault(0, 1),
    "update": lambda state: state.update({0: 1}),
    "clear": lambda state: state.clear(),
    "copy": lambda state: state.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "equal": lambda state: state == {},
    "or": lambda state: state | {},
    "union in place": lambda state: state.__ior__({}),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_state_that_is_elsewhere_says_so_whatever_is_asked(ask: Callable[[StoredState], Any]) -> None:
    with pytest.raises(EngineStateError, match=r"in the engine's store.*safe_get_full_optimizer_state"):
        ask(StoredState())


def test_it_may_be_shown() -> None:
    assert "store" in repr(StoredState())


class Successor:
    def __init__(self) -> None:
        self.taken: list[Any] = []

    def pack(self) -> dict[str, Any]:
        return {"state": {0: 1}, "param_groups": []}

    def unpack(self, packed: Any) -> None:
        self.taken.append(packed)


def made() -> optim.SGD:
    return optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)


def test_an_optimizer_that_was_taken_over_refuses_by_its_class() -> None:
    optimizer = made()
    groups = optimizer.param_groups
    retire(optimizer, Successor())
    assert optimizer.param_groups is groups
    assert isinstance(optimizer.state, StoredState)
    with pytest.raises(EngineStateError, match=r"SGD that was passed.*engine.step"):
        optimizer.step()
    with pytest.raises(EngineStateError, match=r"shapes \[\(3, 4\)\]"):
        optimizer.add_param_group({"params": torch.ones(3, 4)})
    optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps step(), and warns where nobody has


def test_its_state_dict_is_its_successors_while_there_is_one() -> None:
    optimizer, successor = made(), Successor()
    retire(optimizer, successor)
    optimizer.load_state_dict(optimizer.state_dict())
    assert successor.taken == [{"state": {0: 1}, "param_groups": []}]
    del successor
    with pytest.raises(EngineStateError, match="save_checkpoint"):
        optimizer.state_dict()
    with pytest.raises(EngineStateError, match="load_checkpoint"):
        optimizer.load_state_dict({})


@pytest.mark.parametrize("wrapped", [False, True])
def test_it_can_be_taken_back(wrapped: bool) -> None:
    optimizer = made()
    if wrapped:
        optim.lr_scheduler.StepLR(optimizer, 1)
    own = {name: optimizer.__dict__.get(name) for name in ("step", "add_param_group")}
    assert (own["step"] is not None) is wrapped
    before = set(vars(optimizer))
    retire(optimizer, Successor())
    take_back(optimizer)
    assert set(vars(optimizer)) == before
    assert {name: optimizer.__dict__.get(name) for name in own} == own
    assert len(optimizer.state) == 0
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2,), 0.9))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    take_back(optimizer)
    assert len(optimizer.state[param]) == 1, "one that is nobody's keeps what it has"


@pytest.mark.parametrize(
    ("group", "shapes"),
    [
        ({"params": torch.ones(2)}, r"\[\(2,\)\]"),
        ({"params": [torch.ones(2), torch.ones(3, 1)]}, r"\[\(2,\), \(3, 1\)\]"),
        ({"params": [("name", torch.ones(2)), torch.ones(())]}, r"\[\(\)\]"),
        ({}, r"\[\]"),
    ],
)
def test_a_group_that_comes_late_is_told_by_its_shapes(group: dict[str, Any], shapes: str) -> None:
    with pytest.raises(EngineStateError, match=f"of shapes {shapes} after"):
        refuse_group(group)

"""Parameters whose engine has ended: whoever asks for their weights is told so by name, whatever is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights import access, owners
from infinity.weights.ended import Ended
from infinity.weights.param import ShardedParam

ASKED: dict[str, Callable[[Ended, nn.Parameter], Any]] = {
    "borrow": lambda ended, param: ended.borrow([param]),
    "gathered": lambda ended, param: ended.gathered([param], None),
    "gathered-to-write": lambda ended, param: ended.gathered([param], 0),
    "shard_of": lambda ended, param: ended.shard_of(param),
    "set_gradient": lambda ended, param: ended.set_gradient(param, torch.ones(2, 3)),
    "set_data": lambda ended, param: ended.set_data(param, torch.ones(2, 3)),
    "copy": lambda ended, param: ended.copy(param),
    "remake": lambda ended, param: ended.remake(param),
    "overwrite": lambda ended, param: ended.overwrite([(param, lambda first, numel: torch.zeros(numel))]),
}


@pytest.fixture
def param() -> nn.Parameter:
    made = nn.Parameter(torch.ones(3, 2).t())
    sharded = ShardedParam(0, "layer.weight", made, torch.float32, torch.device("cpu"))
    access.hide(made, sharded.placeholder)
    owners.adopt(made, Ended([sharded]))
    return made


def ended(param: nn.Parameter) -> Ended:
    found = owners.owner_of(param)
    assert isinstance(found, Ended)
    return found


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_what_needs_weights_is_refused_by_name(param: nn.Parameter, ask: Callable[[Ended, nn.Parameter], Any]) -> None:
    with pytest.raises(WeightsError, match=r"layer\.weight \(shape \(2, 3\)\)"):
        ask(ended(param), param)


def test_no_way_to_weights_is_left_out() -> None:
    answered = {"alias", "is_persistent", "layout_of", "gradient_of", "refuse"}
    abstract = set(owners.Owner.__abstractmethods__) | {"remake", "overwrite"}
    assert abstract - answered == {name.partition("-")[0] for name in ASKED}


def test_operations_and_their_remedy(param: nn.Parameter) -> None:
    for use in (lambda: param + 1, lambda: param.data.sum(), lambda: param.detach().tolist(), lambda: param.clone()):
        with pytest.raises(WeightsError, match=r"layer\.weight .*after its engine ended.*full_state_dict\(\) before"):
            use()


def test_what_needs_no_weights_is_answered(param: nn.Parameter) -> None:
    owner = ended(param)
    assert param.stride() == (1, 2)
    assert param.shape == (2, 3)
    assert owner.name_of(param) == "layer.weight"
    assert owner.is_persistent(param) is False
    assert param.grad is None


def test_a_gradient_that_was_left_is_shown_until_it_is_dropped(param: nn.Parameter) -> None:
    left = torch.ones(2, 3)
    access.put_gradient(param, left)
    assert ended(param).gradient_of(param) is left
    param.grad = None
    assert ended(param).gradient_of(param) is None

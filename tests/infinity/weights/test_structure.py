"""What becomes of a model after it was sharded: what may come and go, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights import owners
from infinity.weights.structure import Structure


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight.requires_grad_(False)


@pytest.fixture
def model() -> Iterator[Net]:
    """A model whose parameters somebody owns."""
    net = Net()
    params, owner = list(net.parameters()), cast(owners.Owner, object())
    for param in params:
        owners.adopt(param, owner)
    yield net
    for param in params:
        owners.disown(param)


def structure_of(model: Net) -> Structure:
    return Structure(model, [("second.weight", model.get_parameter("second.weight"))])


def test_a_model_as_it_was_passes_without_a_look_at_its_parameters(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    structure = structure_of(model)
    monkeypatch.setattr(Net, "named_parameters", None)
    structure.check()


def test_a_frozen_parameter_that_begins_to_train_is_refused(model: Net) -> None:
    structure = structure_of(model)
    model.second.weight.requires_grad_(True)
    with pytest.raises(WeightsError, match=r"second\.weight.*was frozen"):
        structure.check()
    model.second.weight.requires_grad_(False)
    structure.check()


def test_a_new_parameter_is_refused_if_it_would_have_to_train(model: Net) -> None:
    structure = structure_of(model)
    model.first.register_parameter("scale", nn.Parameter(torch.ones(2)))
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"first\.scale.*came after"):
            structure.check()
    model.first.scale.requires_grad_(False)
    structure.check()


@pytest.mark.parametrize("where", ["replaced", "in a new module", "in a replaced module", "one for another"])
def test_wherever_it_comes(model: Net, where: str) -> None:
    structure = structure_of(model)
    if where == "replaced":
        model.first.weight = nn.Parameter(torch.ones(2, 2))
    elif where == "in a new module":
        model.add_module("third", nn.Linear(2, 2))
    elif where == "in a replaced module":
        model.first = nn.Linear(2, 2)
    else:
        del model.first.bias
        model.first.register_parameter("shift", nn.Parameter(torch.ones(2)))
    with pytest.raises(WeightsError, match="came after"):
        structure.check()


def test_what_a_checkpoint_would_lack_is_named(model: Net) -> None:
    structure = structure_of(model)
    structure.check_owned("a file")
    del model.second
    structure.check_owned("a file")
    model.first.register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
    with pytest.raises(WeightsError, match=r"first\.scale.*a file would lack it"):
        structure.check_owned("a file")


def test_what_goes_and_what_is_not_trained_may_come(model: Net) -> None:
    structure = structure_of(model)
    model.first.register_parameter("bias", None)
    structure.check()
    model.add_module("observer", nn.BatchNorm1d(2, affine=False))
    structure.check()
    model.add_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    structure.check()
    del model.second
    structure.check()


def test_tensors_that_only_stand_among_parameters_are_not_looked_at(model: Net) -> None:
    structure = structure_of(model)
    plain: Any = torch.ones(2, requires_grad=True)
    model.first._parameters["mixed"] = plain
    structure.check()


def test_what_was_looked_at_is_not_looked_at_again(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    structure = structure_of(model)
    model.add_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    structure.check()
    monkeypatch.setattr(Net, "named_parameters", None)
    structure.check()

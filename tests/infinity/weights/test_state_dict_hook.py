"""A state dict's entries: weights that are here are there, others refuse to be read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights import access, owners
from infinity.weights.ended import Ended
from infinity.weights.param import ShardedParam
from infinity.weights.state_dicts import StateDictHook


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.away, self.here, self.plain = (nn.Parameter(torch.full((2, 3), float(i))) for i in range(3))
        self.nothing: nn.Parameter
        self.register_parameter("nothing", None)
        self.register_buffer("count", torch.ones(2))


@pytest.fixture
def model() -> Model:
    model = Model()
    owner = {}
    for name in ("away", "here"):
        param = getattr(model, name)
        owner[name] = sharded = ShardedParam(0, name, param, torch.float32, torch.device("cpu"))
        owners.adopt(param, Ended([sharded]))
    access.show(model.here, torch.full((2, 3), 7.0))
    access.hide(model.away, owner["away"].placeholder)
    model.register_state_dict_post_hook(StateDictHook("net"))  # type: ignore[no-untyped-call]
    return model


READ: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda entry: entry.tolist(), r"its entry in a state dict holds no weights"),
    (lambda entry: entry.clone(), r"its entry in a state dict holds no weights"),
    (copy.deepcopy, r"its entry in a state dict holds no weights"),
    (pickle.dumps, r"a copy of it, pickled, would hold no weights"),
]
"""Without the hook whoever reads it would be lent the weights of the day, one by one."""


def test_what_is_here_is_there_and_what_is_nobodys_too(model: Model) -> None:
    found = model.state_dict(prefix="net.")
    assert list(found) == ["net.away", "net.here", "net.plain", "net.count"]
    assert torch.equal(found["net.here"], torch.full((2, 3), 7.0))
    assert torch.equal(found["net.plain"], torch.full((2, 3), 2.0))
    assert found["net.plain"].data_ptr() == model.plain.data_ptr()
    assert (found["net.away"].shape, found["net.away"].dtype) == ((2, 3), torch.float32)


@pytest.mark.parametrize(("read", "words"), READ)
def test_what_is_elsewhere_refuses_to_be_read(model: Model, read: Callable[[torch.Tensor], Any], words: str) -> None:
    entry = model.state_dict()["away"]
    with pytest.raises(WeightsError, match=f"away.*{words}"):
        read(entry)


def test_what_is_elsewhere_has_a_storage_of_its_own(model: Model) -> None:
    """Transformers tells entries apart by them, on ranks that write nothing, too."""
    model.tied = model.away
    found = model.state_dict()
    storages = {name: entry.untyped_storage() for name, entry in found.items()}
    assert len({storage.data_ptr() for storage in storages.values()}) == len(found)
    assert (storages["away"].nbytes(), storages["away"].device) == (24, torch.device("cpu"))


def test_with_their_variables_asked_for_parameters_are_themselves(model: Model) -> None:
    found = model.state_dict(keep_vars=True)
    assert all(found[name] is getattr(model, name) for name in ("away", "here", "plain"))


def test_what_somebody_has_left_out_stays_out(model: Model) -> None:
    hook = StateDictHook("net")
    found = {"here": model.here.detach()}
    hook(model, found, "", None)
    assert list(found) == ["here"]


@pytest.mark.parametrize(("make", "how"), [(copy.deepcopy, "copied"), (pickle.dumps, "pickled")])
def test_a_module_that_has_it_is_neither_copied_nor_pickled(make: Callable[[Any], Any], how: str) -> None:
    with pytest.raises(WeightsError, match=f"net.*cannot be {how}.*full_state_dict"):
        make(StateDictHook("net"))

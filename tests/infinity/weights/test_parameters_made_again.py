"""``nn.Parameter(param)`` and ``param.set_`` or ``.data =`` with other values, of parameters that somebody owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import infinity
from infinity.errors import ConfigError, WeightsError

WIDTH = 20


def config(persistent_numel: int = 0) -> dict[str, Any]:
    """Next to nothing stays in memory while a model is built."""
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": persistent_numel,
        "stage3_prefetch_bucket_size": 100,
        "stage3_max_live_parameters": 0,
    }
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}


def linears() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def weight(model: nn.Module, index: int = 0) -> nn.Parameter:
    return model.get_parameter(f"{index}.weight")


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    with infinity.initialize(model=model, config=config())[0] as engine:
        weights = engine.full_state_dict()
    assert weights.keys() == reference.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in reference.state_dict().items())


def parametrized(model: nn.Sequential, change: Callable[[nn.Module], Any]) -> nn.Sequential:
    torch.manual_seed(1)
    for linear in model:
        change(linear)
    return model


@pytest.mark.parametrize("inside", [True, False], ids=["inside-Init", "after-Init"])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrization_of_staged_weights(kind: str, inside: bool) -> None:
    """Weight norm makes a parameter of the weight itself, orthogonal sets the weight's memory."""
    change = getattr(parametrizations, kind)
    with infinity.Init(config_dict_or_path=config()):
        model = linears()
        if inside:
            parametrized(model, change)
    if not inside:
        parametrized(model, change)
    assert_same_weights(model, parametrized(linears(), change))


class Replacing(nn.Module):
    """Gives a parameter other values of another shape, before or after it was staged."""

    def __init__(self, staged: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.replaced = nn.Parameter(torch.zeros(3))
        if staged:
            self.first = nn.Linear(WIDTH, WIDTH)
            self.replaced.sum()
        self.replaced.data = torch.arange(700.0)
        self.second, self.third = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize("staged", [False, True])
def test_a_constructor_that_replaces_what_it_has_registered(staged: bool) -> None:
    with infinity.Init(config_dict_or_path=config()):
        model = Replacing(staged)
    assert_same_weights(model, Replacing(staged))


def test_weights_set_to_those_of_another_staged_parameter_share_its_memory() -> None:
    with infinity.Init(config_dict_or_path=config()):
        model = linears()
    weight(model, 2).data = weight(model).data
    assert torch.equal(weight(model, 2), weight(model))
    with pytest.raises(ConfigError, match=r"2\.weight.*shares memory with 0\.weight"):
        infinity.initialize(model=model, config=config())


@pytest.mark.parametrize("persistent_numel", [0, 100_000])
def test_a_parameter_made_of_a_sharded_one_is_refused(persistent_numel: int) -> None:
    model = linears()
    with infinity.initialize(model=model, config=config(persistent_numel))[0]:
        with pytest.raises(WeightsError, match=r"0\.weight.*clone"):
            nn.Parameter(weight(model))
        made = nn.Parameter(weight(model).clone())
        assert torch.equal(made, weight(linears()))


def test_a_parameter_made_of_an_alias_is_refused() -> None:
    model = linears()
    with infinity.initialize(model=model, config=config())[0], pytest.raises(WeightsError, match=r"0\.weight.*clone"):
        nn.Parameter(weight(model).data)

"""A write to a copy of a shard is told, whoever makes it and whatever becomes of the copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.errors import WeightsError
from tests.support.state_story import build, config, loss_of

TOLD = r"0\.weight.*was changed through ds_tensor.*GatheredParameters"

WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "in_place": lambda shard: shard.mul_(2),
    "data": lambda shard: shard.data.fill_(1),
    "an_element": lambda shard: shard.view(-1).__setitem__(0, 7.0),
    "out": lambda shard: torch.add(shard, 1, out=shard),
    "another_tensor": lambda shard: torch.empty(0).set_(shard.untyped_storage()).fill_(7),
    "bytes": lambda shard: shard.view(torch.uint8).fill_(7),
    "an_array": lambda shard: shard.view(torch.uint8).numpy().fill(7),
}
GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda shard: setattr(shard, "data", torch.ones_like(shard)),
    "set_": lambda shard: shard.set_(torch.ones_like(shard).untyped_storage()),
}
NOTICED: dict[str, Callable[[Engine], Any]] = {
    "a_pass": lambda engine: engine(rows(engine)),
    "the_module_alone": lambda engine: engine.module(rows(engine)),
    "the_next_copy": lambda engine: shard_of(engine.module, "0.bias"),
    "an_export": lambda engine: engine.full_state_dict(),
}


def shard_of(module: nn.Module, name: str) -> torch.Tensor:
    param: Any = module.get_parameter(name)
    shard: torch.Tensor = param.ds_tensor
    return shard


def rows(engine: Engine) -> torch.Tensor:
    return torch.ones(3, 24, dtype=next(engine.module.parameters()).dtype)


@pytest.fixture(params=[("none", False), ("cpu", True)], ids=["none-fp32", "cpu-bf16"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    tier, bf16 = request.param
    made = infinity.initialize(model=build(), config=config(tier, str(tmp_path), bf16=bf16))[0]
    yield made
    made.destroy()


@pytest.mark.parametrize("keeps_it", [True, False], ids=["kept", "dropped"])
@pytest.mark.parametrize("way", WAYS)
def test_a_write_is_told_once(way: str, keeps_it: bool, engine: Engine) -> None:
    before = copy.deepcopy(engine.full_state_dict())
    shard = shard_of(engine.module, "0.weight")
    WAYS[way](shard)
    kept = shard if keeps_it else None
    del shard
    with pytest.raises(WeightsError, match=TOLD):
        engine.full_state_dict()
    assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
    assert (kept is None) is not keeps_it


@pytest.mark.parametrize("way", GIVEN)
def test_another_memory_is_refused_at_once(way: str, engine: Engine) -> None:
    with pytest.raises(WeightsError, match=TOLD):
        GIVEN[way](shard_of(engine.module, "0.weight"))
    own = shard_of(engine.module, "0.weight").clone()
    GIVEN[way](own)
    assert bool((own == 1).all())


@pytest.mark.parametrize("by", NOTICED)
def test_it_is_noticed_before_anything_stands_on_it(by: str, engine: Engine) -> None:
    shard_of(engine.module, "0.weight").zero_()
    with pytest.raises(WeightsError, match=TOLD):
        NOTICED[by](engine)


def test_what_is_written_between_backward_and_step_stops_the_update(engine: Engine) -> None:
    engine.backward(loss_of(engine, rows(engine)))
    shard_of(engine.module, "0.weight").zero_()
    with pytest.raises(WeightsError, match=TOLD):
        engine.step()
    engine.step()
    assert engine.global_steps == 1


def test_copies_that_are_only_read_are_nobodys_concern(engine: Engine) -> None:
    kept = [param.ds_tensor.clone().zero_() for param in engine.module.parameters()]  # type: ignore[attr-defined]
    shard = shard_of(engine.module, "0.weight")
    was = shard.clone()
    engine.backward(loss_of(engine, rows(engine)))
    engine.step()
    assert torch.equal(shard, was)
    assert not torch.equal(shard_of(engine.module, "0.weight"), was)
    assert len(kept) == len(list(engine.module.parameters()))


def gather(model: nn.Module, _settings: dict[str, Any]) -> None:
    with infinity.zero.GatheredParameters(model.get_parameter("0.weight")):
        pass


STAGED: dict[str, Callable[[nn.Module, dict[str, Any]], Any]] = {
    "gathered": gather,
    "initialize": lambda model, settings: infinity.initialize(model=model, config=settings),
    "the_next_copy": lambda model, _: shard_of(model, "0.bias"),
}


@pytest.mark.parametrize("use", STAGED)
def test_of_staged_parameters_too(use: str, tmp_path: Path) -> None:
    settings = config("cpu", str(tmp_path), bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        model = build()
    shard_of(model, "0.weight").zero_()
    with pytest.raises(WeightsError, match=r"shape \(50, 24\).*was changed through ds_tensor"):
        STAGED[use](model, settings)
    engine = infinity.initialize(model=model, config=settings)[0]
    assert torch.equal(engine.full_state_dict()["0.weight"], build().get_parameter("0.weight"))
    engine.destroy()


def test_each_engine_is_told_of_its_own(tmp_path: Path) -> None:
    settings = config("none", str(tmp_path), bf16=False)
    engines = [infinity.initialize(model=build(), config=settings)[0] for _ in range(2)]
    for made in engines:
        for name in ("0.weight", "0.bias"):
            shard_of(made.module, name).zero_()
            with pytest.raises(WeightsError, match=name.replace(".", r"\.")):
                shard_of(made.module, name)
    for made in engines:
        shard_of(made.module, "0.weight").zero_()
    for made in reversed(engines):
        with pytest.raises(WeightsError, match=TOLD):
            made.full_state_dict()
        made.full_state_dict()
        made.destroy()

"""Several models under one ``Init``, and one ``Init`` within another: each gets the engine that it would get alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError
from infinity.weights.ds_names import DsNames
from infinity.weights.staging import staged_param
from tests.support.ranks import run_ranks
from tests.support.state_story import config

TIERS = ["none", "cpu", "nvme"]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def start(model: nn.Module, settings: dict[str, Any]) -> Engine:
    engine: Engine = infinity.initialize(model=model, config=settings)[0]
    return engine


def step(engine: Engine, number: int) -> None:
    rows = torch.randn(2, 16, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(rows).square().mean())
    engine.step()


def differing(tier: str, directory: str, seeds: tuple[int, ...] = (0, 1, 2)) -> list[str]:
    """What models from one ``Init``, trained by turns, have otherwise than each has that was built alone."""
    settings = config(tier, directory, bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        models = [build(seed) for seed in seeds]
    engines: list[Engine] = []
    for number, model in enumerate(models):
        engines.append(start(model, settings))
        for engine in engines:
            step(engine, number)
    found = []
    for number, engine in enumerate(engines):
        alone = start(build(seeds[number]), settings)
        for each in range(number, len(engines)):
            step(alone, each)
        ours, theirs = engine.full_state_dict(), alone.full_state_dict()
        found += [f"{number}: {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
        alone.destroy()
    for engine in engines:
        engine.destroy()
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_each_of_several_models_gets_its_engine(tier: str, tmp_path: Path) -> None:
    assert differing(tier, str(tmp_path)) == []


@pytest.mark.parametrize("tier", ["none", "nvme"])
def test_on_two_ranks(tier: str, tmp_path: Path) -> None:
    code = f"""
    import json
    from infinity.tiers.collectives import Collectives
    from tests.infinity.weights.test_models_in_one_init import differing
    kept = Collectives.join()
    print(json.dumps(differing({tier!r}, {str(tmp_path)!r}, (0, 1))))
    kept.close()
    """
    assert [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=2)] == [[], []]


def test_a_model_that_one_rank_alone_has_dropped_is_no_reason_to_wait(tmp_path: Path) -> None:
    code = f"""
    import json
    import infinity
    from infinity.tiers.collectives import Collectives
    from tests.infinity.weights.test_models_in_one_init import build, start, step
    from tests.support.state_story import config
    kept = Collectives.join()
    settings = config("cpu", {str(tmp_path)!r}, bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        models = [build(0), build(1)]
    if kept.rank:
        models.pop()
    engine = start(models[0], settings)
    step(engine, 0)
    print(json.dumps(sorted(engine.full_state_dict())))
    engine.destroy()
    kept.close()
    """
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert [rank.answer for rank in run_ranks(code, tmp_path, num_ranks=2)] == [names, names]


@pytest.mark.parametrize("tier", TIERS)
def test_a_refusal_of_one_leaves_the_others(tier: str, tmp_path: Path) -> None:
    settings = config(tier, str(tmp_path), bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        first, second = build(0), build(1)
    frozen = start(first, settings)
    frozen.destroy()
    with pytest.raises(ConfigError, match="NoSuch"):
        start(second, {**settings, "optimizer": {"type": "NoSuch"}})
    engine = start(second, settings)
    expected = build(1).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items())
    engine.destroy()


@pytest.mark.parametrize("tier", TIERS)
def test_within_another_a_model_is_ready_when_its_own_is_left(tier: str, tmp_path: Path) -> None:
    settings = config(tier, str(tmp_path), bf16=False)
    with infinity.Init(config_dict_or_path=settings):
        outer = build(0)
        with infinity.Init(config_dict_or_path=settings):
            first = build(1)
        assert all(isinstance(param, DsNames) for param in first.parameters())
        engine = start(first, settings)
        step(engine, 0)
        with infinity.Init(config_dict_or_path=settings):
            second = build(2)
        other = start(second, settings)
        step(other, 0)
        after = build(3)
    for model, seed in ((outer, 0), (after, 3)):
        made, expected = start(model, settings), build(seed).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in made.full_state_dict().items())
        made.destroy()
    engine.destroy()
    other.destroy()


def test_what_is_disabled_within_another_changes_nothing() -> None:
    with infinity.Init():
        with infinity.Init(enabled=False):
            model = build(0)
        assert all(staged_param(param) is not None for param in model.parameters())
    assert all(isinstance(param, DsNames) for param in model.parameters())

"""The loop around a step: faults in the model, evaluation in between, engines in sequence, optimizers of the user's.

Each runs in memory and streaming from NVMe in the least budget, always with released memory poisoned.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import (
    CASES,
    BombPart,
    Case,
    ExpertPart,
    ExplosionError,
    PlainPart,
    Tower,
    TwicePart,
    batches,
    decay_groups,
    loss_of,
    seeded,
)
from tests.support.optimizers import CHOICES
from tests.support.parity import engine_config, least_budget_bytes, train_engine
from tests.support.reference import Recipe, Run, differing_bits, train_reference

TIERS = ("none", "nvme")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_DEBUG", "poison")


def tower() -> nn.Module:
    return Tower([PlainPart(), TwicePart(), ExpertPart()])


def config_for(recipe: Recipe, tier: str, swap_dir: Path, build: Callable[[], nn.Module] = tower) -> dict[str, Any]:
    config = engine_config(recipe, param_tier=tier, optimizer_tier=tier, swap_dir=str(swap_dir))
    if tier == "nvme":
        config["io_daemon"]["host_budget_bytes"] = least_budget_bytes(build, config)
    return config


def assert_same_bits(ours: Run, reference: Run) -> None:
    assert [differing_bits(a, b) for a, b in zip(ours.losses, reference.losses, strict=True)] == [0] * len(ours.losses)
    for mine, theirs in ((ours.weights, reference.weights), (ours.masters, reference.masters)):
        assert mine.keys() == theirs.keys()
        assert {name: bits for name in mine if (bits := differing_bits(mine[name], theirs[name]))} == {}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_hazard_streams_from_nvme_without_a_differing_bit(case: Case, bf16: bool, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=4, accumulation=2, bf16=bf16)
    run = train_engine(case.build, recipe, config_for(recipe, "nvme", tmp_path, case.build))
    assert_same_bits(run, train_reference(seeded(case.build), batches(recipe.num_batches), recipe))
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("tier", TIERS)
def test_step_that_raised_in_the_model_can_be_repeated(tier: str, phase: str, tmp_path: Path) -> None:
    """The second micro-batch of a step explodes half-way: a forward is repeated alone, a backward with the step, from
    its first micro-batch."""

    def build() -> nn.Module:
        return Tower([PlainPart(), BombPart(), ExpertPart()])

    recipe = Recipe(num_steps=3, accumulation=2)
    stream = batches(recipe.num_batches)
    model = seeded(build)
    bomb = next(module for module in model.modules() if isinstance(module, BombPart))
    config = config_for(recipe, tier, tmp_path, build)
    engine, *_ = infinity.initialize(model=model, model_parameters=decay_groups(model), config=config)
    run = Run()

    def micro_step(index: int) -> None:
        loss = loss_of(engine(stream[index]))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.detach().clone())

    with engine:
        for index in (0, 1, 2):
            micro_step(index)
        bomb.armed = phase
        with pytest.raises(ExplosionError):
            micro_step(3)
        bomb.armed = ""
        if phase == "backward":
            engine.zero_grad()
            run.losses.pop()
        for index in (3, 4, 5) if phase == "forward" else (2, 3, 4, 5):
            micro_step(index)
        run.weights, run.masters = engine.full_state_dict(), engine.full_master_state_dict()
    assert_same_bits(run, train_reference(seeded(build), stream, recipe))


@pytest.mark.parametrize("tier", TIERS)
def test_evaluation_between_steps_and_micro_batches_changes_nothing(tier: str, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=3, accumulation=2)
    stream, held_out = batches(recipe.num_batches), batches(1, seed=7)[0]
    model = seeded(tower)
    config = config_for(recipe, tier, tmp_path)
    engine, *_ = infinity.initialize(model=model, model_parameters=decay_groups(model), config=config)
    run, held_out_losses = Run(), []
    with engine:
        for batch in stream:
            engine.eval()
            with torch.no_grad():
                held_out_losses.append(float(loss_of(engine(held_out))))
            engine.train()
            loss = loss_of(engine(batch))
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
        run.weights, run.masters = engine.full_state_dict(), engine.full_master_state_dict()
    assert_same_bits(run, train_reference(seeded(tower), stream, recipe))
    assert held_out_losses[0] == held_out_losses[1], "both were taken before the first update"
    assert len(set(held_out_losses)) == recipe.num_steps


@pytest.mark.parametrize("tier", TIERS)
def test_engines_in_sequence_train_alike_and_leave_nothing_behind(tier: str, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=2)
    config = config_for(recipe, tier, tmp_path)
    runs = [train_engine(tower, recipe, config) for _ in range(3)]
    for run in runs[1:]:
        assert_same_bits(run, runs[0])
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("tier", TIERS)
def test_model_built_under_init_trains_like_one_built_plainly(tier: str, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=3)
    config = config_for(recipe, tier, tmp_path)
    if tier == "nvme":
        config["io_daemon"]["host_budget_bytes"] *= 2  # the staging area takes a share of its own

    def build_under_init() -> nn.Module:
        with infinity.Init(config_dict_or_path=config):
            return tower()

    ours = train_engine(build_under_init, recipe, config)
    assert_same_bits(ours, train_reference(seeded(tower), batches(recipe.num_batches), recipe))
    assert list(tmp_path.rglob("*")) == []


def test_optimizer_object_of_the_user_is_taken_over(tmp_path: Path) -> None:
    recipe = Recipe(num_steps=4)
    config = config_for(recipe, "nvme", tmp_path)
    del config["optimizer"]
    model = seeded(tower)
    theirs = CHOICES[recipe.optimizer].plain(decay_groups(model))
    engine, *_ = infinity.initialize(model=model, optimizer=theirs, config=config)
    run = Run()
    with engine:
        for batch in batches(recipe.num_batches):
            loss = loss_of(engine(batch))
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.detach().clone())
        run.weights, run.masters = engine.full_state_dict(), engine.full_master_state_dict()
    assert_same_bits(run, train_reference(seeded(tower), batches(recipe.num_batches), recipe))

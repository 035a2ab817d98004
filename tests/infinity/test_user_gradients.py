"""Gradients that a user puts into ``param.grad``: the step takes them as torch's optimizer would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import EngineStateError, WeightsError
from tests.support.ranks import run_ranks

ADAM: dict[str, Any] = {"lr": 1e-1, "weight_decay": 0.01}
SHAPES = ((8, 8), (8,), (8, 8), (8,))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def engine_of(stage: int, device: str = "none", **config: Any) -> infinity.Engine:
    offload = {"device": device}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if device != "none":
        zero |= {"offload_optimizer": offload} | ({"offload_param": offload} if stage == 3 else {})
    return infinity.initialize(
        model=build(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": zero,
            **config,
        },
    )[0]


def with_optimizer(stage: int, device: str = "none", **config: Any) -> tuple[infinity.Engine, torch.optim.Optimizer]:
    engine = engine_of(stage, device, **config)
    assert engine.optimizer is not None
    return engine, engine.optimizer


def put(model: nn.Module, step: int) -> None:
    for param, gradient in zip(model.parameters(), gradients(step), strict=True):
        param.grad = torch.empty_like(param)
        param.grad.copy_(gradient)


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def nothing(model: nn.Module) -> None:
    """The gradients stay as they are."""


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "cpu")])
@pytest.mark.parametrize("then", [nothing, clipped])
def test_the_step_is_that_of_torch(stage: int, device: str, then: Callable[[nn.Module], None]) -> None:
    engine, plain = engine_of(stage, device), build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, fused=True)
    x = torch.ones(1, 8)
    for step in range(4):
        for model in (engine.module, plain):
            put(model, step)
            then(model)
        if step == 2:  # a backward adds to what is there
            engine.backward(engine(x).sum())
            plain(x).sum().backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in engine.module.parameters())
    weights = engine.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def test_a_step_of_them_follows_one_that_was_updated_inside_backward(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": nvme, "offload_optimizer": nvme}
    daemon = {"update_in_backward": True, "host_budget_bytes": 4 << 20}
    engine, plain = engine_of(3, zero_optimization=zero, io_daemon=daemon), build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, fused=True)
    for step in range(4):
        if step % 2:
            put(engine.module, step)
            put(plain, step)
        else:
            engine.backward(engine(torch.ones(1, 8)).sum())
            plain(torch.ones(1, 8)).sum().backward()
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    weights = engine.full_state_dict()
    engine.destroy()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def test_zero_grad_drops_them_and_a_step_without_any_changes_nothing() -> None:
    engine = engine_of(3)
    before = engine.full_state_dict()
    put(engine.module, 0)
    engine.zero_grad()
    assert all(param.grad is None for param in engine.module.parameters())
    engine.step()
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_loop_that_never_updates_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(2, gradient_accumulation_steps=3)

    def micro_batches(count: int, *, zeroed: bool) -> None:
        for _ in range(count):
            if zeroed:
                engine.zero_grad()
            engine.backward(engine(torch.ones(1, 8)).sum())
            engine.step()

    micro_batches(3, zeroed=False)
    micro_batches(3, zeroed=True)  # twice anew: as after batches that were not wanted
    assert not caplog.records
    micro_batches(4, zeroed=True)
    assert engine.global_steps == 1
    assert [record.getMessage().partition(" times")[0] for record in caplog.records] == [
        "zero_grad() has begun the step anew 3"
    ]


@pytest.mark.parametrize(("stage", "device"), [(0, "none"), (1, "none"), (2, "cpu"), (3, "none"), (3, "cpu")])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_optimizers_zero_grad_drops_what_was_accumulated(stage: int, device: str, accumulation: int) -> None:
    """As torch's does: a batch that a script skips leaves nothing. Which micro-batch updates does not change."""
    engine, ours = with_optimizer(stage, device, gradient_accumulation_steps=accumulation)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, fused=True)
    for number in range(12):
        x = torch.full((1, 8), 1.0 + number)
        engine.backward(engine(x).square().mean())
        (plain(x).square().mean() / accumulation).backward()
        if number in (1, 2, 4):
            ours.zero_grad()
            optimizer.zero_grad()
        engine.step()
        if number % accumulation == accumulation - 1:
            ours.zero_grad(set_to_none=False)  # those of an update that is due stay
            optimizer.step()
            optimizer.zero_grad()
    weights = engine.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())


def test_gradients_are_not_dropped_in_the_middle_of_a_backward() -> None:
    engine, ours = with_optimizer(2)
    engine.module.get_submodule("1").register_full_backward_hook(lambda *_: ours.zero_grad())
    with pytest.raises(EngineStateError, match=r"zero_grad\(\)"):
        engine.backward(engine(torch.ones(1, 8)).sum())
    ours.zero_grad()


def test_what_the_engine_has_is_not_replaced() -> None:
    engine = engine_of(2)
    engine.backward(engine(torch.ones(1, 8)).sum())
    with pytest.raises(WeightsError, match=r"0\.weight"):
        put(engine.module, 0)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_infinite_one_is_an_overflow(stage: int) -> None:
    engine = engine_of(stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    before = engine.full_master_state_dict()
    put(engine.module, 0)
    next(engine.module.parameters()).grad = torch.full((8, 8), torch.inf, dtype=torch.float16)
    engine.step()
    assert not engine.was_step_applied()
    assert engine.cur_scale == 2.0**7
    after = engine.full_master_state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    put(engine.module, 1)
    engine.step()
    assert engine.was_step_applied()


RANKS = """
import json, os, sys, torch
from tests.infinity.test_user_gradients import build, engine_of, put, ADAM

found = []
for stage in (0, 2, 3):
    engine, plain = engine_of(stage), build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM, fused=True)
    for step in range(3):
        for model in (engine.module, plain):
            put(model, step)
        engine.step()
        optimizer.step()
    weights = engine.full_state_dict()
    found.append(all(torch.equal(weights[name], value) for name, value in plain.state_dict().items()))
    engine.destroy()
print(json.dumps(found))
"""


def test_equal_ones_on_two_ranks_are_their_mean(tmp_path: Path) -> None:
    ended = run_ranks(RANKS, tmp_path, num_ranks=2)
    assert [each.answer for each in ended] == [[True, True, True]] * 2


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_of_zeros_of_what_no_optimizer_steps_are_none(stage: int) -> None:
    first = nn.Linear(8, 8)
    model, ours = nn.Sequential(first, nn.Linear(8, 8)), torch.optim.AdamW(first.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    with infinity.initialize(model=model, optimizer=ours, config=config)[0] as engine:
        for module in (engine, first):
            engine.backward(module(torch.ones(1, 8)).square().mean())
            engine.step()
            ours.zero_grad(set_to_none=False)
            engine.module.zero_grad(set_to_none=False)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_between_micro_batches_nothing_is_dropped_by_a_habit(stage: int) -> None:
    """DeepSpeed's scripts may call the module's zero_grad() behind every step(), which changes nothing there."""
    found = []
    for zeroes in (False, True):
        with engine_of(stage, gradient_accumulation_steps=2) as engine:
            for step in range(4):
                engine.backward(engine(torch.ones(1, 8) * step).square().mean())
                engine.step()
                if zeroes and step % 2 == 0:
                    with pytest.raises(EngineStateError, match=r"leave it out.*engine\.optimizer\.zero_grad\(\)"):
                        engine.module.zero_grad()
                elif zeroes:
                    engine.module.zero_grad()
            found.append(engine.full_state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_behind_clipping_the_gradients_are_fixed() -> None:
    with engine_of(3) as engine:

        def clip() -> None:
            engine.backward(engine(torch.ones(1, 8)).square().mean())
            engine.clip_grad_norm_(0.1)

        clip()
        engine.module.get_submodule("0").zero_grad()
        with pytest.raises(EngineStateError, match=r"behind clip_grad_norm_\(\)"):
            engine.step()
        engine.zero_grad()
        clip()
        engine.module.zero_grad()  # the step is given up
        clip()
        engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("of", ["engine", "optimizer", "model"])
def test_gradients_of_zeros_are_refused_where_they_would_step(stage: int, of: str) -> None:
    """Torch's optimizers step what has a gradient, be it zeros: by momentum and decay."""
    engine, ours = with_optimizer(stage)
    of_what: dict[str, Any] = {"engine": engine, "optimizer": ours, "model": engine.module}
    zero_grad = of_what[of].zero_grad

    def step(module: Any) -> None:
        width = module.get_parameter("weight").shape[1] if isinstance(module, nn.Linear) else 8
        engine.backward(module(torch.ones(1, width)).square().mean())
        engine.step()

    last = list(engine.module.children())[-1]
    step(engine)
    zero_grad(set_to_none=False)
    step(engine)  # all have one
    zero_grad(set_to_none=False)
    zero_grad()
    step(last)
    step(engine)
    zero_grad(set_to_none=False)
    with pytest.raises(WeightsError, match=r"^0\.weight.* had left it one of zeros"):
        step(last)
    (engine.zero_grad if of == "model" else zero_grad)()  # the model's is refused while there are gradients
    step(last)
    engine.destroy()

"""An engine's optimizer is of the class that DeepSpeed's would be, and shows its loss scale and masters like it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from infinity import deepspeed
from infinity.deepspeed.loss_scalers import LossScaleConfig, LossScaleProfile
from infinity.deepspeed.optimizer_kinds import DeepSpeedOptimizer, FP16_Optimizer, FP16_UnfusedOptimizer
from infinity.deepspeed.optimizers import FusedAdam, FusedLion
from infinity.errors import ConfigError
from infinity.utils import safe_get_full_fp32_param

FP16 = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
SECTIONS: dict[str, tuple[dict[str, Any], type]] = {
    "adam": ({"type": "Adam"}, FusedAdam),
    "adamw": ({"type": "AdamW"}, FusedAdam),
    "torchs": ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW),
    "lion": ({"type": "Lion"}, FusedLion),
    "sgd": ({"type": "SGD"}, torch.optim.SGD),
}


def start(make: Any = None, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    given = make(model.parameters()) if make is not None else None
    engine, made, *_ = deepspeed.initialize(
        model=model, optimizer=given, config={"train_micro_batch_size_per_gpu": 2, **settings}
    )
    return engine, made


@pytest.mark.parametrize("name", SECTIONS)
def test_at_stage_0_in_fp32_it_is_of_the_class_that_is_configured(name: str) -> None:
    section, kind = SECTIONS[name]
    engine, optimizer = start(optimizer=section)
    assert isinstance(optimizer, kind)
    assert isinstance(optimizer, DeepSpeedOptimizer)
    engine.backward(engine(torch.ones(2, 6)).sum())
    engine.step()
    engine.destroy()
    engine, sharded = start(optimizer=section, zero_optimization={"stage": 1})
    assert not isinstance(sharded, kind)
    assert optimizer != sharded
    engine.destroy()


class Users(torch.optim.SGD):
    @property
    def taken_over(self) -> Any:
        raise AssertionError("it is the user's, whom nobody asks")

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise AssertionError("it has no gradients")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, Users])
def test_at_stage_0_in_fp32_it_stands_for_the_one_that_was_passed(kind: Callable[..., torch.optim.Optimizer]) -> None:
    engine, optimizer = start(lambda params: kind(params, lr=0.1))
    passed = optimizer.taken_over
    assert isinstance(optimizer, kind)  # type: ignore[arg-type]
    assert optimizer == passed == optimizer == engine.optimizer
    assert len({optimizer, passed}) == 1
    assert optimizer != kind([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.zero_grad()
    engine.destroy()


@pytest.mark.parametrize("section", ["fp16", "bf16"])
@pytest.mark.parametrize(("make", "kind"), [(FusedAdam, FP16_Optimizer), (torch.optim.SGD, FP16_UnfusedOptimizer)])
def test_at_stage_0_in_16_bits_it_shows_masters(make: Any, kind: type, section: str) -> None:
    engine, optimizer = start(lambda params: make(params, lr=0.1), **{section: {"enabled": True}})
    assert issubclass(type(optimizer), kind)
    assert optimizer.low_precision_dtype is (torch.float16 if section == "fp16" else torch.bfloat16)
    expected: list[Any] = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    if kind is FP16_Optimizer:
        assert torch.equal(optimizer.fp32_groups_flat[0], torch.cat([each.flatten() for each in expected]))
    else:
        assert all(torch.equal(*pair) for pair in zip(optimizer.fp32_groups[0], expected, strict=True))
    engine.destroy()


def test_its_loss_scale_config_goes_on_with_the_steps() -> None:
    engine, optimizer = start(FusedAdam, fp16=FP16)
    shown = optimizer.loss_scale_config
    assert (shown.dynamic_loss_scale, shown.use_grad_scaling, shown.min_loss_scale) == (True, True, 1)
    seen = []
    for value in (torch.inf, 0.1, 0.1, 0.1):
        next(engine.module.parameters()).grad = torch.full((5, 6), value, dtype=torch.float16)
        engine.step()
        seen.append((shown.cur_scale, shown.cur_iter, shown.last_overflow_iter))
    assert seen == [(128, 1, 0), (128, 2, 0), (128, 3, 0), (256, 4, 0)]
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1])
def test_at_the_least_scale_zeros_optimizers_alone_give_up(stage: int) -> None:
    fp16 = {**FP16, "initial_scale_power": 1}
    engine, optimizer = start(FusedAdam, fp16=fp16, zero_optimization={"stage": stage})
    with pytest.raises(AssertionError, match="least loss scale") if stage else nullcontext():
        for _ in range(3):
            next(engine.module.parameters()).grad = torch.full((5, 6), torch.nan, dtype=torch.float16)
            engine.step()
    assert (optimizer.cur_scale, optimizer.overflow) == (1, True)
    engine.destroy()


def test_gradients_in_fewer_bits_than_fp32_weights_are_not_implemented() -> None:
    with pytest.raises(NotImplementedError, match=r"grad_accum_dtype.*write fp32"):
        start(FusedAdam, data_types={"grad_accum_dtype": "bf16"})


def test_an_optimizer_of_mups_is_made_by_mup(monkeypatch: pytest.MonkeyPatch) -> None:
    def mu_sgd(params: Any, lr: float, **others: Any) -> torch.optim.Optimizer:
        params = list(params)
        return torch.optim.SGD([{"params": params[:1], "lr": lr / 2}, {"params": params[1:]}], lr, **others)

    section = {"type": "MuSGD", "params": {"lr": 0.1, "momentum": 0.9}}
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ConfigError, match="pip install mup"):
        start(optimizer=section)
    monkeypatch.setitem(sys.modules, "mup", SimpleNamespace(MuSGD=mu_sgd))
    weights = []
    for make, given in ((None, {"optimizer": section}), (lambda params: mu_sgd(params, 0.1, momentum=0.9), {})):
        engine, optimizer = start(make, zero_optimization={"stage": 2}, **given)
        assert isinstance(optimizer.optimizer, torch.optim.SGD)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 6)).sum())
            engine.step()
        weights.append(engine.full_state_dict())
        engine.destroy()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_loss_scale_config_begins_where_its_profile_says() -> None:
    def made(**given: Any) -> LossScaleConfig:
        options: dict[str, Any] = {
            "low_precision_dtype": torch.float16, "dynamic_loss_scale": True, "static_loss_scale": 0,
            "dynamic_loss_args": None,
        }  # fmt: skip
        return LossScaleConfig(**{**options, **given})

    assert (made().cur_scale, made().min_loss_scale, made().scale_window) == (2.0**32, 1, 1000)
    unfused = made(profile=LossScaleProfile.UNFUSED)
    assert (unfused.cur_scale, unfused.min_loss_scale, unfused.scale_factor) == (2.0**16, 0.25, 2)
    assert made(initial_dynamic_scale=8).cur_scale == 8
    assert made(dynamic_loss_args={"init_scale": 4, "scale_window": 7, "min_scale": 2}).scale_window == 7
    fixed = made(dynamic_loss_scale=False, static_loss_scale=16)
    assert (fixed.cur_scale, fixed.dynamic_loss_scale, hasattr(fixed, "cur_iter")) == (16, False, False)
    narrow = made(low_precision_dtype=torch.bfloat16, static_loss_scale=16)
    assert (narrow.cur_scale, narrow.dynamic_loss_scale, narrow.use_grad_scaling) == (1, False, False)

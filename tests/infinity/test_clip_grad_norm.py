"""``engine.clip_grad_norm_``: torch's bits, and refused by name where its factor would be another than torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from infinity.errors import EngineStateError
from infinity.utils import safe_get_full_grad, safe_set_full_grad

WIDTH = 16
MAX_NORM = 0.01


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def engine_of(stage: int = 3, **changes: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **changes,
    }
    return infinity.initialize(model=model_of(), config=config)[0]


def loss_of(module: Callable[[Tensor], Tensor], number: int = 0) -> Tensor:
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
    return module(x).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_it_clips_the_sum_of_a_steps_micro_batches(stage: int) -> None:
    reference = model_of()
    for number in range(2):
        torch.autograd.backward(loss_of(reference, number) / 2)
    norm = nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
    torch.optim.SGD(reference.parameters(), 0.1).step()
    with engine_of(stage, gradient_accumulation_steps=2) as engine:
        engine.backward(loss_of(engine, 0))
        with pytest.raises(EngineStateError, match="is_gradient_accumulation_boundary"):
            engine.clip_grad_norm_(MAX_NORM)
        engine.step()
        engine.backward(loss_of(engine, 1))
        assert torch.equal(engine.clip_grad_norm_(MAX_NORM), norm)
        engine.step()
        weights = engine.full_state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in reference.state_dict().items())


def test_beside_the_configurations_clipping_it_is_refused() -> None:
    with engine_of(gradient_clipping=0.5) as engine:
        engine.backward(loss_of(engine))
        with pytest.raises(EngineStateError, match=r"gradient_clipping 0\.5"):
            engine.clip_grad_norm_(100.0)
        engine.step()


CALLS: dict[str, Callable[[Engine, Tensor], object]] = {
    "clip_grad_norm_": lambda engine, _loss: engine.clip_grad_norm_(1.0),
    "backward": lambda engine, loss: engine.backward(loss),
    "reading": lambda engine, _loss: safe_get_full_grad(next(engine.module.parameters())),
    "writing": lambda engine, _loss: safe_set_full_grad(next(engine.module.parameters()), torch.zeros(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_would_meet_gradients_that_are_not_clipped_yet_is_refused_and_changes_nothing(call: str) -> None:
    weights = []
    for asks in (False, True):
        with engine_of() as engine:
            other = loss_of(engine, 1)
            engine.backward(loss_of(engine))
            engine.clip_grad_norm_(MAX_NORM)
            if asks:
                with pytest.raises(EngineStateError, match=rf"{call}.* after clip_grad_norm_"):
                    CALLS[call](engine, other)
            engine.step()
            weights.append(engine.full_state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_norm_is_of_the_last_step_or_none() -> None:
    with engine_of() as engine:
        engine.backward(loss_of(engine))
        norm = float(engine.clip_grad_norm_(MAX_NORM))
        engine.step()
        engine.backward(loss_of(engine))
        engine.step()  # nobody has asked for its norm
        assert engine.get_global_grad_norm() is None
        engine.backward(loss_of(engine))
        engine.step()
        assert engine.get_global_grad_norm() not in (None, norm)

"""A forward or a backward that ends with an error, and a script that goes on: what was accumulated before is there, as
in plain torch, or the calls that would go on without it are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity import Engine
from infinity.errors import EngineStateError
from tests.support.reference import differing_bits

WIDTH = 48
STAGES = (0, 1, 2, 3)
LEARNING_RATE, WEIGHT_DECAY = 0.01, 0.1


class InterruptedCallError(Exception):
    pass


class Net(nn.Module):
    """``fails``: where the next call does, in forward, in backward before any gradient or in backward after some."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = ""

    def forward(self, inputs: Tensor) -> Tensor:
        fails, self.fails = self.fails, ""
        hidden = torch.tanh(self.first(inputs))
        if fails == "forward":
            raise InterruptedCallError
        if fails == "late":
            hidden.register_hook(interrupt)  # type: ignore[no-untyped-call]
        outputs: Tensor = self.last(hidden)
        if fails == "early":
            outputs.register_hook(interrupt)  # type: ignore[no-untyped-call]
        return outputs


def interrupt(_gradient: Tensor) -> None:
    raise InterruptedCallError


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def net_of(engine: Engine) -> Net:
    net: Any = engine.module
    return cast(Net, net)


def loss_of(model: nn.Module, batch: int) -> Tensor:
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(batch))
    loss: Tensor = model(inputs).square().mean()
    return loss


def engine_of(
    stage: int, directory: Path, *, accumulation: int, in_backward: bool = False, model: Net | None = None
) -> Engine:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    offload = {"offload_param": nvme, "offload_optimizer": nvme} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **offload},
        "io_daemon": {"update_in_backward": in_backward},
    }
    return infinity.initialize(model=model or made(), config=config)[0]


def plain(*batches: int) -> dict[str, Tensor]:
    """One step on the sum of the micro-batches' gradients."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    for batch in batches:
        torch.autograd.backward(loss_of(model, batch) / len(batches))
    optimizer.step()
    return model.state_dict()


def assert_same(engine: Engine, expected: dict[str, Tensor]) -> None:
    found = engine.full_state_dict()
    assert {name: differing_bits(found[name], expected[name]) for name in expected} == dict.fromkeys(expected, 0)


def micro_batch(engine: Engine, batch: int) -> None:
    engine.backward(loss_of(engine, batch))
    engine.step()


def fail_backward(engine: Engine, where: str) -> None:
    net_of(engine).fails = where
    loss = loss_of(engine, 9)
    with pytest.raises(InterruptedCallError):
        engine.backward(loss)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_that_fails_drops_nothing(stage: int, evaluates: bool, tmp_path: Path) -> None:
    with engine_of(stage, tmp_path, accumulation=2) as engine:
        micro_batch(engine, 1)
        net_of(engine).fails = "forward"
        engine.train(not evaluates)
        with torch.set_grad_enabled(not evaluates), pytest.raises(InterruptedCallError):
            loss_of(engine, 9)
        engine.train()
        engine.backward(loss_of(engine, 2))
        net_of(engine).fails = "forward"
        with pytest.raises(InterruptedCallError):
            loss_of(engine, 3)
        engine.step()
        assert_same(engine, plain(1, 2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_fails_before_its_first_gradient_drops_nothing(stage: int, tmp_path: Path) -> None:
    with engine_of(stage, tmp_path, accumulation=2) as engine:
        micro_batch(engine, 1)
        fail_backward(engine, "early")
        micro_batch(engine, 2)
        assert_same(engine, plain(1, 2))


def test_a_backward_that_fails_before_its_first_gradient_has_begun_no_update(tmp_path: Path) -> None:
    with engine_of(3, tmp_path, accumulation=1, in_backward=True) as engine:
        fail_backward(engine, "early")
        micro_batch(engine, 1)
        assert_same(engine, plain(1))


@pytest.mark.parametrize("stage", STAGES)
def test_after_a_backward_that_fails_half_way_nothing_goes_on_before_zero_grad(stage: int, tmp_path: Path) -> None:
    """Plain torch would add the next backward's gradients to what this one has left."""
    with engine_of(stage, tmp_path, accumulation=1) as engine:
        fail_backward(engine, "late")
        with pytest.raises(EngineStateError, match=r"step\(\): the last backward failed.*zero_grad\(\)"):
            engine.step()
        with pytest.raises(EngineStateError, match=r"backward\(\): the last backward failed.*zero_grad\(\)"):
            micro_batch(engine, 1)
        engine.zero_grad()
        micro_batch(engine, 1)
        assert_same(engine, plain(1))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [InterruptedCallError, KeyboardInterrupt])
def test_what_a_hook_of_the_users_that_fails_has_left_is_not_added_to(
    stage: int, error: type[BaseException], tmp_path: Path
) -> None:
    """Registered before ``initialize``, it is called before the engine has taken the gradient."""
    model, calls = made(), 0

    def guard(_param: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error

    for param in model.last.parameters():
        param.register_post_accumulate_grad_hook(guard)  # type: ignore[no-untyped-call]
    with engine_of(stage, tmp_path, accumulation=1, model=model) as engine:
        loss = loss_of(engine, 9)
        with pytest.raises(error):
            engine.backward(loss)
        with pytest.raises(EngineStateError, match=r"step\(\): the last backward failed.*zero_grad\(\)"):
            engine.step()
        engine.zero_grad()
        micro_batch(engine, 1)
        assert_same(engine, plain(1))


GONE = r".*before it are gone: call engine\.zero_grad\(\)"


@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_that_went_with_a_backward_are_told_until_the_step_begins_anew(
    stage: int, of_model: bool, tmp_path: Path
) -> None:
    with engine_of(stage, tmp_path, accumulation=2) as engine:
        micro_batch(engine, 1)
        fail_backward(engine, "late")
        for _ in range(2):
            with pytest.raises(EngineStateError, match=rf"backward\(\): {GONE}"):
                engine.backward(loss_of(engine, 2))
        with pytest.raises(EngineStateError, match=rf"step\(\): {GONE}"):
            engine.step()
        next(engine.module.children()).zero_grad()  # a part of the model is not all of it
        with pytest.raises(EngineStateError, match=rf"step\(\): {GONE}"):
            engine.step()
        (engine.module if of_model else engine).zero_grad()
        micro_batch(engine, 1)
        micro_batch(engine, 2)
        assert_same(engine, plain(1, 2))


def test_a_checkpoint_is_gone_on_from_after_a_backward_that_failed(tmp_path: Path) -> None:
    with engine_of(2, tmp_path, accumulation=1) as engine:
        engine.save_checkpoint(tmp_path)
        fail_backward(engine, "late")
        engine.load_checkpoint(tmp_path)
        micro_batch(engine, 1)
        assert engine.global_steps == 1


def test_samples_are_those_of_each_step_s_own_backwards() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "managed_gradient_accumulation": False,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {"stage": 2},
    }
    with infinity.initialize(model=made(), config=config)[0] as engine:
        for _ in range(2):
            engine.backward(loss_of(engine, 1))
            engine.backward(loss_of(engine, 2))
            engine.step()
        assert engine.global_samples == 16
        engine.backward(loss_of(engine, 1))
        engine.zero_grad()
        engine.backward(loss_of(engine, 2))
        engine.step()
        assert engine.global_samples == 20

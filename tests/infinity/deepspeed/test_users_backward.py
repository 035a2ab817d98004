"""``loss.backward()`` by the script gives every parameter what ``engine.backward(loss)`` and plain torch give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity.deepspeed as deepspeed
from infinity.errors import EngineStateError
from tests.infinity.deepspeed.users_losses import LOSSES, gradients, micro_batches, net, plain_gradients, same, started
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_gradient_is_divided_once(stage: int, kind: str) -> None:
    """Also those of weights beside the outputs, and those that pass two outputs on their way."""
    for accumulation in (2, 4):
        engine = started(stage, kind, accumulation)
        for what, losses in LOSSES.items():
            found = gradients(engine, kind, losses, by_engine=False)
            assert same(found, plain_gradients(kind, accumulation, losses)), (what, accumulation)
        engine.destroy(keep_weights=False)


RANKS = """
import json, torch
import infinity.deepspeed as deepspeed
from tests.infinity.deepspeed.users_losses import LOSSES, gradients, same, started

torch.set_num_threads(1)
wrong = []
for stage in range(4):
    for kind in ("fp32", "bf16", "fp16"):
        engine = started(stage, kind, 2)
        for what, losses in LOSSES.items():
            found, expected = (gradients(engine, kind, losses, by_engine=way) for way in (False, True))
            if not same(found, expected):
                wrong.append((stage, kind, what))
        engine.destroy(keep_weights=False)
print(json.dumps(wrong))
"""


def test_on_two_ranks_as_the_engines_own(tmp_path: Path) -> None:
    assert [ended.answer for ended in run_ranks(RANKS, tmp_path, num_ranks=2)] == [[], []]


def _engine(model: nn.Module, **others: object) -> Any:
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    return deepspeed.initialize(model=model, config=config | others)[0]


def _taken(engine: Any) -> list[Tensor | None]:
    return [deepspeed.utils.safe_get_full_grad(param) for param in engine.module.parameters()]


def _own(model: nn.Module, divisor: int = 1) -> list[Tensor | None]:
    return [None if param.grad is None else param.grad / divisor for param in model.parameters()]


def test_gradients_of_inputs_are_of_the_loss_that_was_differentiated() -> None:
    """``torch.autograd.grad``, as in a gradient penalty, is no backward of the engine: it divides nothing."""
    x = next(micro_batches(1, torch.float32))
    engine, plain = _engine(net(), gradient_accumulation_steps=2), net()
    penalties: list[Tensor] = []
    for model, divisor in ((engine, 1), (plain, 2)):
        given = x.clone().requires_grad_()
        out = model(given)["loss"]
        penalties += torch.autograd.grad(out, given, create_graph=True)
        assert (model is plain) == engine._loop.is_within_step  # nothing is, before the engine's own backward
        ((out + penalties[-1].pow(2).sum()) / divisor).backward()
    assert torch.equal(penalties[0], penalties[1])
    assert same(_taken(engine), _own(plain))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gan_drops_what_its_other_half_has_left_by_the_modules_zero_grad(stage: int) -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(1)
        judge, forger = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
        if plain:
            ours = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (judge, forger)]
            calls: list[Any] = [judge, forger]
        else:
            calls = ours = [_engine(model, zero_optimization=_each(stage)) for model in (judge, forger)]
        for step in range(4):
            given = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            judge.zero_grad()
            fake = calls[1](given)
            for loss in (-calls[0](given.sin()).mean(), calls[0](fake.detach()).mean()):
                loss.backward() if plain else calls[0].backward(loss)
            ours[0].step()
            forger.zero_grad()
            loss = -calls[0](fake).mean()
            loss.backward() if plain else calls[1].backward(loss)
            ours[1].step()
        found.append(
            {name: value.clone() for model in (judge, forger) for name, value in model.named_parameters()}
            if plain
            else {name: value for engine in calls for name, value in engine.full_state_dict().items()}
        )
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def _each(stage: int) -> dict[str, object]:
    return {"stage": stage, "stage3_param_persistence_threshold": 0}


def test_two_engines_in_a_row_divide_by_their_own_number() -> None:
    x = next(micro_batches(1, torch.float32))
    torch.manual_seed(1)
    behind = _engine(nn.Linear(4, 1), gradient_accumulation_steps=4)
    before = _engine(net(), gradient_accumulation_steps=2)
    behind(before(x)["inside"][0]).sum().backward()
    plain_head, plain = nn.Linear(4, 1), net()
    plain_head.load_state_dict(behind.full_state_dict())
    plain_head(plain(x)["inside"][0]).sum().backward()
    for engine, model, number in ((behind, plain_head, 4), (before, plain, 2)):
        assert same(_taken(engine), _own(model, number))
        engine.destroy()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ZeroDivisionError


def test_after_a_backward_that_failed_and_zero_grad_the_next_one_counts_alone() -> None:
    x = next(micro_batches(1, torch.float32))
    engine, plain = _engine(net()), net()
    given = _Fails.apply(x.clone().requires_grad_())  # type: ignore[no-untyped-call]
    with pytest.raises(ZeroDivisionError):
        engine(given)["loss"].backward()
    with pytest.raises(EngineStateError, match=r"the last backward failed.*zero_grad"):
        engine(x)["loss"].backward()
    engine.zero_grad()
    engine(x)["loss"].backward()
    plain(x)["loss"].backward()
    assert same(_taken(engine), _own(plain))
    engine.destroy()


def test_a_refused_backward_leaves_nothing_behind() -> None:
    x = next(micro_batches(1, torch.float16))
    engine = _engine(net(), fp16={"enabled": True, "loss_scale": 8.0})
    for loss in (engine(x)["loss"], sum(param.float().sum() for param in engine.module.parameters())):
        with pytest.raises(EngineStateError, match=r"Loss scaling is required.*engine\.scale\(loss\)"):
            loss.backward()
        assert not engine._loop.is_within_step
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(x)
    engine.scale(engine(x)["loss"]).backward()
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()

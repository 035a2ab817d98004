"""Calls inside each other: a model that trains itself in its forward, a loss that calls the engine in its backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import infinity
import infinity.deepspeed as deepspeed
from infinity.errors import EngineStateError

WIDTH = 8
STAGES = (0, 1, 2, 3)


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(count)]


class ByHand(nn.Module):
    """Steps twice in its forward, as Lightning's modules that optimize by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))
        self.train_on: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.train_on is None:
            raise AssertionError("nobody has said how")
        losses = []
        for shift in (0, 1):
            loss = self.layers(x + shift).square().mean()
            self.train_on(loss)
            losses.append(loss.detach())
        return torch.stack(losses)


def config(stage: int, directory: Path | None = None, threshold: int = 10**6) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = threshold
    if directory is not None and stage:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(directory)}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("on_nvme", [False, True])
def test_a_model_may_train_itself_in_its_forward(stage: int, on_nvme: bool, tmp_path: Path) -> None:
    plain = ByHand()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=True)

    def plainly(loss: Tensor) -> None:
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    plain.train_on = plainly
    with infinity.initialize(model=ByHand(), config=config(stage, tmp_path if on_nvme else None))[0] as engine:

        def ours(loss: Tensor) -> None:
            engine.backward(loss)
            engine.step()

        model = cast(Any, engine.module)
        model.train_on = ours
        for batch in batches():
            assert torch.equal(engine(batch), plain(batch))
        found = engine.full_state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
        assert engine.global_steps == 8
        model.train_on = None


class WithAWeightOfItsOwn(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale.sum().detach()


def test_weights_that_the_forward_uses_are_not_stepped_in_it() -> None:
    with infinity.initialize(model=WithAWeightOfItsOwn(), config=config(3, threshold=0))[0] as engine:
        refused: list[float] = []

        def ours(loss: Tensor) -> None:
            if refused:
                return
            engine.backward(loss)
            with pytest.raises(EngineStateError, match="in use: change them, as step"):
                engine.step()
            refused.append(loss.item())
            engine.zero_grad()

        model = cast(Any, engine.module)
        model.train_on = ours
        engine(batches(1)[0])
        assert len(refused) == 1
        model.train_on = None
        loss = model.layers(batches(1)[0]).square().mean()
        engine.backward(loss)
        engine.step()


def test_a_step_that_fails_in_a_forward_leaves_the_engine_where_it_can_go_on() -> None:
    with infinity.initialize(model=ByHand(), config=config(2))[0] as engine:

        def ours(loss: Tensor) -> None:
            with pytest.raises(EngineStateError, match="no_sync"), engine.no_sync():
                engine.step()
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss * (1 / 0))
            engine.backward(loss)
            engine.step()

        model = cast(Any, engine.module)
        model.train_on = ours
        engine(batches(1)[0])
        assert engine.global_steps == 2
        model.train_on = None


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4))


def _cached(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A contrastive loss whose backward calls the model again on each part of the batch (GradCache)."""
    with torch.no_grad():
        leaves = [model(part).detach().requires_grad_() for part in x.chunk(2)]
    found = torch.cat(leaves)
    loss = (found @ found.T).logsumexp(1).mean()
    gradients = torch.autograd.grad(loss, leaves)
    loss = loss.detach().requires_grad_()

    def call_again(gradient: Tensor) -> None:
        with torch.enable_grad():
            for part, kept in zip(x.chunk(2), gradients, strict=True):
                torch.autograd.backward((model(part) * kept).sum() * gradient)

    loss.register_hook(call_again)  # type: ignore[no-untyped-call]
    return loss


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("threshold", [0, 10**6])
@pytest.mark.parametrize("dialect", [False, True])
def test_a_loss_may_call_the_engine_in_its_backward(stage: int, threshold: int, dialect: bool) -> None:
    """As sentence-transformers' losses that recompute; it was refused."""
    plain, model = _net(), _net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    initialize: Any = deepspeed.initialize if dialect else infinity.initialize
    engine = initialize(model=model, config=config(stage, threshold=threshold))[0]
    for batch in batches():
        expected = _cached(plain, batch)
        torch.autograd.backward(expected)
        optimizer.step()
        optimizer.zero_grad()
        loss = _cached(engine, batch)
        assert torch.equal(loss, expected)
        engine.backward(loss)
        engine.step()
    found = engine.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    engine.destroy()

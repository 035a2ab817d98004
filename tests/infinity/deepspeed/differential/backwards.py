"""Backward without the engine's, and with graphs of other shapes than the loop's."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, sums, train

ALL = {str(stage): stage for stage in range(4)}


@cases_over(ALL)
def of_the_loss_itself(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    losses = []
    for x, y in batches(3):
        loss = engine(x, y)
        loss.backward()
        engine.step()
        losses.append(loss.item())
    return losses, sums(engine)


@cases_over(ALL, ranks=2)
def of_the_loss_itself_on_two_ranks(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    for x, y in batches(3):
        engine(x, y).backward()
        engine.step()
    return sums(engine)


@cases_over(ALL)
def of_the_loss_itself_with_accumulation(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, gradient_accumulation_steps=2, gradient_clipping=0.05))
    for x, y in batches(4):
        engine(x, y).backward()
        engine.step()
    return sums(engine), engine.global_steps


ZERO = {"1": 1, "2": 2, "3": 3}


class Told(nn.Module):
    """A loss beside what it was made of, as models of Transformers return it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.stack(x)
        return {"loss": out.pow(2).mean(), "logits": out}


def _gradients(engine: Any, loss_of: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        loss_of(engine(torch.randn(4, 6, generator=generator))).backward()
        grads = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
        engine.step()
    return grads


@cases_over({f"{stage}-{n}": (stage, n) for stage in ZERO.values() for n in (1, 2)})
def of_a_loss_beside_its_logits(_directory: Path, given: tuple[int, int]) -> Any:
    torch.manual_seed(3)
    engine = start(Told(), config(given[0], gradient_accumulation_steps=given[1]))
    return _gradients(engine, lambda out: out["loss"])


@cases_over({f"{stage}-{n}": (stage, n) for stage in (1, 2) for n in (1, 2)})
def of_a_loss_with_a_regulariser(_directory: Path, given: tuple[int, int]) -> Any:
    torch.manual_seed(3)
    engine = start(Told(), config(given[0], gradient_accumulation_steps=given[1]))
    params = list(engine.module.parameters())
    return _gradients(engine, lambda out: out["loss"] + 0.1 * sum(p.pow(2).sum() for p in params))


@cases_over({f"{stage}-{n}": (stage, n) for stage in ZERO.values() for n in (1, 2)})
def gradients_of_inputs_asked_for_apart(_directory: Path, given: tuple[int, int]) -> Any:
    torch.manual_seed(3)
    engine = start(Told(), config(given[0], gradient_accumulation_steps=given[1]))
    x = torch.ones(4, 6, requires_grad=True)
    return torch.autograd.grad(engine(x)["loss"], x)[0]


@cases_over(ALL)
def both_ways_in_turn(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    for number, (x, y) in enumerate(batches(4)):
        loss = engine(x, y)
        loss.backward() if number % 2 else engine.backward(loss)
        engine.step()
    return sums(engine)


@cases_over(ALL)
def scaled_by_the_engine(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    scales = []
    for x, y in batches(2):
        loss = engine(x, y)
        scaled = engine.scale(loss)
        scales.append(scaled.item() / loss.item())
        scaled.backward()
        engine.step()
    return scales, sums(engine)


@cases_over({"1": 1, "2": 2, "3": 3})
def scaled_by_the_engine_in_fp16(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, fp16={"enabled": True, "loss_scale": 128.0}))
    for x, y in batches(2, dtype=torch.float16):
        engine.scale(engine(x, y)).backward()
        engine.step()
    return [round(value, 1) for value in sums(engine).values()]


@cases_over({"1": 1, "2": 2, "3": 3})
def unscaled_in_fp16_is_refused(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage, fp16={"enabled": True, "initial_scale_power": 4}))
    x, y = batches(1, dtype=torch.float16)[0]
    return raised(engine(x, y).backward)


@cases_over(ALL)
def scale_takes_scalars_that_require_gradients(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    x, y = batches(1)[0]
    loss = engine(x, y)
    answers = [raised(lambda: engine.scale(torch.tensor(1.0))), raised(lambda: engine.scale(3.0))]
    answers.append(raised(lambda: engine.scale(torch.ones(2, requires_grad=True))))
    return [each != "nothing" for each in answers], engine.scale(loss).requires_grad


@cases_over(ALL)
def from_an_output_with_its_gradient(_directory: Path, stage: int) -> Any:
    torch.manual_seed(3)
    engine = start(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), config(stage))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        out = engine(torch.randn(4, 6, generator=generator))
        out.backward(torch.ones_like(out) / out.numel())
        engine.step()
    return sums(engine)


@cases_over({"0": 0})
def of_two_losses_with_a_graph_in_common(_directory: Path, stage: int) -> Any:
    torch.manual_seed(3)
    engine = start(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), config(stage))
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        out = engine(torch.randn(4, 6, generator=generator))
        engine.backward(out.mean(), retain_graph=True)
        engine.backward(out.pow(2).mean())
        engine.step()
    return sums(engine)


@cases_over(ALL)
def with_a_part_behind_the_engine(_directory: Path, stage: int) -> Any:
    """A head of the user's own behind the engine's output, which torch trains."""
    torch.manual_seed(3)
    engine = start(nn.Linear(6, 6), config(stage))
    head = nn.Linear(6, 1)
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        loss = head(engine(torch.randn(4, 6, generator=generator))).pow(2).mean()
        loss.backward()
        engine.step()
        other.step()
        other.zero_grad()
        losses.append(loss.item())
    return losses


@cases_over(ALL)
def gradients_of_inputs(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    x, y = batches(1)[0]
    x.requires_grad_()
    engine(x, y).backward()
    engine.step()
    return x.grad


@cases_over(ALL)
def gradients_are_to_be_read(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    x, y = batches(1)[0]
    engine(x, y).backward()
    return {n: deepspeed.utils.safe_get_full_grad(p) for n, p in engine.module.named_parameters()}


@cases_over(ALL)
def not_a_loss(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    return [raised(lambda: engine.backward(3.0)) != "nothing"]


@cases_over(ALL)
def step_without_backward(_directory: Path, stage: int) -> Any:
    engine = start(stack(), config(stage))
    train(engine, 1)
    return engine.global_steps


@case(ranks=2)
def coalesced_reduction(_directory: Path) -> Any:
    out = []
    for stage in (1, 2, 3):
        engine = start(stack(), config(stage))
        pairs = batches(3)
        with engine.coalesce_grad_reduction():
            for x, y in pairs:
                engine.backward(engine(x, y), scale_wrt_gas=False)
        engine.step()
        out.append(sums(engine))
    return out

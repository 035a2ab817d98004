"""Plain PyTorch training loops: what the engine's bits are held against. They know nothing of the engine.

The optimizer is torch's fused AdamW in every loop. Gradients accumulate in fp32 over micro-batches, the first one
copied, later ones added; the loss is divided by the number of micro-batches before backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.models import Batch, decay_groups, loss_of


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train, for the engine and for the reference alike."""

    num_steps: int = 10
    accumulation: int = 1
    clip_norm: float | None = None
    bf16: bool = False
    learning_rate: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    @property
    def num_batches(self) -> int:
        return self.num_steps * self.accumulation


@dataclass
class Run:
    """The bits of one training run: every micro-batch's loss, the final weights and fp32 masters by name."""

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)


def cast_bf16(model: nn.Module) -> nn.Module:
    """Parameters and floating buffers to bf16 in place, as the engine does."""
    return model.to(torch.bfloat16)


class MasterWeights:
    """fp32 master weights, their accumulated gradients and the fused AdamW over them."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.master_of: dict[nn.Parameter, Tensor] = {}
        groups = decay_groups(model)
        for group in groups:
            parameters = group["params"]
            group["params"] = [parameter.detach().clone().float() for parameter in parameters]
            self.master_of.update(zip(parameters, group["params"], strict=True))
        self.optimizer = torch.optim.AdamW(
            groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, fused=True
        )

    def accumulate(self) -> None:
        """Move each parameter's gradient into its master's, and clear it."""
        for parameter, master in self.master_of.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient.clone() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters, and copy them into the model's parameters."""
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.master_of.values(), self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, master in self.master_of.items():
            parameter.copy_(master)


def train_reference(model: nn.Module, batches: Sequence[Batch], recipe: Recipe, *, ddp: bool = False) -> Run:
    """Train ``model`` in place on one rank, or on every rank of the default process group with ``ddp``.

    With ``ddp`` each micro-batch's gradients are averaged over ranks before they are accumulated, which is what a
    sharded engine does: it has nowhere to keep a whole gradient from one micro-batch to the next.
    """
    master_weights = MasterWeights(model, recipe)
    if recipe.bf16:
        cast_bf16(model)
    forward: Callable[[Batch], Any] = model
    if ddp:
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    run, remaining = Run(), iter(batches)
    for _ in range(recipe.num_steps):
        for batch in itertools.islice(remaining, recipe.accumulation):
            loss = loss_of(forward(batch))
            torch.autograd.backward(loss / recipe.accumulation)
            master_weights.accumulate()
            run.losses.append(loss.detach().clone())
        master_weights.step()
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    run.masters = {
        name: master_weights.master_of[parameter].clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in master_weights.master_of
    }
    return run


def differing_bits(left: Tensor, right: Tensor) -> int:
    """Bits that differ between two tensors of one shape and dtype, NaN payloads and the sign of zero included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"cannot compare {left.dtype}{tuple(left.shape)} with {right.dtype}{tuple(right.shape)}")
    difference = left.contiguous().reshape(-1).view(torch.uint8) ^ right.contiguous().reshape(-1).view(torch.uint8)
    return sum(int((difference >> bit & 1).sum()) for bit in range(8)) if int(difference.count_nonzero()) else 0

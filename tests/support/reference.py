"""Plain PyTorch training loops: what the engine's bits are held against. They know nothing of the engine.

The optimizer is torch's own, fused where torch has that, or a paper's. Gradients accumulate in fp32 over micro-batches,
the first one copied, later ones added; the loss is divided by the number of micro-batches before backward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.device import USED
from tests.support.models import Batch, decay_groups, loss_of
from tests.support.optimizers import CHOICES
from tests.support.plain_scale import PlainScale


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train, for the engine and for the reference alike."""

    num_steps: int = 10
    accumulation: int = 1
    clip_norm: float | None = None
    bf16: bool = False
    fp16: bool = False
    """With a dynamic loss scale from 2 to ``SCALE_POWER`` on."""
    optimizer: str = "AdamW"
    """One of ``tests.support.optimizers``."""
    offloaded: bool = False
    """Whether masters are on the CPU and stepped there, wherever the model is."""
    sums: str = "every"
    """How gradients add up. "every": each micro-batch is averaged over ranks, as DDP does, and averages are added in
    fp32; "once": a rank adds up its own in fp32, and the sums are averaged; "no_sync": that in the model's dtype, by
    DDP, and losses are not divided."""

    @property
    def num_batches(self) -> int:
        return self.num_steps * self.accumulation


@dataclass
class Run:
    """The bits of one training run: every micro-batch's loss, the final weights and fp32 masters by name."""

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)


SCALE_POWER = 17
"""So high that the first steps overflow, or what it grows to does, and others of five steps do not."""
SCALE_WINDOW = 2


def cast(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Parameters and floating buffers to 16 bits in place, as the engine does."""
    return model.to(torch.bfloat16 if recipe.bf16 else torch.float16 if recipe.fp16 else torch.float32)


class MasterWeights:
    """fp32 master weights, their accumulated gradients, the optimizer over them, and the loss scale."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.recipe = recipe
        self.master_of: dict[nn.Parameter, Tensor] = {
            parameter: parameter.detach().clone().float().to("cpu" if recipe.offloaded else USED)
            for parameter in model.parameters()
            if parameter.requires_grad
        }
        groups = decay_groups(model)
        for group in groups:
            group["params"] = [self.master_of[parameter] for parameter in group["params"]]
        self.optimizer = CHOICES[recipe.optimizer].plain(groups)
        self.dynamic = PlainScale(power=SCALE_POWER, window=SCALE_WINDOW, hysteresis=1, consecutive=False)

    @property
    def scale(self) -> float:
        return self.dynamic.scale if self.recipe.fp16 else 1.0

    def accumulate(self) -> None:
        """Move each parameter's gradient into its master's, and clear it."""
        for parameter, master in self.master_of.items():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float().to(master.device)
            master.grad = gradient.clone() if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters, and copy them into the model's parameters; with fp16, unless one overflowed."""
        if self.recipe.fp16 and self.overflows():
            self.optimizer.zero_grad(set_to_none=True)
            return
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.master_of.values(), self.recipe.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter, master in self.master_of.items():
            parameter.copy_(master)

    def average(self) -> None:
        """Each sum over ranks, in their order; of what no rank has there is none."""
        for master in self.master_of.values():
            mine = torch.zeros_like(master) if master.grad is None else master.grad
            has: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(has, master.grad is not None)
            parts = [torch.empty_like(master) for _ in has]
            distributed.all_gather(parts, mine / len(has))
            master.grad = sum(parts[1:], parts[0]) if any(has) else None

    def overflows(self) -> bool:
        """Whether a gradient is not finite; else they are unscaled. On every rank alike, since they are reduced."""
        grads = [master.grad for master in self.master_of.values() if master.grad is not None]
        overflow = not all(bool(grad.isfinite().all()) for grad in grads)
        for grad in grads:
            grad.div_(self.scale)
        self.dynamic.update(overflow=overflow)
        return overflow


def train_reference(model: nn.Module, batches: Sequence[Batch], recipe: Recipe, *, ddp: bool = False) -> Run:
    """Train ``model`` in place on one rank, or on every rank of the default process group with ``ddp``.

    With ``ddp`` gradients are averaged over ranks by DDP: where ``recipe.sums`` is "every" before they are accumulated,
    which is what an engine does that shards gradients: it has nowhere to keep a whole one.
    """
    master_weights = MasterWeights(model, recipe)
    cast(model.to(USED), recipe)
    forward: Any = model
    if ddp and recipe.sums != "once":
        forward = DistributedDataParallel(model, find_unused_parameters=True)
        forward.register_comm_hook(None, lambda _state, bucket: _in_order(bucket.buffer()))
    no_sync = recipe.sums == "no_sync"
    run, remaining = Run(), iter(batches)
    for _ in range(recipe.num_steps):
        for number, batch in enumerate(itertools.islice(remaining, recipe.accumulation), start=1):
            is_last = number == recipe.accumulation
            for buffer in model.buffers() if ddp and recipe.sums == "once" else ():
                distributed.broadcast(buffer, 0)
            with forward.no_sync() if ddp and no_sync and not is_last else contextlib.nullcontext():
                loss = loss_of(forward(batch))
                scaled = loss if no_sync else loss / recipe.accumulation
                torch.autograd.backward(scaled.float() * master_weights.scale if recipe.fp16 else scaled)
            if is_last or not no_sync:
                master_weights.accumulate()
            run.losses.append(loss.detach().clone().cpu())
        if ddp and recipe.sums == "once":
            master_weights.average()
        master_weights.step()
    run.weights = {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}
    run.masters = {
        name: master_weights.master_of[parameter].clone().cpu()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter in master_weights.master_of
    }
    return run


def _in_order(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """The mean over ranks, added up in their order: what gloo adds first depends on where in a bucket it lies."""
    parts = [torch.empty_like(buffer) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, buffer / len(parts))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(sum(parts[1:], parts[0]))
    return future


def differing_bits(left: Tensor, right: Tensor) -> int:
    """Bits that differ between two tensors of one shape and dtype, NaN payloads and the sign of zero included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"cannot compare {left.dtype}{tuple(left.shape)} with {right.dtype}{tuple(right.shape)}")
    difference = left.contiguous().reshape(-1).view(torch.uint8) ^ right.contiguous().reshape(-1).view(torch.uint8)
    return sum(int((difference >> bit & 1).sum()) for bit in range(8)) if int(difference.count_nonzero()) else 0

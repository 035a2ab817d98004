"""Functions of autograd as users write them, for scripts that are judged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class KeepsOnContext(torch.autograd.Function):
    """Keeps the weight as an attribute, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight, ctx.x = weight, x
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ ctx.weight, gradient.t() @ ctx.x


class MadeAgain(torch.autograd.Function):
    """Keeps the input alone and calls the module again in backward, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.module, ctx.params = module, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            made: Tensor = module(x).clone()
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        given = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(given)
        wanted = [given, *(p for p in ctx.params if p.requires_grad)]
        found = iter(torch.autograd.grad(y, wanted, gradients[0], allow_unused=True))
        return None, next(found), *(next(found) if p.requires_grad else None for p in ctx.params)

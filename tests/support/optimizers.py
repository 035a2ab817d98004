"""Optimizers that cells of the parity matrix train with: as the engine gets them, and as the plain loop has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import optim

Groups = Iterable[dict[str, Any]]


class PaperLion(optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, in the order of operations of the authors' program."""

    def __init__(self, params: Groups, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                c = m * beta1 + p.grad * (1 - beta1)
                p.add_(torch.sign(c), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class PaperMuon(optim.Optimizer):
    """Jordan 2024 for matrices, in the order of operations of his program; torch's fused AdamW for the rest."""

    def __init__(self, params: Groups, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        rest = [
            {"params": [p for p in group["params"] if p.dim() < 2], "lr": group["lr"]}
            for group in self.param_groups
            if any(p.dim() < 2 for p in group["params"])
        ]
        self._rest = optim.AdamW(rest, lr, (0.9, 0.95), 1e-10, weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._rest.step()
        for group in self.param_groups:
            beta = group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None and p.dim() == 2):
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - beta)
                x = p.grad.lerp_(m, beta).bfloat16()
                if p.size(0) > p.size(1):
                    x = x.mT
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(5):
                    a = x @ x.mT
                    b = -4.7750 * a + 2.0315 * a @ a
                    x = 3.4445 * x + b @ x
                if p.size(0) > p.size(1):
                    x = x.mT
                x *= max(1, p.size(0) / p.size(1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x, alpha=-group["lr"])


@dataclass(frozen=True)
class Choice:
    plain: Callable[[Groups], optim.Optimizer]
    section: dict[str, Any] | None = None
    """What the configuration says; None: the engine is given an optimizer object."""
    client: Callable[[Groups], optim.Optimizer] | None = None


LEARNING_RATE: Final = 3e-3
_ADAM: Final[dict[str, Any]] = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8}
_SGD: Final[dict[str, Any]] = {"lr": LEARNING_RATE, "momentum": 0.9, "nesterov": True}
_LION: Final[dict[str, Any]] = {"lr": LEARNING_RATE / 10, "betas": (0.9, 0.99)}


def _sgd(groups: Groups) -> optim.Optimizer:
    """Not fused: torch's own fused SGD cannot step a parameter for the first time beside one that has momentum."""
    return optim.SGD(groups, **_SGD, fused=False)


def _rmsprop(groups: Groups) -> optim.Optimizer:
    return optim.RMSprop(groups, lr=LEARNING_RATE / 10, momentum=0.9, centered=True)


CHOICES: Final[dict[str, Choice]] = {
    "AdamW": Choice(lambda groups: optim.AdamW(groups, **_ADAM, fused=True), {"type": "AdamW", "params": _ADAM}),
    "amsgrad": Choice(
        lambda groups: optim.AdamW(groups, **_ADAM, amsgrad=True, fused=True),
        {"type": "AdamW", "params": {**_ADAM, "amsgrad": True}},
    ),
    "SGD": Choice(_sgd, client=_sgd),
    "Lion": Choice(lambda groups: PaperLion(groups, **_LION), {"type": "Lion", "params": _LION}),
    "RMSprop": Choice(_rmsprop, client=_rmsprop),
}

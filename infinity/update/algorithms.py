"""The optimizers that a configuration can name. Any other one that is element-wise can be passed as an object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from infinity.config import Optimizer as OptimizerConfig
from infinity.config.optimizer import AdagradOptimizer, AdamOptimizer, LionOptimizer, MuonOptimizer, SgdOptimizer
from infinity.update.muon import Muon


class Lion(Optimizer):
    """The sign of an interpolation of gradient and momentum, with decoupled decay (Chen et al. 2023, algorithm 2).

    The operations and their order are those of the authors' program, so that the bits are, too.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("a closure is not supported")
        for group in self.param_groups:
            lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum: Tensor = state["exp_avg"]
                param.mul_(1 - lr * decay)
                direction = momentum.mul(beta1).add_(param.grad * (1 - beta1)).sign_()
                param.add_(direction, alpha=-lr)
                momentum.mul_(beta2).add_(param.grad, alpha=1 - beta2)


LONG_AFTER: Final = float(1 << 23)
"""A count of steps after which no bias is left."""


def begin_uncorrected(optimizer: Optimizer) -> None:
    """Give an Adam's parameters that have a gradient and no state yet one whose moments are used as they are."""
    for group in optimizer.param_groups:
        moments = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        for param in group["params"]:
            state = optimizer.state[param]
            if param.grad is not None and not state:
                state.update({label: torch.zeros_like(param) for label in moments})
                state["step"] = torch.tensor(LONG_AFTER, device=param.device)


class _Uncorrected(Optimizer):
    """Moments that are used as they are (``bias_correction: false``)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        begin_uncorrected(self)
        super().step(closure)


class UncorrectedAdam(_Uncorrected, Adam):
    pass


class UncorrectedAdamW(_Uncorrected, AdamW):
    pass


def make_optimizer(config: OptimizerConfig, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """The optimizer that the section describes, over one empty parameter for each of ``groups``, which may hold
    hyper-parameters of their own."""
    options = config.params.model_dump()
    kind: type[Optimizer]
    match config:
        case AdamOptimizer():
            plain = (AdamW, UncorrectedAdamW) if config.decoupled_weight_decay else (Adam, UncorrectedAdam)
            corrected = options.pop("bias_correction")
            kind = plain[0] if corrected else plain[1]
            options = {**options, "fused": None if corrected else True}
            del options["adam_w_mode"], options["torch_adam"]
            options["weight_decay"] = config.weight_decay
        case SgdOptimizer():
            kind = SGD
        case AdagradOptimizer():
            kind = Adagrad
        case LionOptimizer():
            kind = Lion
        case MuonOptimizer():
            kind = Muon
            for name in ("lr", "muon_lr", "adam_lr"):
                del options[name]
        case _:
            kind = getattr(torch.optim, config.type)
    return kind(
        [{**group, "params": [torch.nn.Parameter(torch.zeros(1, device="cpu"))]} for group in groups], **options
    )

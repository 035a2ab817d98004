"""Muon: momentum whose matrices are orthogonalised, and AdamW for what is no matrix.

By Keller Jordan's description (2024). With ``ns_method`` "standard" the operations and their order are those of his
program, and so are the bits; "gram" is DeepSpeed's default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import AdamW

from infinity.config.optimizer import MuonParams

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""They make the polynomial's slope at zero as steep as it can be."""
NUM_ITERATIONS: Final = 5
RESTART: Final = 2
"""Iterations of "gram" before its products of rows are taken anew."""
NORM_MIN: Final = 1e-7
NO_MATRICES: Final = ("embed", "lm_head")
"""Parts of the names of matrices whose rows are looked up or compared one by one: AdamW steps these, too."""


class Muon(AdamW):
    """Groups with ``use_muon`` keep their momentum as ``exp_avg``; all others are AdamW's."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        ns_method: str = "gram",
    ) -> None:
        own = {"use_muon": False, "momentum": momentum, "ns_method": ns_method}
        super().__init__(
            [{**own, **group} for group in params], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
        )
        self.defaults.update(own)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            if group["use_muon"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["use_muon"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: Mapping[str, Any]) -> None:
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
            momentum: Tensor = state["exp_avg"]
            momentum.lerp_(param.grad, 1 - group["momentum"])
            direction = param.grad.lerp(momentum, group["momentum"])
            update = orthogonalised(direction.flatten(1) if direction.dim() == 4 else direction, group["ns_method"])
            update *= max(1, param.size(-2) / param.size(-1)) ** 0.5
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update.reshape(param.shape), alpha=-group["lr"])


def orthogonalised(matrix: Tensor, method: str) -> Tensor:
    """About the orthogonal matrix that is nearest, by Newton and Schulz; of a stack of matrices, each.

    Args:
        method: "standard" iterates the matrix itself, in bf16; "gram" the smaller matrix of its rows' products, in
            fp16. Without rounding they are one.
    """
    is_tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.mT if is_tall else matrix
    if method == "standard":
        x = x.bfloat16()
        x = _iterated(x / (x.norm(dim=(-2, -1), keepdim=True) + NORM_MIN))
    else:
        x = x.float() if x.dtype is torch.float16 else x
        x = (x / (x.norm(dim=(-2, -1), keepdim=True) + NORM_MIN)).half()
        x = _iterated(x) if x.size(-2) == x.size(-1) else _iterated_by_gram(x)
    return x.mT if is_tall else x


def _iterated(x: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _iterated_by_gram(x: Tensor) -> Tensor:
    """The same of a wide matrix, whose factors are multiplied before they are applied: twice, since what rounding adds
    to the products of rows grows."""
    a, b, c = COEFFICIENTS
    for num_iterations in (RESTART, NUM_ITERATIONS - RESTART):
        gram, factor = x @ x.mT, torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
        for left in reversed(range(num_iterations)):
            step = b * gram + c * gram @ gram
            factor = a * factor + step @ factor
            if left:
                applied = a * gram + step @ gram
                gram = a * applied + step @ applied
        x = factor @ x
    return x


def split_groups(
    groups: Sequence[Mapping[str, Any]], section: MuonParams, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """Each group as one of matrices and one of all else, with their learning rates.

    Args:
        names: what the model calls each parameter, by its id().
    """
    rates = {True: (section.muon_lr, section.lr, 0.02), False: (section.adam_lr, section.lr, 3e-4)}
    split = []
    for group in groups:
        for use_muon in (True, False):
            params = [param for param in group["params"] if _is_matrix(param, names) is use_muon]
            rate = next(rate for rate in (group.get("lr"), *rates[use_muon]) if rate is not None)
            if params:
                split.append({**group, "params": params, "use_muon": use_muon, "lr": rate})
    return split


def _is_matrix(param: Tensor, names: Mapping[int, str]) -> bool:
    """A parameter's own attribute ``use_muon`` decides, if it has one, else its shape and its name."""
    told = getattr(param, "use_muon", None)
    name = names.get(id(param), "").lower()
    return param.dim() >= 2 and not any(word in name for word in NO_MATRICES) if told is None else bool(told)

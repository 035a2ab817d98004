"""The optimizer that the user holds: torch's interface, state in chunks of the store.

``param_groups`` are live: learning-rate schedules write to them as to any torch optimizer. The state (master weights,
moments) is not in ``state``; it never exists as a whole in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from infinity.config import Optimizer as OptimizerConfig
from infinity.errors import ConfigError
from infinity.tiers.base import Lease, ShardStore
from infinity.tiers.collectives import Collectives
from infinity.update.gradients import GradientChunks
from infinity.update.sub_group import SubGroup

OPTIONS = ("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay")


class ShardedAdam(torch.optim.Optimizer):
    """Adam or AdamW over sharded state. Made by ``adam_from_config`` or ``adam_from_torch``, driven by the engine."""

    def __init__(self, param_groups: Iterable[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(list(param_groups), defaults)
        self._update: Callable[[], None] | None = None
        self.taken_over: Any = None
        """The torch optimizer whose groups these are, if the user gave one; its schedulers go on working."""

    def bind(self, update: Callable[[], None]) -> None:
        """The engine's update of all chunks, run by ``step``."""
        self._update = update

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Call ``engine.step()`` instead: it knows the boundary."""
        if closure is not None:
            raise ValueError("a closure would need a second forward inside the step; call engine(batch) before it")
        if self._update is None:
            raise RuntimeError("the optimizer is not bound to an engine")
        self._update()
        if self.taken_over is not None:
            self.taken_over._opt_called = True  # what torch's schedulers look for

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are taken out of ``param.grad`` as they appear and dropped by the update: nothing to do."""


def adam_from_config(config: OptimizerConfig, params: Sequence[Any]) -> ShardedAdam:
    """``params``: parameters, or dicts with their own hyper-parameters, as torch takes them."""
    values = config.params
    defaults = {
        "lr": values.lr,
        "betas": values.betas,
        "eps": values.eps,
        "weight_decay": values.weight_decay,
        "maximize": False,
        "decoupled_weight_decay": config.decoupled_weight_decay,
    }
    groups = [dict(p) for p in params] if params and isinstance(params[0], dict) else [{"params": list(params)}]
    for number, group in enumerate(groups):
        for name in group.keys() - {"params", "name", *OPTIONS}:
            raise ConfigError(f"model_parameters[{number}].{name}", group[name], f"known here: {', '.join(OPTIONS)}")
    return ShardedAdam(groups, defaults)


def adam_from_torch(optimizer: torch.optim.Optimizer) -> ShardedAdam:
    """Take over groups and hyper-parameters of a fresh ``torch.optim.Adam`` or ``AdamW``.

    Raises:
        ConfigError: another optimizer, one that has state already, or an option with no sharded form.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError("optimizer", type(optimizer).__name__, "pass torch.optim.Adam or torch.optim.AdamW")
    if optimizer.state:
        raise ConfigError("optimizer", "has state", "pass it before its first step; state is sharded from step 0 on")
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for group in optimizer.param_groups:
        for name in ("amsgrad", "capturable", "differentiable"):
            if group.get(name):
                raise ConfigError(f"optimizer.{name}", True, "not available with sharded state: set it to False")
        group.setdefault("decoupled_weight_decay", decoupled)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"].item()
    groups = optimizer.param_groups
    sharded = ShardedAdam([dict(group) for group in groups], {k: v for k, v in groups[0].items() if k != "params"})
    sharded.param_groups = groups  # the same dicts: a schedule made on the given optimizer drives this one
    sharded.taken_over = optimizer
    return sharded


def group_indices(optimizer: ShardedAdam | None, index_of: dict[int, int], params: Sequence[nn.Parameter]) -> list[int]:
    """Optimizer group of each parameter, -1 for those without (frozen). ``index_of``: id(param) -> index.

    ``optimizer``: None where nothing trains.

    Raises:
        ConfigError: a trainable parameter is in no group, or a parameter is not the model's.
    """
    groups = [-1] * len(params)
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for param in group["params"]:
            if id(param) not in index_of:
                raise ConfigError("model_parameters", tuple(param.shape), "the parameter does not belong to the model")
            groups[index_of[id(param)]] = number
    for index, param in enumerate(params):
        if param.requires_grad and groups[index] < 0:
            raise ConfigError(
                "model_parameters",
                tuple(param.shape),
                "a trainable parameter of this shape is in no group: add it, or freeze it with requires_grad_(False)",
            )
    return groups


class Update:
    """One optimizer step over all chunks: clip, then stream chunk after chunk through the frames."""

    def __init__(
        self,
        sub_groups: Sequence[SubGroup],
        optimizer: ShardedAdam,
        gradients: GradientChunks,
        *,
        store: ShardStore,
        collectives: Collectives,
        num_params: int,
        max_norm: float,
        sub_groups_ahead: int,
    ) -> None:
        self._sub_groups = sub_groups
        self._optimizer, self._gradients = optimizer, gradients
        self._store, self._collectives = store, collectives
        self._max_norm, self._sub_groups_ahead = max_norm, sub_groups_ahead
        self.steps = [0] * num_params
        """Updates that each parameter has had; one without a gradient neither decays nor counts."""
        self.grad_norm: float | None = None
        """Global norm before clipping in the last step; None without clipping."""
        self._norm_asked = max_norm > 0
        self._clip_once: float | None = None
        self.num_updated = 0
        """Chunks that the running, or failed, step has begun to change: with 0 the step may be repeated."""

    @property
    def wants_norms(self) -> bool:
        """Whether norms should be taken while gradients are warm."""
        return self._norm_asked

    def ask_for_norm(self) -> float | None:
        """The norm of the last step, if it was taken; from now on it is."""
        self._norm_asked = True
        return self.grad_norm

    def clip_once(self, max_norm: float) -> torch.Tensor:
        """Have the coming update clip to ``max_norm``, whatever the config says. The norm, 0-D fp32."""
        self._clip_once = float(max_norm)
        return self._norm()

    def forget_clipping(self) -> None:
        """The gradients that were to be clipped are dropped."""
        self._clip_once = None

    def run(self, present: Sequence[bool]) -> None:
        """``present``: for each parameter, whether any rank has a gradient for it."""
        self.num_updated = 0
        clip = self._clip_factor()
        todo = [g for g in self._sub_groups if any(present[s.param] for s in g.placement.segments)]
        options = [{name: group[name] for name in OPTIONS} for group in self._optimizer.param_groups]
        leases: deque[tuple[SubGroup, Lease]] = deque()
        waiting = iter(todo)
        try:
            while True:
                while len(leases) <= self._sub_groups_ahead and (sub_group := next(waiting, None)) is not None:
                    leases.append((sub_group, sub_group.acquire(self._store)))
                if not leases:
                    break
                sub_group, lease = leases[0]
                lease.wait()
                self.num_updated += 1
                sub_group.update(lease, present=present, steps=self.steps, options=options, clip=clip)
                leases.popleft()
        except BaseException:
            for _, lease in leases:
                lease.release()
            raise
        for index, flag in enumerate(present):
            if flag:
                self.steps[index] += 1
        self._gradients.clear()
        self._clip_once = None

    def _clip_factor(self) -> torch.Tensor | None:
        """The factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1. None: no clipping."""
        max_norm = self._max_norm if self._clip_once is None else self._clip_once
        if max_norm <= 0 and self._clip_once is None:
            if self._norm_asked:
                self._norm()
            return None
        return (max_norm / (self._norm() + 1e-6)).clamp(max=1.0)

    def _norm(self) -> torch.Tensor:
        total = self._gradients.square_sum()
        self._collectives.sum(total, "sum the norm of the gradients")
        norm = total.sqrt().float()
        self.grad_norm = float(norm)
        return norm

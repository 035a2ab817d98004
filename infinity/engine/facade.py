"""What users touch: an ``nn.Module`` around theirs, with the calls of a training loop."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.engine.export import full_master_state_dict, full_state_dict
from infinity.engine.loop import TrainingLoop
from infinity.engine.phases import Phases
from infinity.engine.runtime import Runtime
from infinity.report import IoReport
from infinity.tiers.base import HostTier
from infinity.tiers.collectives import Collectives
from infinity.update.optimizer import ShardedAdam
from infinity.weights.sharded_model import ShardedModel


class Engine(nn.Module):
    """Trains one model: ``loss = engine(batch); engine.backward(loss); engine.step()``. Made by ``initialize``.

    ``module`` is the user's model, which may also be called directly; attributes that the engine lacks are its. Outside
    calls its large parameters are sharded: they keep shape and dtype, every use of one brings its weights for that use,
    and what cannot be served is refused by name with ``WeightsError``.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded: ShardedModel,
        optimizer: ShardedAdam | None,
        optimizer_groups: Sequence[int],
        *,
        config: Config,
        collectives: Collectives,
        tier: HostTier | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.optimizer = optimizer
        phases = Phases(type(module).__name__)
        self._runtime = Runtime(module, sharded, phases, config=config, collectives=collectives)
        self._loop = TrainingLoop(self._runtime, phases, optimizer, optimizer_groups, config=config, tier=tier)
        self.module = module
        self.training = module.training
        # also at exit, and when nobody holds the engine any more: nothing below refers back to it
        self._end = weakref.finalize(self, self._loop.close)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # The loop

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, and its output."""
        return self._loop.forward(self.module, args, kwargs)

    def backward(
        self,
        loss: torch.Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        create_graph: bool = False,
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss / gradient_accumulation_steps``.

        An error leaves the step unapplied, its accumulated gradients dropped: repeat it from its first micro-batch.

        Args:
            loss: a scalar of a graph that the model's call built.
            retain_graph: keep the graph for another backward, as in ``torch.Tensor.backward``.
            scale_wrt_gas: whether to divide by the number of micro-batches.
            create_graph: build the graph of the gradients, too.

        Returns:
            The loss that was differentiated, without history.
        """
        return self._loop.backward(loss, retain_graph=retain_graph, scale=scale_wrt_gas, create_graph=create_graph)

    def step(self) -> None:
        """The end of a micro-batch; the ``gradient_accumulation_steps``-th updates the parameters."""
        self._loop.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates."""
        return self._loop.is_boundary()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what the running step has accumulated."""
        self._loop.zero_grad()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Between the last backward and ``step``: clip this step's gradients to a global norm, as
        ``torch.nn.utils.clip_grad_norm_`` would. Collective.

        Returns:
            The norm before clipping, 0-D fp32 on the CPU.
        """
        return self._loop.clip_grad_norm(max_norm)

    # What it knows

    @property
    def global_steps(self) -> int:
        """Optimizer steps done."""
        return self._loop.global_steps

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` since the last update."""
        return self._loop.micro_steps

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The schedule that is stepped after every update."""
        return self._loop.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        self._loop.lr_scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return self._runtime.device

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def get_lr(self) -> list[float]:
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step, before clipping. Without ``gradient_clipping`` the first call asks for it: it is
        known from the next step on."""
        return self._loop.grad_norm()

    def io_report(self) -> IoReport:
        """The last step of this rank: traffic per tier and kind, hits, stalls, times, memory."""
        return self._loop.io_report()

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """What ``module.state_dict()`` of the unsharded model would be, on the CPU. Collective.

        Shared parameters stand under each of their names; buffers and extra state are included. Weights are gathered
        group by group.

        Args:
            rank0_only: only rank 0 gets the result, the others an empty dict.
        """
        return full_state_dict(self._runtime, rank0_only=rank0_only)

    def full_master_state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> full fp32 master weight on the CPU, trainable parameters only. Collective."""
        return full_master_state_dict(self._runtime)

    # The end

    def destroy(self) -> None:
        """Give everything back: hooks, arena, swap files, the private daemon. Parameters stay sharded. Idempotent."""
        self._end()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.destroy()

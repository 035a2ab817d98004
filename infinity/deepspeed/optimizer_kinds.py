"""DeepSpeed's classes of optimizers, by which scripts ask what they have: one of infinity's under their names.

An engine's optimizer becomes of the class that DeepSpeed would have made for its stage and precision, and answers what
scripts read of that one. What it does stays the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from infinity.config import Config
from infinity.deepspeed.hooks import DeepSpeedZeRoOffload
from infinity.deepspeed.shown_state import ShownState
from infinity.engine import Engine
from infinity.errors import EngineStateError
from infinity.plan.leaves import get_leaf_modules
from infinity.update.optimizer import ShardedOptimizer

_STATES: Final = (
    "states are sharded by group: use deepspeed.utils.safe_get_full_fp32_param, safe_get_local_fp32_param, …"
)
_GRADIENTS: Final = "gradients are sharded by group: use deepspeed.utils.safe_get_full_grad or safe_get_local_grad"
_OVERFLOW: Final = "optimizer.overflow says after a step whether it was skipped"
_NORM: Final = "engine.get_global_grad_norm() has the norm"
_RATES: Final = "optimizer.param_groups have the learning rates, and engine.get_lr() a list of them"
ABSENT: Final[Mapping[str, str]] = {
    name: why
    for names, why in (
        ("fp16_partitioned_groups_flat fp32_groups_flat bit16_groups_flat fp16_groups_flat", _STATES),
        ("get_full_hp_param", _STATES),
        ("params_in_partition params_not_in_partition partition_count fp16_partitioned_groups", _STATES),
        ("get_fp32_grad_for_param get_fp32_grad_partitions all_grad_tensors", _GRADIENTS),
        ("reduce_gradients get_grads_to_reduce", "gradients are reduced while engine.backward() goes on"),
        ("check_overflow has_overflow has_overflow_serial", _OVERFLOW),
        ("scaled_global_norm get_grad_norm_direct", _NORM),
        ("get_lr set_lr", _RATES),
        ("refresh_fp32_params", "load_checkpoint and safe_set_full_fp32_param keep both copies alike"),
    )
    for name in names.split()
}
"""What an optimizer of DeepSpeed's has and these have not, with what to do instead."""


class DeepSpeedOptimizer(ShardedOptimizer):
    """What all of them have."""

    _engine: weakref.ref[Engine]
    _config: Config
    state: ShownState  # type: ignore[assignment]
    custom_loss_scaler = False
    external_loss_scale = None

    def __getattr__(self, name: str) -> Any:
        why = f" {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"infinity's {type(self).__name__} has no {name}{':' if why else ''}{why}")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that was passed, or this one."""
        return self if self.taken_over is None else self.taken_over

    @property
    def clip_grad(self) -> float:
        """The norm that gradients are clipped to; 0: they are not."""
        return self._config.gradient_clipping

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights in forward."""
        dtype: torch.dtype = self.param_groups[0]["params"][0].dtype
        return dtype

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group."""
        return [list(group["params"]) for group in self.param_groups]

    bit16_groups = fp16_groups

    def override_loss_scale(self, loss_scale: float) -> None:
        """Multiply losses by ``loss_scale`` from now on; a dynamic scale goes on from there."""
        self.scale.value = float(loss_scale)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **others: Any) -> None:
        """``engine.backward`` of a loss that is not to be divided by the number of micro-batches."""
        self._of().backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """See ``engine.offload_states``."""
        self._of().offload_states(*args, **kwargs)

    def reload_states(self, *args: Any, **kwargs: Any) -> None:
        """See ``engine.reload_states``."""
        self._of().reload_states(*args, **kwargs)

    def _of(self) -> Engine:
        engine = self._engine()
        if engine is None:
            raise EngineStateError("the optimizer's engine is gone")
        return engine


class FP16_Optimizer(DeepSpeedOptimizer):  # noqa: N801
    """The optimizer of fp16 at stage 0."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):  # noqa: N801
    """The same for what DeepSpeed does not fuse; here an engine's is FP16_Optimizer."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """What shards, or keeps masters."""

    @property
    def reduce_scatter(self) -> bool:
        """Whether gradients are reduced to the ranks that need them."""
        return self._config.zero_optimization.reduce_scatter

    @property
    def contiguous_gradients(self) -> bool:
        """True: gradients are reduced by groups."""
        return True

    @property
    def averaged_gradients(self) -> dict[int, list[torch.Tensor]]:
        """By the number of each param group this rank's part of its gradients, 1-D: copies, of which a write is
        refused. Empty when a step has begun no backward."""
        return self.state.gradients()

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step."""
        return self._config.gradient_accumulation_steps

    @property
    def sub_group_size(self) -> int:
        """Elements that are stepped at once, at most."""
        return self._config.zero_optimization.sub_group_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next ``step`` updates."""
        engine = self._engine()
        return engine is not None and engine.is_gradient_accumulation_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """See ``engine.set_gradient_accumulation_boundary``."""
        if (engine := self._engine()) is not None:
            engine.set_gradient_accumulation_boundary(is_boundary)

    def needs_scaler(self) -> bool:
        """Whether losses are scaled before their backward."""
        return self.scale.dynamic or self.scale.value != 1.0


class BF16_Optimizer(ZeROOptimizer):  # noqa: N801
    """bf16 at stage 0."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""

    @property
    def partition_gradients(self) -> bool:
        """Whether gradients are sharded, as states are."""
        return self._config.zero_optimization.stage == 2

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's part of each group's fp32 weights, 1-D: copies, of which a write is refused."""
        return self.state.masters()

    @property
    def cpu_offload(self) -> bool:
        """Whether states lie in host memory or on NVMe."""
        return self._config.zero_optimization.offload_optimizer.device != "none"


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # noqa: N801
    """Stage 3."""

    parameter_offload: DeepSpeedZeRoOffload
    """What scripts take hooks off through."""

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """This rank's part of each group's fp32 weights, 1-D: copies, of which a write is refused."""
        return self.state.masters()

    @property
    def leaf_parameters(self) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each module that is gathered as one, ``set_z3_leaf_modules``."""
        return {leaf: list(leaf.parameters()) for leaf in get_leaf_modules(self._of().module)}

    @property
    def persistent_parameters(self) -> list[nn.Parameter]:
        """Those whose weights stay in memory."""
        return [param for group in self.fp16_groups for param in group if getattr(param, "ds_persist", False)]


def speak(optimizer: ShardedOptimizer, engine: Engine, config: Config) -> None:
    """Make the engine's optimizer one of DeepSpeed's classes."""
    kind: type[DeepSpeedOptimizer] = DeepSpeedOptimizer
    if config.zero_optimization.stage:
        kind = DeepSpeedZeroOptimizer_Stage3 if config.zero_optimization.stage == 3 else DeepSpeedZeroOptimizer
    elif config.fp16.enabled or config.bf16.enabled:
        kind = FP16_Optimizer if config.fp16.enabled else BF16_Optimizer
    optimizer.__class__ = kind
    vars(optimizer).update(_engine=weakref.ref(engine), _config=config, state=ShownState(optimizer, engine))
    if optimizer.taken_over is not None:
        optimizer.taken_over.state = optimizer.state
    if kind is DeepSpeedZeroOptimizer_Stage3:
        vars(optimizer)["parameter_offload"] = DeepSpeedZeRoOffload(engine.module)

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
from infinity.config.optimizer import AdamOptimizer, LionOptimizer
from infinity.deepspeed.hooks import DeepSpeedZeRoOffload
from infinity.deepspeed.loss_scalers import LossScaleConfig
from infinity.deepspeed.optimizers import FusedAdam, FusedLion
from infinity.deepspeed.shown_state import ShownState
from infinity.engine import Engine
from infinity.errors import EngineStateError
from infinity.plan.leaves import get_leaf_modules
from infinity.update.algorithms import make_optimizer
from infinity.update.loss_scale import DynamicLossScale
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
        ("scaled_global_norm get_grad_norm_direct _global_grad_norm", _NORM),
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

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by now; 1 without fp16. What is set goes on as by ``override_loss_scale``."""
        return self.scale.value

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        self.override_loss_scale(loss_scale)

    cur_scale = loss_scale

    def override_loss_scale(self, loss_scale: float) -> None:
        """Multiply losses by ``loss_scale`` from now on; a dynamic scale goes on from there."""
        self.scale.value = float(loss_scale)

    def _norm(self) -> float:
        """The engine's norm of the last step's gradients; 0 before the first step."""
        engine = self._of()
        norm = engine.get_global_grad_norm()
        return 0.0 if norm is None and not engine.global_steps else norm  # type: ignore[return-value]

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


class BasicOptimizer(DeepSpeedOptimizer):
    """Stage 0 in fp32, where DeepSpeed's engine has the optimizer itself that was passed or configured.

    ``isinstance`` finds it to be of that one's class, and it is equal to one that was passed. A class derived from both
    would take properties and methods of the user's, which are of an optimizer that nobody steps.
    """

    _basic: type[torch.optim.Optimizer]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._basic

    def __eq__(self, other: object) -> bool:
        return other is self or (self.taken_over is not None and other is self.taken_over)

    def __hash__(self) -> int:
        return object.__hash__(self if self.taken_over is None else self.taken_over)


class _HalfOptimizer(DeepSpeedOptimizer):
    """Stage 0 in 16 bits."""

    _global_grad_norm = property(DeepSpeedOptimizer._norm)

    @property
    def low_precision_dtype(self) -> torch.dtype:
        """The dtype of the weights in forward."""
        return self.dtype

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """How the loss scale moves, and where it stands."""
        return LossScaleConfig.of(self.scale, self.dtype)


class FP16_Optimizer(_HalfOptimizer):  # noqa: N801
    """Stage 0 in fp16 or bf16 under FusedAdam, which is the Adam that a configuration names."""

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """Each group's fp32 weights, 1-D: copies, of which a write is refused."""
        return self.state.masters()


class FP16_UnfusedOptimizer(_HalfOptimizer):  # noqa: N801
    """The same under any other optimizer."""

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """The fp32 weights of each group's parameters: copies, of which a write is refused."""
        split = zip(self.state.masters(), self.fp16_groups, strict=True)
        return [
            [
                part.view(param.shape)
                for part, param in zip(torch.split(flat, [p.numel() for p in group]), group, strict=True)
            ]
            for flat, group in split
        ]


class ZeROOptimizer(DeepSpeedOptimizer):
    """What shards, or keeps masters."""

    _global_grad_norm = property(DeepSpeedOptimizer._norm)

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
    """Stage 1 in bf16, whose gradients add up in fp32 and whose states are on the device."""

    @property
    def bf16_groups(self) -> list[list[nn.Parameter]]:
        """The weights, by param group."""
        return self.fp16_groups

    @property
    def fp32_groups_flat_partition(self) -> list[torch.Tensor]:
        """This rank's part of each group's fp32 weights, 1-D: copies, of which a write is refused."""
        return self.state.masters()


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
    basic = _basic_kind(optimizer, config)
    kind = _kind(basic, config)
    vars(optimizer).update(_engine=weakref.ref(engine), _config=config, _basic=basic)
    vars(optimizer)["state"] = ShownState(optimizer, engine)
    if isinstance(optimizer.scale, DynamicLossScale) and not config.zero_optimization.stage:
        optimizer.scale.raises_at_least = False  # ZeRO's optimizers alone give up there
    optimizer.__class__ = kind
    if optimizer.taken_over is not None:
        optimizer.taken_over.state = optimizer.state
    if kind is DeepSpeedZeroOptimizer_Stage3:
        vars(optimizer)["parameter_offload"] = DeepSpeedZeRoOffload(engine.module)


def _kind(basic: type[torch.optim.Optimizer], config: Config) -> type[DeepSpeedOptimizer]:
    """The class of DeepSpeed's own optimizer over that one."""
    zero = config.zero_optimization
    if zero.stage == 3:
        return DeepSpeedZeroOptimizer_Stage3
    if zero.stage:
        in_fp32 = config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32"
        is_bf16s = zero.stage == 1 and in_fp32 and zero.offload_optimizer.device == "none"
        return BF16_Optimizer if is_bf16s else DeepSpeedZeroOptimizer
    if config.fp16.enabled or config.bf16.enabled:
        return FP16_Optimizer if issubclass(basic, FusedAdam) else FP16_UnfusedOptimizer
    return BasicOptimizer


def _basic_kind(optimizer: ShardedOptimizer, config: Config) -> type[torch.optim.Optimizer]:
    """The class of the optimizer that DeepSpeed would have below its own."""
    section = config.optimizer
    if optimizer.taken_over is not None or section is None:
        return type(optimizer.taken_over or optimizer)
    if isinstance(section, AdamOptimizer) and not section.params.torch_adam:
        return FusedAdam
    return FusedLion if isinstance(section, LionOptimizer) else type(make_optimizer(section, [{}]))

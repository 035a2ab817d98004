"""Which dtype each kind of state has, and what each costs on every tier. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from infinity.config import Config
from io_daemon.shared.protocol import ObjectKind

FP32 = torch.float32
_COMMUNICATION = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    weight: torch.dtype
    """The dtype of the module's parameters and floating-point buffers, and of forward and backward."""
    reduce: torch.dtype
    """The dtype of the reduce-scatter."""
    gradient: torch.dtype
    """The dtype of the gradients kept until the update: the narrowest that loses nothing."""
    master: bool
    """Weights are 16-bit and an fp32 copy is kept; else the weights are the master weights."""

    @property
    def accumulates(self) -> bool:
        """Whether several gradients may be added up: in fp32 only."""
        return self.gradient is FP32

    @classmethod
    def of(cls, config: Config) -> Precision:
        weight = torch.bfloat16 if config.bf16.enabled else FP32
        reduce = _COMMUNICATION[config.communication_data_type] if config.communication_data_type else weight
        return cls(
            weight=weight, reduce=reduce, gradient=FP32 if config.accumulates else reduce, master=weight is not FP32
        )

    def dtypes(self, *, trainable: bool) -> dict[int, torch.dtype]:
        """dtype by object kind of a chunk whose parameters are trainable, or frozen."""
        kinds: dict[int, torch.dtype] = {ObjectKind.WEIGHT: self.weight}
        if trainable:
            kinds[ObjectKind.GRAD] = self.gradient
            kinds[ObjectKind.EXP_AVG] = kinds[ObjectKind.EXP_AVG_SQ] = FP32
            if self.master:
                kinds[ObjectKind.MASTER] = FP32
        return kinds

    @property
    def stepped(self) -> ObjectKind:
        """The kind that the optimizer steps."""
        return ObjectKind.MASTER if self.master else ObjectKind.WEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """Masks of kinds: on the device, in the daemon's arena for good, or streamed through it."""

    device_mask: int
    pinned_mask: int
    nvme_mask: int

    @classmethod
    def of(cls, config: Config, kinds: Mapping[int, torch.dtype]) -> Tiers:
        zero = config.zero_optimization
        masks = {"none": 0, "cpu": 0, "nvme": 0}
        for kind in kinds:
            offload = zero.offload_param if kind == ObjectKind.WEIGHT else zero.offload_optimizer
            masks[offload.device] |= 1 << kind
        return cls(device_mask=masks["none"], pinned_mask=masks["cpu"], nvme_mask=masks["nvme"])

    @property
    def host_mask(self) -> int:
        return self.pinned_mask | self.nvme_mask

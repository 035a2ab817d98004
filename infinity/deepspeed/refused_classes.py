"""Classes of what is not built. Scripts may import them and ask ``isinstance``, whose answer is no; making one is
refused in the words of ``absent``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from infinity.deepspeed.absent import reason
from infinity.errors import ConfigError


class Refused(type):
    """The class of classes that have no instances, nor have classes derived from them."""

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        known = next(each for each in cls.__mro__ if each.__module__ == __name__)
        raise ConfigError(f"deepspeed.{known.PLACE}", "made", str(reason(known.PLACE)))  # type: ignore[attr-defined]


class PipelineModule(nn.Module, metaclass=Refused):
    """A model as a sequence of layers, cut into stages of ranks."""

    PLACE = "pipe.PipelineModule"


class PipelineEngine(metaclass=Refused):
    """The engine of a ``PipelineModule``."""

    PLACE = "runtime.pipe.engine.PipelineEngine"


class LayerSpec(metaclass=Refused):
    """A layer of a ``PipelineModule`` that its stage builds."""

    PLACE = "pipe.LayerSpec"


class TiedLayerSpec(LayerSpec):
    """One whose weights other stages have, too."""

    PLACE = "pipe.TiedLayerSpec"


class MoE(nn.Module, metaclass=Refused):
    """A layer whose experts lie on different ranks."""

    PLACE = "moe.layer.MoE"


class _NoOptimizer(torch.optim.Optimizer, metaclass=Refused):
    """Registries of frameworks import its kind, whatever the job then steps by."""


class FusedLamb(_NoOptimizer):
    """LAMB in one kernel."""

    PLACE = "ops.lamb.FusedLamb"


class OnebitAdam(_NoOptimizer):
    """Adam whose momentum ranks tell each other in one bit."""

    PLACE = "runtime.fp16.onebit.OnebitAdam"


class OnebitLamb(_NoOptimizer):
    """LAMB likewise."""

    PLACE = "runtime.fp16.onebit.OnebitLamb"


class ZeroOneAdam(_NoOptimizer):
    """Adam likewise, and not in every step."""

    PLACE = "runtime.fp16.onebit.ZeroOneAdam"


class SuperOffloadOptimizer_Stage3(metaclass=Refused):  # noqa: N801 (the name is DeepSpeed's)
    """ZeRO-3's optimizer whose steps another process takes while backward goes on."""

    PLACE = "runtime.superoffload.superoffload_stage3.SuperOffloadOptimizer_Stage3"


class DeepSpeedCheckpoint(metaclass=Refused):
    """A directory that DeepSpeed has saved, by stages and parts of tensors."""

    PLACE = "checkpoint.DeepSpeedCheckpoint"


class ZeROCheckpoint(metaclass=Refused):
    """The same, by shards of optimizer states."""

    PLACE = "checkpoint.ZeROCheckpoint"

"""Loss scalers for loops of one's own, with DeepSpeed's arguments; the engine's is ``engine.optimizer.scale``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import torch

from infinity.deepspeed.precision_config_classes import (
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
)
from infinity.update.loss_scale import DynamicLossScale, FixedLossScale, LossScale

_ARGUMENTS: Final = {
    INITIAL_LOSS_SCALE: 2.0**32, SCALE_WINDOW: 1000, MIN_LOSS_SCALE: 1.0, DELAYED_SHIFT: 1,
    CONSECUTIVE_HYSTERESIS: False,
}  # fmt: skip

_SHOWN: Final = (
    "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_factor", "scale_window", "min_scale", "delayed_shift",
    "consecutive_hysteresis",
)  # fmt: skip
"""What DeepSpeed's dynamic scaler shows of itself."""


class LossScalerBase:
    """Multiplies a loss by a scale before its backward, and learns from each step whether it overflowed."""

    dynamic = False

    def __init__(self, scale: LossScale) -> None:
        self._scale: Any = scale

    @property
    def loss_scale(self) -> float:
        """The scale now."""
        return float(self._scale.value)

    cur_scale = loss_scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self.loss_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Any, ...], grad_out: Any) -> tuple[Any, ...]:
        """Gradients times the scale, as a backward hook returns them."""
        return tuple(None if each is None else self.loss_scale * each for each in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """A step was applied, or overflowed. Raises LossScaleError where no smaller scale is allowed."""
        self._scale.update(overflow=overflow)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Backward of the loss times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


class LossScaler(LossScalerBase):
    """One scale for the whole training."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(FixedLossScale(float(scale)))


class DynamicLossScaler(LossScalerBase):
    """A scale that falls with overflows and rises after ``scale_window`` good steps."""

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        """``raise_error_at_min_scale`` False: an overflow at the least scale leaves it as it is. ``dtype`` is shown."""
        self.dtype = dtype
        scale = DynamicLossScale(
            initial=float(init_scale),
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            least=float(min_scale),
        )
        scale.raises_at_least = self.raise_error_at_min_scale = raise_error_at_min_scale
        super().__init__(scale)

    def __getattr__(self, name: str) -> Any:
        if name not in _SHOWN:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self._scale, name)


def CreateLossScaler(  # noqa: N802
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """A dynamic scaler for fp16 where ``dynamic_scaling``, else a fixed one, of 1 for other dtypes."""
    if dtype is torch.float16 and dynamic_scaling:
        given = dynamic_loss_args or {}
        return DynamicLossScaler(**{name: given.get(name, default) for name, default in _ARGUMENTS.items()})
    return LossScaler(static_loss_scale if dtype is torch.float16 else 1.0)


class LossScaleProfile(StrEnum):
    """Which of DeepSpeed's optimizers at stage 0 a loss scale is of: it decides where a dynamic one begins."""

    FUSED = "fused"
    UNFUSED = "unfused"


_BEGINS: Final[Mapping[LossScaleProfile, Mapping[str, float]]] = {
    LossScaleProfile.FUSED: {INITIAL_LOSS_SCALE: 2.0**32, MIN_LOSS_SCALE: 1.0},
    LossScaleProfile.UNFUSED: {INITIAL_LOSS_SCALE: 2.0**16, MIN_LOSS_SCALE: 0.25},
}
_OF_DYNAMIC: Final = {
    "cur_iter": "cur_iter", "last_overflow_iter": "last_overflow_iter", "scale_factor": "scale_factor",
    "scale_window": "scale_window", "min_loss_scale": "min_scale",
}  # fmt: skip
"""What is shown of a dynamic scale, and what the scale itself calls it."""


class LossScaleConfig:
    """A loss scale as DeepSpeed's optimizers at stage 0 show it: how it moves, and where it stands now."""

    def __init__(
        self,
        low_precision_dtype: torch.dtype,
        dynamic_loss_scale: bool,
        static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None,
        *,
        profile: LossScaleProfile = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:
        """
        Args:
            low_precision_dtype: the scale is 1, and fixed, unless this is fp16.
            static_loss_scale: the scale where it is not dynamic.
            dynamic_loss_args: what ``DynamicLossScaler`` takes; None: the profile's.
            initial_dynamic_scale: where a dynamic scale begins without ``dynamic_loss_args``.
        """
        scale: LossScale = FixedLossScale(static_loss_scale if low_precision_dtype is torch.float16 else 1.0)
        if low_precision_dtype is torch.float16 and dynamic_loss_scale:
            begins = dict(_BEGINS[profile])
            if initial_dynamic_scale is not None:
                begins[INITIAL_LOSS_SCALE] = initial_dynamic_scale
            scale = DynamicLossScaler(**{**begins, **(dynamic_loss_args or {})})._scale
        self._show(scale, low_precision_dtype)

    def _show(self, scale: LossScale, dtype: torch.dtype) -> None:
        self._scale, self.use_grad_scaling = scale, dtype is torch.float16

    @classmethod
    def of(cls, scale: LossScale, dtype: torch.dtype) -> LossScaleConfig:
        """What shows ``scale`` as steps change it, of an optimizer of weights in ``dtype``."""
        shown = cls.__new__(cls)
        shown._show(scale, dtype)
        return shown

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether steps change the scale."""
        return self._scale.dynamic

    @property
    def cur_scale(self) -> float:
        """The scale now."""
        return self._scale.value

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_DYNAMIC or not self.dynamic_loss_scale:
            raise AttributeError(f"{type(self).__name__} has no {name}{' of a fixed scale' * (name in _OF_DYNAMIC)}")
        return getattr(self._scale, _OF_DYNAMIC[name])

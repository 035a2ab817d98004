"""Loss scalers for loops of one's own, with DeepSpeed's arguments; the engine's is ``engine.optimizer.scale``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from infinity.errors import LossScaleError
from infinity.update.loss_scale import DynamicLossScale, FixedLossScale, LossScale

_ARGUMENTS: Final = {
    "init_scale": 2.0**32, "scale_window": 1000, "min_scale": 1.0, "delayed_shift": 1, "consecutive_hysteresis": False,
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
        self.raise_error_at_min_scale, self.dtype = raise_error_at_min_scale, dtype
        super().__init__(
            DynamicLossScale(
                initial=float(init_scale),
                window=scale_window,
                hysteresis=delayed_shift,
                consecutive_hysteresis=consecutive_hysteresis,
                least=float(min_scale),
            )
        )

    def update_scale(self, overflow: bool) -> None:
        """A step was applied, or overflowed. Raises LossScaleError where no smaller scale is allowed."""
        try:
            super().update_scale(overflow)
        except LossScaleError:
            if self.raise_error_at_min_scale:
                raise
            self._scale.cur_iter += 1

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

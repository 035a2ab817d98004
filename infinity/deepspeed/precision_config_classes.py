"""DeepSpeed's classes of the sections ``fp16`` and ``bf16``, for scripts that read a raw configuration through them.

The engine itself reads ``infinity.config``: what it refuses there may stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from infinity.deepspeed.config_model import DeepSpeedConfigModel

FP16: Final = "fp16"
BFLOAT16: Final = "bf16"
BFLOAT16_OLD: Final = "bfloat16"
INITIAL_LOSS_SCALE: Final = "init_scale"
SCALE_WINDOW: Final = "scale_window"
DELAYED_SHIFT: Final = "delayed_shift"
CONSECUTIVE_HYSTERESIS: Final = "consecutive_hysteresis"
MIN_LOSS_SCALE: Final = "min_scale"


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("loss_scale must be a number, not bool")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError("loss_scale must be a number") from None


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section ``fp16``."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: Annotated[float, BeforeValidator(_number)] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """0: dynamic."""
    initial_scale_power: int = Field(default=16, ge=0)
    loss_scale_window: int = Field(default=1000, ge=0)
    hysteresis: int = Field(default=2, ge=0)
    consecutive_hysteresis: bool = False
    min_loss_scale: int = Field(default=1, ge=0)
    fp16_master_weights_and_grads: bool = False

    def initial_dynamic_scale(self) -> int:
        """Two to the power ``initial_scale_power``."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """What ``DynamicLossScaler`` takes."""
        return {
            INITIAL_LOSS_SCALE: self.initial_dynamic_scale(),
            SCALE_WINDOW: self.loss_scale_window,
            DELAYED_SHIFT: self.hysteresis,
            CONSECUTIVE_HYSTERESIS: self.consecutive_hysteresis,
            MIN_LOSS_SCALE: self.min_loss_scale,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section ``bf16``."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """The section ``fp16`` of a raw configuration."""
    return DeepSpeedFP16Config(**param_dict.get(FP16, {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """The section ``bf16`` of a raw configuration, which may stand under its old name."""
    return DeepSpeedBF16Config(**(param_dict.get(BFLOAT16) or param_dict.get(BFLOAT16_OLD) or {}))

"""What the loss is multiplied by, so that small gradients survive in fp16, and which steps are skipped. Pure.

A step whose gradients are not all finite changes nothing on any rank. The dynamic scale then falls; it rises again
after as many good steps as the window says (Micikevicius et al. 2018). Numbers follow DeepSpeed's update by update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from infinity.config import Config
from infinity.errors import LossScaleError

FACTOR: Final = 2.0


class LossScale(Protocol):
    value: float
    checks_overflow: bool
    """Whether a step is skipped when its gradients are not all finite."""
    dynamic: bool
    """Whether steps change it."""

    @property
    def cur_scale(self) -> float:
        """``value`` under a name of DeepSpeed's, which scripts set."""
        return self.value

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.value = float(value)

    @property
    def loss_scale(self) -> float:
        """``value`` under another name of DeepSpeed's."""
        return self.value

    def update(self, *, overflow: bool) -> None:
        """A step was applied, or skipped because of ``overflow``. Raises LossScaleError where no scale is left."""

    def state_dict(self) -> dict[str, float]:
        """The numbers that steps have changed."""

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from there; a scale of another kind goes on from what its configuration says."""


class FixedLossScale(LossScale):
    """One scale for the whole training: what is configured, or 1 where nothing is scaled."""

    dynamic = False

    def __init__(self, value: float = 1.0, *, checks_overflow: bool = False) -> None:
        self.value, self.checks_overflow = value, checks_overflow

    def update(self, *, overflow: bool) -> None:
        """Nothing changes."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Nothing changes."""


class DynamicLossScale(LossScale):
    checks_overflow = dynamic = True
    scale_factor = FACTOR
    raises_at_least = True
    """Whether an overflow at the smallest scale is an error, or one more step that is skipped."""

    def __init__(
        self, *, initial: float, window: int, hysteresis: int, consecutive_hysteresis: bool, least: float
    ) -> None:
        """
        Args:
            window: good steps after the first one since an overflow, or since the start, before the scale is doubled.
            hysteresis: the scale is halved by so many overflows; those before the last one only skip their steps.
            consecutive_hysteresis: a good step between two overflows makes the count begin anew; else only a doubling
                of the scale does.
            least: the smallest scale.
        """
        self.value = initial
        self.scale_window, self.delayed_shift, self.consecutive_hysteresis, self.min_scale = (
            window, hysteresis, consecutive_hysteresis, least,
        )  # fmt: skip
        self.cur_hysteresis = hysteresis
        """Overflows until the scale is halved."""
        self._good_steps = 0
        """Since the last overflow, or since the start."""
        self.cur_iter = 0
        """Steps that were applied or skipped."""

    @property
    def last_overflow_iter(self) -> int:
        """The step that overflowed last, -1 if none did."""
        return self.cur_iter - self._good_steps - 1

    def update(self, *, overflow: bool) -> None:
        if overflow:
            self._fall()
            self._good_steps = 0
            self.cur_iter += 1
            return
        self.cur_iter += 1
        self._good_steps += 1
        if self.consecutive_hysteresis:
            self.cur_hysteresis = self.delayed_shift
        if self._good_steps > 1 and (self._good_steps - 1) % self.scale_window == 0:
            self.cur_hysteresis = self.delayed_shift
            self.value *= FACTOR

    def state_dict(self) -> dict[str, float]:
        return {
            "value": self.value, "patience": self.cur_hysteresis, "good_steps": self._good_steps, "steps": self.cur_iter
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if "patience" in state:
            self.value = float(state["value"])
            self.cur_hysteresis, self._good_steps = int(state["patience"]), int(state["good_steps"])
            self.cur_iter = int(state.get("steps", self._good_steps))

    def _fall(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return
        if self.value <= self.min_scale and self.raises_at_least:
            raise LossScaleError(self.value)
        self.value = max(self.value / FACTOR, self.min_scale)


class TorchLossScale(LossScale):
    """``torch.amp.GradScaler``: halved by every overflow, doubled after 2,000 good steps."""

    checks_overflow = dynamic = True
    WINDOW: Final = 2000
    LEAST: Final = 2.0**-24

    def __init__(self, initial: float = 2.0**16) -> None:
        self.value, self._good_steps = initial, 0

    def update(self, *, overflow: bool) -> None:
        if overflow and self.value <= self.LEAST:
            raise LossScaleError(self.value)
        self._good_steps = 0 if overflow else self._good_steps + 1
        if overflow:
            self.value /= FACTOR
        elif self._good_steps == self.WINDOW:
            self.value, self._good_steps = self.value * FACTOR, 0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state and "patience" not in state:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])


def loss_scale_of(config: Config) -> LossScale:
    """The scale that ``fp16`` or autocast to fp16 asks for; bf16 and fp32 need none, bf16 may check for overflow."""
    fp16 = config.fp16
    if config.scales_as_torch:
        return TorchLossScale()
    if not fp16.enabled:
        return FixedLossScale(checks_overflow=config.bf16.enabled and config.bf16.check_grad_overflow)
    if fp16.loss_scale:
        return FixedLossScale(fp16.loss_scale, checks_overflow=True)
    return DynamicLossScale(
        initial=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        least=fp16.min_loss_scale,
    )

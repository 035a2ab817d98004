"""DeepSpeed's optimizer classes: torch's arithmetic under their names and arguments.

They are torch optimizers, work by themselves, and are taken by ``initialize(optimizer=…)`` as any other is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW

from infinity.errors import ConfigError
from infinity.update.algorithms import Lion, begin_uncorrected


class _Adam(Adam):
    """Adam whose decay is decoupled or not, with moments corrected for their start or not."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        amsgrad: bool,
        decoupled: bool,
        corrected: bool,
    ) -> None:
        self._corrected = corrected
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad=amsgrad, decoupled_weight_decay=decoupled,
            fused=None if corrected else True,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self._corrected:
            begin_uncorrected(self)
        return super().step(closure)


class FusedAdam(_Adam):
    """Adam, by default with decoupled decay (``adam_w_mode``). ``set_grad_none`` is what ``zero_grad`` does."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("amsgrad", True, "FusedAdam has no such variant: use torch.optim.AdamW(amsgrad=True)")
        self._set_to_none = set_grad_none
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad=False, decoupled=adam_w_mode, corrected=bias_correction
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them where the optimizer was made with ``set_grad_none=False``."""
        super().zero_grad(self._set_to_none if set_to_none is None else set_to_none)


class DeepSpeedCPUAdam(_Adam):
    """Adam, by default with decoupled decay (``adamw_mode``), wherever the parameters are."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_narrow_states(fp32_optimizer_states)
        model_params = list(model_params)
        _refuse_groups_of_others(model_params)
        super().__init__(
            model_params, lr, betas, eps, weight_decay, amsgrad=amsgrad, decoupled=adamw_mode, corrected=bias_correction
        )


_KEYS_OF_OTHERS = {
    "momentum", "dampening", "nesterov", "alpha", "centered", "rho", "etas", "step_sizes", "lambd", "t0",
    "momentum_decay", "initial_accumulator_value", "scale_parameter", "relative_step", "clip_threshold", "beta1",
    "beta2_decay",
}  # fmt: skip
"""What groups of an optimizer hold that is no Adam."""


def _refuse_groups_of_others(groups: list[Any]) -> None:
    """Accelerate makes this Adam of the groups of any optimizer whose states are offloaded, without a word."""
    for group in groups:
        if not isinstance(group, dict):
            return
        foreign = sorted(_KEYS_OF_OTHERS & group.keys())
        if foreign or ("differentiable" in group and "amsgrad" not in group):  # torch's Adamax and RAdam
            raise ConfigError(
                "optimizer",
                f"groups with {', '.join(foreign) or 'differentiable and no amsgrad'}",
                "they are of another optimizer than Adam, in whose place Accelerate puts DeepSpeedCPUAdam under "
                'offload_optimizer: write "zero_force_ds_cpu_optimizer": false into the configuration to train with it',
            )


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad as torch has it."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
        adamw_mode: bool = False,
    ) -> None:
        """``adamw_mode``: Accelerate passes False."""
        _refuse_narrow_states(fp32_optimizer_states)
        for name, value in (("amsgrad", amsgrad), ("adamw_mode", adamw_mode)):
            if value:
                raise ConfigError(name, True, "Adagrad has no such variant: leave it out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(Lion):
    """Lion."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        set_grad_none: bool = True,
        weight_decay: float = 0.0,
    ) -> None:
        self._set_to_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or zero them where the optimizer was made with ``set_grad_none=False``."""
        super().zero_grad(self._set_to_none if set_to_none is None else set_to_none)


class DeepSpeedCPULion(Lion):
    """Lion, wherever the parameters are."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_narrow_states(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay)


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Whether DeepSpeed takes it with ZeRO without ``zero_allow_untested_optimizer``."""
    return type(optimizer) in TESTED_KINDS


TESTED_KINDS = (Adam, AdamW, FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, FusedLion, DeepSpeedCPULion)


def _refuse_narrow_states(fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ConfigError(
            "fp32_optimizer_states",
            False,
            "states have the dtype of what is stepped: write bf16.bf16_optimizer_states into the configuration",
        )

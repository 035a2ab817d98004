"""DeepSpeed's optimizer classes: torch's arithmetic under their names and arguments.

They are torch optimizers, work by themselves, and are taken by ``initialize(optimizer=…)`` as any other is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Adagrad, Adam, AdamW, Optimizer

from infinity.deepspeed.callers import locals_of
from infinity.errors import ConfigError
from infinity.update.algorithms import Lion, begin_uncorrected
from infinity.update.dry_run import births_of


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
        self.corrected = corrected
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad=amsgrad, decoupled_weight_decay=decoupled,
            fused=None if corrected else True,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self.corrected:
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
        _replaced()
        super().__init__(
            model_params, lr, betas, eps, weight_decay, amsgrad=amsgrad, decoupled=adamw_mode, corrected=bias_correction
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
        replaced = _replaced()
        first = 0.0 if replaced is None else replaced.defaults["initial_accumulator_value"]
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, initial_accumulator_value=first)


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


TESTED_KINDS = (Adam, AdamW, Adagrad, FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, FusedLion, DeepSpeedCPULion)
TESTED_TYPES = ("adam", "adamw", "adagrad", "lion", "muon")
"""What a configuration calls those, and Muon beside Adam."""


def _replaced() -> Optimizer | None:
    """The optimizer in whose place Accelerate makes one from here under ``offload_optimizer``: it passes on the param
    groups, of whatever optimizer they are, and says nothing of it. None where the script makes one itself.

    Raises:
        ConfigError: steps by what was passed on would be others than the optimizer's own.
    """
    found = locals_of("accelerate.utils.deepspeed", "map_pytorch_optim_to_deepspeed").get("optimizer")
    if not isinstance(found, Optimizer):
        return None
    if type(found) not in _OF_GROUPS_ALONE:
        problem = "is none of torch's Adam, AdamW and Adagrad themselves"
    elif isinstance(found, _Adam) and not found.corrected:
        problem = "has bias_correction=False"
    elif any(getattr(found, name, None) for name in _HOOKS):
        problem = "has hooks"
    else:
        births_of(found)
        return found
    raise ConfigError(
        "optimizer",
        type(found).__name__,
        f"{problem}, and under offload_optimizer Accelerate puts DeepSpeedCPUAdam or DeepSpeedCPUAdagrad there, of "
        'its groups alone: write "zero_force_ds_cpu_optimizer": false into the configuration to train with it',
    )


_OF_GROUPS_ALONE = (Adam, AdamW, Adagrad, FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad)
"""Param groups say all of how these step."""
_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


def _refuse_narrow_states(fp32_optimizer_states: bool) -> None:
    if not fp32_optimizer_states:
        raise ConfigError(
            "fp32_optimizer_states",
            False,
            "states have the dtype of what is stepped: write bf16.bf16_optimizer_states into the configuration",
        )

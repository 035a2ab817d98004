"""Looks at states as DeepSpeed has them.

Its ``safe_get_*`` say of a frozen parameter, by which scripts tell them apart, that it has no fp32 weights. Infinity's
own give its weights.
"""

from __future__ import annotations

import torch

from infinity import utils
from infinity.deepspeed.training_engine import DeepSpeedEngine
from infinity.zero import OffloadStateTypeEnum


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The weights as the optimizer steps them; None of a frozen parameter, and of one that no engine has."""
    return utils.safe_get_full_fp32_param(param) if param.requires_grad else None


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``safe_get_full_fp32_param``."""
    return utils.safe_get_local_fp32_param(param) if param.requires_grad else None


def get_state_devices(model: DeepSpeedEngine, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices that states of the type are on: host memory's, too, where they stream from disk or were offloaded."""
    return model.devices_of(state)

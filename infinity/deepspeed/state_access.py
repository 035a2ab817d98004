"""What DeepSpeed's ``safe_get_*`` say of a frozen parameter, by which scripts tell them apart: it has no fp32 weights.

Infinity's own give its weights.
"""

from __future__ import annotations

import torch

from infinity import utils


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The weights as the optimizer steps them; None of a frozen parameter, and of one that no engine has."""
    return utils.safe_get_full_fp32_param(param) if param.requires_grad else None


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``safe_get_full_fp32_param``."""
    return utils.safe_get_local_fp32_param(param) if param.requires_grad else None

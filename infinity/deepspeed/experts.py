"""What scripts ask ``deepspeed.moe.utils`` before they make an optimizer: there are no experts of single ranks here."""

from __future__ import annotations

from typing import Any

from torch import nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a module has layers whose experts lie on different ranks, and how many experts: none has."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Whether the parameter is of an expert that not all ranks have, which its attribute ``allreduce`` says."""
    return not getattr(param, "allreduce", True)


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """The groups as a list: experts of single ranks would get groups of their own, and there are none."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)

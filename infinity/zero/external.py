"""Parameters that a module uses though another one owns them. Here they need no announcement."""

from __future__ import annotations

import torch
from torch import nn


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Announce that ``module``'s forward uses ``parameter``, which another module owns.

    Every use of a weight finds it, in any module and outside of all, so there is nothing to remember: the call checks
    its arguments and is kept for models that make it.

    Raises:
        TypeError: it is not a parameter, or not used by a module.
    """
    _check(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """The counterpart of ``register_external_parameter``."""
    _check(module, parameter)


def _check(module: object, parameter: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: a torch.nn.Module is needed, {type(module).__name__} was given")
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"parameter: a torch.nn.Parameter is needed, {type(parameter).__name__} was given")

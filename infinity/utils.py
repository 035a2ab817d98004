"""What one parameter of a sharded model has: fp32 weights, gradient, optimizer states; the dialect's names.

``full`` functions give and take tensors of the parameter's shape, ``local`` ones this rank's part, 1-D; all in fp32 on
the CPU. They are called by every rank, between ``backward`` and ``step`` or between steps. Gradients are those of the
running step: the mean over ranks, summed over its micro-batches so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, EngineStateError
from infinity.plan.leaves import ModuleKind, get_leaf_modules, is_meant, set_leaf_modules, unset_leaf_modules
from infinity.plan.registered import modules, named_modules, parameters
from infinity.weights.ended import Ended
from infinity.weights.owners import owner_of
from io_daemon.shared.protocol import ObjectKind

__all__ = [
    "get_z3_leaf_modules",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
_log = logging.getLogger(__name__)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """The weights as the optimizer steps them; None if no engine has the parameter."""
    return _read(param, None, whole=True)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the weights: those that the optimizer steps, and those that forward uses."""
    _write(param, None, value, whole=True)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient; None if the running step has none of the parameter, which is logged where it could have one.

    ``step()`` uses gradients up: callbacks that Transformers calls after it, and Accelerate's loops, whose backward
    steps, too, ask too late, as PEFT's AdaLoRA does.
    """
    gradient = _read(param, ObjectKind.GRAD, whole=True)
    if gradient is None and param.requires_grad and (owner := _runtime_of(param)) is not None:
        _log.warning(
            "%s has no gradient now: a step uses gradients up, under Accelerate inside of backward(); ask between "
            "engine.backward() and engine.step(), or in param.register_post_accumulate_grad_hook()",
            owner.sharded_param(param).name,
        )
    return gradient


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace the gradient that the coming ``step`` uses."""
    _write(param, ObjectKind.GRAD, value, whole=True)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """The optimizer's state of that name (``exp_avg`` …); zeros before the first step, None for a frozen parameter."""
    return _read(param, optim_state_key, whole=True)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace the optimizer's state of that name."""
    _write(param, optim_state_key, value, whole=True)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``safe_get_full_fp32_param``."""
    return _read(param, None, whole=False)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """This rank's part of ``safe_set_full_fp32_param``."""
    _write(param, None, value, whole=False)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``safe_get_full_grad``."""
    return _read(param, ObjectKind.GRAD, whole=False)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """This rank's part of ``safe_set_full_grad``."""
    _write(param, ObjectKind.GRAD, value, whole=False)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """This rank's part of ``safe_get_full_optimizer_state``."""
    return _read(param, optim_state_key, whole=False)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """This rank's part of ``safe_set_full_optimizer_state``."""
    _write(param, optim_state_key, value, whole=False)


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter that has one by ``update_func(gradient, parameter)``."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ModuleKind], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """See ``infinity.zero.set_leaf_modules``. ``raise_if_not_found`` False: nothing need be meant."""
    return (
        set_leaf_modules(model, leaf_module_classes) if raise_if_not_found or _any(model, leaf_module_classes) else []
    )


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules that ``model.named_modules()`` has under these names; ``flag`` False: take their marks away.

    Returns:
        The modules, and the names that were not found.
    """
    return _mark(model, list(module_names), lambda name, wanted: name == wanted, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose name in ``model.named_modules()`` ends so; ``flag`` False: take their marks away.

    Returns:
        The modules, and the suffixes that were not found.
    """
    return _mark(model, list(module_name_suffixes), str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take its mark away."""
    if flag:
        set_leaf_modules(model, [model])
    else:
        unset_leaf_modules(model, [model])


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[ModuleKind], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """See ``infinity.zero.unset_leaf_modules``. ``raise_if_not_found`` False: nothing need be meant."""
    may = raise_if_not_found or _any(model, leaf_module_classes)
    return unset_leaf_modules(model, leaf_module_classes) if may else []


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """See ``infinity.zero.get_leaf_modules``."""
    return get_leaf_modules(model)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether the module itself is marked."""
    return model in get_leaf_modules(model)


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether the parameter, of an engine's model, belongs to a marked module."""
    owner = _runtime_of(model)
    return owner is not None and any(own is model for leaf in owner.sharded.leaves for own in parameters(leaf))


def _any(model: nn.Module, kinds: Sequence[ModuleKind]) -> bool:
    """Whether any of the kinds means a module of the model."""
    return any(is_meant(module, kind) for kind in kinds for module in modules(model))


def _mark(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    found = {name: module for name, module in named_modules(model) if any(fits(name, want) for want in wanted)}
    missing = [want for want in wanted if not any(fits(name, want) for name in found)]
    if missing and raise_if_not_found:
        names = ", ".join(name for name, _ in named_modules(model) if name)
        raise ConfigError("leaf modules", missing, f"no module is named so: there are {names}")
    change = set_leaf_modules if flag else unset_leaf_modules
    return (change(model, list(found.values())) if found else []), missing


def _read(param: torch.Tensor, state: ObjectKind | str | None, *, whole: bool) -> torch.Tensor | None:
    owner = _runtime_of(param)
    if owner is None:
        return None
    owner.refuse_over("reading a parameter's state")
    return owner.states.read(owner.sharded_param(param), _kind(owner, state), whole=whole)


def _write(param: torch.Tensor, state: ObjectKind | str | None, value: torch.Tensor, *, whole: bool) -> None:
    owner = _runtime_of(param)
    if owner is None:
        raise ConfigError("param", tuple(param.shape), "no engine has this parameter: write to it as to any tensor")
    owner.refuse_over("writing a parameter's state")
    owner.states.write(owner.sharded_param(param), _kind(owner, state), value, whole=whole)


def _runtime_of(param: torch.Tensor) -> Runtime | None:
    owner = owner_of(param)
    if isinstance(owner, Ended):
        raise EngineStateError(f"the engine of {owner.name_of(param)} was destroyed: ask for it before destroy()")
    return owner if isinstance(owner, Runtime) else None


def _kind(owner: Runtime, state: ObjectKind | str | None) -> ObjectKind:
    return state if isinstance(state, ObjectKind) else owner.states.kind(state)

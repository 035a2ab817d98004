"""An engine's tensors as a checkpoint describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from infinity.checkpoint.manifest import BUFFER, STATE_PREFIX, WEIGHT, TensorEntry, dtype_name
from infinity.engine.runtime import Runtime
from infinity.errors import WeightsError
from infinity.files.entry import is_shell
from infinity.plan.precision import Precision
from infinity.plan.registered import named_buffers, named_modules, named_parameters
from infinity.weights.param import memory_order
from io_daemon.shared.protocol import ObjectKind

_NO_EXTRA_STATE: Final = nn.Module.get_extra_state


def kind_names(precision: Precision) -> dict[ObjectKind, str]:
    """What a checkpoint calls the kinds of state: the weight is the most exact copy that there is."""
    names = {ObjectKind.WEIGHT: WEIGHT, ObjectKind.MASTER: WEIGHT}
    return names | {kind: STATE_PREFIX + state for state, kind in precision.state_kinds.items()}


def described_params(runtime: Runtime) -> dict[str, TensorEntry]:
    """Name -> entry, in the order of the engine's parameters. Raises WeightsError for one that is not the engine's."""
    runtime.structure.check_owned("a checkpoint")
    names = kind_names(runtime.sharded.precision)
    all_names: dict[int, list[str]] = {}
    for name, user_param in named_parameters(runtime.module, remove_duplicate=False):
        all_names.setdefault(id(user_param), []).append(name)
    found = {}
    for param in runtime.sharded.params:
        placement = runtime.sharded.group_of[param.index].placement
        dtypes = runtime.sharded.dtypes_of(placement.index)
        found[param.name] = TensorEntry(
            name=param.name,
            aliases=tuple(name for name in all_names.get(id(param.param), ()) if name != param.name),
            shape=tuple(param.shape),
            order=tuple(param.order),
            trainable=placement.trainable,
            kinds={names[kind]: dtype_name(dtypes[kind]) for kind in runtime.io.lasting(param.index)},
        )
    return found


def described_groups(runtime: Runtime, optimizer: Optimizer | None) -> list[list[str]]:
    """The names of the parameters of each param group."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [[runtime.sharded_param(param).name for param in group["params"]] for group in groups]


def described_buffers(module: nn.Module) -> dict[str, tuple[TensorEntry, torch.Tensor]]:
    """Name -> entry and buffer; a shared one stands once, under its first name that a state dict has. Raises
    WeightsError for one that is not dense."""
    found: dict[str, tuple[TensorEntry, torch.Tensor]] = {}
    transient = {
        f"{prefix}.{own}" if prefix else own
        for prefix, owner in named_modules(module, remove_duplicate=False)
        for own in owner._non_persistent_buffers_set
    }
    all_names: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, buffer in named_buffers(module, remove_duplicate=False):
        all_names.setdefault(id(buffer), (buffer, []))[1].append(name)
    for buffer, names in all_names.values():
        if buffer.device.type == "meta":
            continue
        lasting = [name for name in names if name not in transient]
        name, *others = lasting or names
        if buffer.layout is not torch.strided or buffer.is_quantized or is_shell(buffer.dtype):
            raise WeightsError(name, "is a buffer that is not dense", "keep it in extra state, see get_extra_state")
        entry = TensorEntry(
            name=name,
            aliases=tuple(others),
            shape=tuple(buffer.shape),
            order=tuple(memory_order(buffer)),
            persistent=bool(lasting),
            kinds={BUFFER: dtype_name(buffer.dtype)},
        )
        found[name] = entry, buffer
    return found


def extra_states(module: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors, by module name: ``get_extra_state`` of those that have one."""
    return {name: owner.get_extra_state() for name, owner in _with_extra_state(module)}


def extra_state_names(module: nn.Module) -> set[str]:
    """The modules that have one."""
    return {name for name, _ in _with_extra_state(module)}


def set_extra_states(module: nn.Module, states: dict[str, Any]) -> None:
    for name, owner in _with_extra_state(module):
        if name in states:
            owner.set_extra_state(states[name])


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return (each for each in named_modules(module) if type(each[1]).get_extra_state is not _NO_EXTRA_STATE)

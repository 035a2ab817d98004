"""Weights out of the engine: whole, on the CPU, gathered group by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from infinity.engine.runtime import Runtime
from infinity.plan.registered import named_parameters
from infinity.weights import placeholder
from infinity.weights.access import ShardedAlias
from infinity.weights.param import ShardedParam
from infinity.weights.param_group import ParamGroup
from io_daemon.shared.protocol import ObjectKind


def full_state_dict(runtime: Runtime, *, rank0_only: bool, exclude_frozen: bool = False) -> dict[str, Any]:
    """What ``state_dict()`` of the unsharded model would be; without parameters that are not trained, which are not
    gathered either, if ``exclude_frozen``. Collective.

    Raises EngineStateError after the engine's end.
    """
    runtime.check_readable("full_state_dict")
    entries = dict(runtime.module.state_dict())
    names: dict[int, list[str]] = {}
    for name, value in list(entries.items()):
        param = param_of(value, runtime)
        if param is None:
            entries[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        elif exclude_frozen and not param.param.requires_grad:
            del entries[name]
        else:
            names.setdefault(id(param.param), []).append(name)
    groups = [group for group in runtime.sharded.groups if any(id(param.param) in names for param in group.params)]
    wanted = not rank0_only or runtime.collectives.rank == 0
    for key, weights in _gathered(runtime, ObjectKind.WEIGHT, groups):
        if wanted and key in names:
            entries.update(dict.fromkeys(names[key], weights.contiguous()))
    return entries if wanted else {}


def param_of(value: object, runtime: Runtime) -> ShardedParam | None:
    """The parameter that an entry of a state dict stands for: its weights are in the store, wherever else they are."""
    if isinstance(value, ShardedAlias):
        return runtime.sharded_param(value.param)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    found = runtime.sharded.resident.get(placeholder.identity_of(value))
    return found if found is not None and found.is_all_of(value) else None


def full_master_state_dict(runtime: Runtime) -> dict[str, torch.Tensor]:
    """Name -> full fp32 master weight, of trainable parameters. Collective.

    Raises EngineStateError after the engine's end, WeightsError for a parameter that came after infinity.initialize().
    """
    runtime.check_readable("full_master_state_dict")
    runtime.structure.check_owned("full_master_state_dict()")
    trained = [group for group in runtime.sharded.groups if group.placement.trainable]
    found = _gathered(runtime, runtime.sharded.precision.stepped, trained)
    masters = {key: master.contiguous() for key, master in found}
    named = named_parameters(runtime.module, remove_duplicate=False)
    return {name: masters[id(param)] for name, param in named if id(param) in masters}


def _gathered(runtime: Runtime, kind: ObjectKind, groups: Iterable[ParamGroup]) -> Iterator[tuple[int, torch.Tensor]]:
    """The id of every parameter of ``groups``, and its contents of the kind as the parameter lies."""
    for group in groups:
        dtype = group.dtype if kind is ObjectKind.WEIGHT else runtime.sharded.precision.dtype(kind)
        home = runtime.sharded.precision.home(trainable=group.placement.trainable)
        runtime.sharded.refuse_away((home if kind is ObjectKind.WEIGHT else kind).mask)
        flats = group.gather(kind, dtype)
        for param in group.params:
            yield id(param.param), param.unflattened(flats[param.index])

"""``offload_states`` and ``reload_states``: device memory given back between steps, for whoever else needs it."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from enum import Enum, StrEnum

import torch

from infinity.engine.phases import Phases
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError, EngineStateError
from infinity.plan.precision import Precision
from infinity.states import StepPhase
from io_daemon.shared.protocol import ObjectKind


class OffloadStateTypeEnum(StrEnum):
    """States by the dialect's names; gradients are there between backward and step alone, and so never to be moved."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadedStates:
    def __init__(self, runtime: Runtime, phases: Phases) -> None:
        self._runtime, self._phases = runtime, phases

    def offload(
        self, include: Container[OffloadStateTypeEnum] | None, device: str, *, pin_memory: bool, non_blocking: bool
    ) -> None:
        """Move what is on the device to host memory, until ``reload``: what needs it meanwhile is refused."""
        where = device.value if isinstance(device, Enum) else device
        if where != "cpu":
            raise ConfigError(
                "device", where, 'must be "cpu": what is to lie on disk goes there by offload_optimizer.device: nvme'
            )
        wanted = _wanted(include)
        runtime = self._runtime
        self._check_between_steps()
        runtime.changes.settle()
        if OffloadStateTypeEnum.lp_params in wanted:
            runtime.changes.drop_weights()
        self._phases.states_are_away |= bool(wanted)
        mask = _kinds(wanted, runtime.sharded.precision)
        runtime.sharded.device_store.move_out(mask, pin_memory=pin_memory, non_blocking=non_blocking)
        runtime.return_freed()

    def reload(self, *, non_blocking: bool) -> None:
        """Everything is where it was. Collective where weights are whole in memory."""
        self._check_between_steps()
        self._runtime.sharded.device_store.bring_back(non_blocking=non_blocking)
        self._runtime.changes.refresh()
        self._phases.states_are_away = False

    def devices_of(self, state: OffloadStateTypeEnum) -> set[torch.device]:
        """Where states of the type are, or come from disk to."""
        sharded = self._runtime.sharded
        kinds = sum(kind.mask for kind in _kinds_of(state, sharded.precision))
        on_device = sharded.on_device(kinds)
        places = ((self._runtime.device, on_device), (torch.device("cpu"), kinds & ~on_device))
        return {device for device, there in places if there}

    def _check_between_steps(self) -> None:
        self._runtime.refuse_over("offload_states")
        if self._phases.phase is not StepPhase.IDLE or self._runtime.reducer.has_any:
            raise EngineStateError("states are moved between steps, not while gradients accumulate: call step() first")


def _wanted(include: Container[OffloadStateTypeEnum] | None) -> list[OffloadStateTypeEnum]:
    """The states that ``include`` names, by member or by word; all without it."""
    given: Iterable[object] = include if isinstance(include, Iterable) else ()
    for each in given:
        if each not in list(OffloadStateTypeEnum):
            known = ", ".join(OffloadStateTypeEnum.__members__)
            raise ConfigError("include", each, f"must hold some of {known}")
    return [state for state in OffloadStateTypeEnum if include is None or state in include]


def _kinds(wanted: Collection[OffloadStateTypeEnum], precision: Precision) -> int:
    kinds: set[ObjectKind] = set()
    for state in wanted:
        # of masters alone the weights are made, which are wanted while they are not named
        is_needed = precision.rounds_gathers and OffloadStateTypeEnum.lp_params not in wanted
        if state is not OffloadStateTypeEnum.hp_params or not is_needed:
            kinds |= _kinds_of(state, precision)
    return sum(kind.mask for kind in kinds)


def _kinds_of(state: OffloadStateTypeEnum, precision: Precision) -> set[ObjectKind]:
    match state:
        case OffloadStateTypeEnum.optim_states:
            return set(precision.state_kinds.values())
        case OffloadStateTypeEnum.hp_params:
            return {precision.stepped}
        case OffloadStateTypeEnum.lp_params:
            return {ObjectKind.WEIGHT}
        case _:
            return {ObjectKind.GRAD}

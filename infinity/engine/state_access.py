"""What one parameter has, whole or this rank's part of it: fp32 weights, gradient, optimizer states.

The functions of ``infinity.utils`` come here by the parameter's owner. A value that is written replaces the one in the
store; 16-bit weights follow their master weights, and so do weights that are on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from infinity.engine.gathering import Gathering
from infinity.engine.phases import Phases
from infinity.engine.written import Written
from infinity.errors import EngineStateError
from infinity.plan.precision import Precision
from infinity.states import StepPhase
from infinity.tiers.collectives import Collectives
from infinity.update.gradients import GradientChunks
from infinity.update.reducer import Reducer
from infinity.weights.owners import Values
from infinity.weights.param import ShardedParam, flattened
from infinity.weights.sharded_model import ShardedModel
from infinity.weights.state_io import StateIO
from io_daemon.shared.protocol import ObjectKind


class StateAccess:
    def __init__(
        self,
        sharded: ShardedModel,
        io: StateIO,
        phases: Phases,
        *,
        reducer: Reducer,
        gradients: GradientChunks,
        written: Written,
        gathering: Gathering,
        collectives: Collectives,
    ) -> None:
        self._stepped, self._states = sharded.precision.stepped, sharded.precision.state_kinds
        self._without_sign = _without_sign(sharded.precision)
        self._refuse_away = sharded.refuse_away
        self.keeps_states: Callable[[int], bool] = lambda _param: True
        """Whether the next step heeds what is written to the optimizer's states of a parameter; the update knows."""
        self.refuse_clipped: Callable[[str], None] = lambda _call: None
        """Raises where the store has gradients that the step will clip; the update knows."""
        self._io, self._phases = io, phases
        self._reducer, self._gradients = reducer, gradients
        self._written, self._gathering, self._collectives = written, gathering, collectives

    def kind(self, state: str | None) -> ObjectKind:
        """The kind of the optimizer's ``state``, by name; None means the fp32 weights."""
        if state is None:
            return self._stepped
        if state not in self._states:
            raise KeyError(f"{state!r} is no state of this optimizer: it has {', '.join(self._states) or 'none'}")
        return self._states[state]

    def read(self, param: ShardedParam, kind: ObjectKind, *, whole: bool) -> torch.Tensor | None:
        """The state in fp32: ``whole`` in the parameter's shape, on its device (collective), or this rank's part, 1-D
        on the CPU. None where there is none: a frozen parameter has weights only, and a gradient lives from backward to
        step."""
        self.check_phase("read", StepPhase.IDLE, StepPhase.FORWARD)
        if whole:
            self._written.check([param])
        elif (written := self._written.own(param)) is not None and self._is_weights(kind):
            rounded = written if kind is self._stepped else written.to(param.dtype)
            return rounded.to("cpu", torch.float32, copy=True)
        if kind is ObjectKind.GRAD:
            self.refuse_clipped(f"reading the gradient of {param.name}")
            self._settle(param, together=whole)
        kind = self._of_frozen(param, kind)
        if not self._io.has(param, kind) or (kind is ObjectKind.GRAD and not self._reducer.holds(param.index)):
            return None
        return self._io.read(param, kind) if whole else self._io.read_own(param, kind)

    def write(self, param: ShardedParam, kind: ObjectKind, value: torch.Tensor, *, whole: bool) -> None:
        """Replace what ``read`` reads. Every rank calls it. With ``whole`` it is done on all or, where one refuses, on
        none, and raises WorldError on all where they give different values: each would keep its part of another
        tensor."""
        self.check_phase("written", StepPhase.IDLE)
        kind = self._of_frozen(param, kind)

        def ready() -> torch.Tensor:
            own = self.own_part(param, kind, value, whole=whole)
            self._make_ready(param, kind)
            return own

        if whole:
            names = {each: label for label, each in self._states.items()}
            what = f"write the {names.get(kind, kind.name.lower())} of {param.name}"
            same = f" with checksum {checksum_of(value):08x}" if self._collectives.world_size > 1 else ""
            own = self._collectives.together(ready, what + same)
            self._replace(param, kind, own, lambda put: self._collectives.together(put, what))
        else:
            self._replace(param, kind, ready(), lambda put: put())

    def replace(self, param: ShardedParam, kind: ObjectKind, own: torch.Tensor) -> None:
        """It is ``write`` of this rank's part, which is known to fit and to be of what all ranks write."""
        self._make_ready(param, kind)
        self._replace(param, kind, own, lambda put: put())

    def _make_ready(self, param: ShardedParam, kind: ObjectKind) -> None:
        """Raises what speaks against writing the kind; nothing has changed then."""
        if kind is ObjectKind.GRAD:
            self._refuse_away(kind.mask)
            self.refuse_clipped(f"writing the gradient of {param.name}")
        elif self._is_weights(kind):
            self._gathering.begin_write(param)
        elif not self.keeps_states(param.index):
            raise EngineStateError(
                f"the state of {param.name} cannot be written yet: its optimizer makes it in the first step; write it "
                "after that"
            )

    def _replace(
        self,
        param: ShardedParam,
        kind: ObjectKind,
        own: torch.Tensor,
        by_all: Callable[[Callable[[], None]], None],
    ) -> None:
        """``by_all``: has every rank do its part of what only the store sees."""
        if kind is ObjectKind.GRAD:
            self._settle(param, together=True)
            by_all(lambda: self._gradients.replace(param.index, self._io.own_range(param)[0], own))
            self._reducer.note(param.index)
        elif self._is_weights(kind):
            by_all(lambda: self._io.write_own(param, list(dict.fromkeys([kind, ObjectKind.WEIGHT])), own))
            self._gathering.refresh(param)
        else:
            by_all(lambda: self._io.write_own(param, [kind], own))

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """States are replaced inside, one after the other: what ends that half-way leaves the engine FAILED."""
        self._phases.go(StepPhase.CHECKPOINT)
        try:
            yield
        except BaseException:
            self._phases.go(StepPhase.FAILED)
            raise
        self._phases.go(StepPhase.IDLE)

    def own_part(self, param: ShardedParam, kind: ObjectKind, value: torch.Tensor, *, whole: bool) -> torch.Tensor:
        """This rank's part of ``value``, 1-D. Raises ValueError if the parameter has none of the kind, or ``value`` has
        another shape than ``read`` gives, or what the store cannot hold."""
        if not self._io.has(param, kind):
            raise ValueError(f"{param.name} is frozen: it has weights, and no {kind.name.lower()}")
        first, numel = self._io.own_range(param)
        shape = param.shape if whole else torch.Size([numel])
        if value.shape != shape:
            raise ValueError(f"{param.name}: the value has shape {tuple(value.shape)}, needed is {tuple(shape)}")
        with torch.no_grad():
            value = value.detach()
            own = flattened(value, param.order)[first : first + numel] if whole else value
            if kind in self._without_sign and bool(value.signbit().any()):  # on all ranks that are given it
                raise ValueError(
                    f"{param.name}: this state is never negative, and the store has no sign for it: write no negative "
                    f"values, or {self._without_sign[kind]}"
                )
        return own

    def overwrite(self, values: Sequence[tuple[ShardedParam, Values]]) -> None:
        """New weights, and master weights where there are some. Collective."""

        def ready() -> None:
            self.check_phase("written", StepPhase.IDLE)
            for param, _ in values:
                self._gathering.begin_write(param)

        def write() -> None:
            for param, new in values:
                kinds = dict.fromkeys([self._of_frozen(param, self._stepped), ObjectKind.WEIGHT])
                self._io.write_from(param, list(kinds), new)

        self._collectives.together(ready, "begin to write new weights")
        self._collectives.together(write, "write new weights")
        for param, _ in values:
            self._gathering.refresh(param)

    def _settle(self, param: ShardedParam, *, together: bool) -> None:
        """Gradients that wait for the last micro-batch are reduced now, which takes all ranks."""
        if together:
            self._reducer.settle()
        elif self._reducer.has_put_off:
            raise EngineStateError(
                f"the gradient of {param.name} is not reduced before the last micro-batch of a step: ask for the whole "
                "gradient, on every rank, or after that"
            )

    def _is_weights(self, kind: ObjectKind) -> bool:
        return kind is self._stepped or kind is ObjectKind.WEIGHT

    def _of_frozen(self, param: ShardedParam, kind: ObjectKind) -> ObjectKind:
        return ObjectKind.WEIGHT if kind is self._stepped and not self._io.has(param, kind) else kind

    def check_phase(self, done: str, *allowed: StepPhase) -> None:
        """Raises EngineStateError in any other phase than those ``allowed``."""
        if self._phases.phase not in allowed:
            raise EngineStateError(
                f"the state of a parameter cannot be {done} while the engine is in {self._phases.phase.name}: do it "
                "between backward() and step(), or between steps"
            )


def checksum_of(values: torch.Tensor, before: int = 0) -> int:
    """The checksum of the values in fp32, in the order of their indexes, that goes on from ``before``."""
    with torch.no_grad():
        flat = values.detach().to("cpu", torch.float32).reshape(-1)
        return crc32(flat.contiguous().numpy().data, before)


def _without_sign(precision: Precision) -> dict[ObjectKind, str]:
    """The kinds that cannot be negative, and how they could."""
    forms = precision.narrows.items()
    found = {kind: '"bf16" for "io_daemon.moments"' for kind, form in forms if not form.is_signed}
    return found if precision.markers is None else {precision.markers: '"fp32" for "io_daemon.master_weights"'}

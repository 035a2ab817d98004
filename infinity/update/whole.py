"""Parameters that are stepped as wholes: gathered, with their gradient and states, one at a time, and written back.

Every rank gathers all of them and steps the same; each keeps its own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.plan.precision import Precision
from infinity.update.rounding import Rounding
from infinity.update.rule import Call, History, UpdateRule
from infinity.weights.param import ShardedParam, flattened
from infinity.weights.state_io import StateIO
from io_daemon.shared.protocol import ObjectKind


class WholeParams:
    def __init__(
        self,
        params: Sequence[ShardedParam],
        io: StateIO,
        *,
        rule: UpdateRule,
        precision: Precision,
        group_of: Sequence[int],
        rounding: Rounding,
    ) -> None:
        """``group_of``: parameter index -> index of its optimizer group."""
        self.group_of = {p.index: group_of[p.index] for p in params if group_of[p.index] in rule.whole_groups}
        """Index of the optimizer group of each parameter, in the order in which all ranks gather them."""
        self._params = {param.index: param for param in params}
        self._io, self._rule, self._stepped = io, rule, precision.stepped
        self._rounds_in_place = precision.rounds_in_place
        self._rounding = rounding

    def gather(self, index: int, factor: torch.Tensor | None) -> Call:
        """One parameter with its gradient, times ``factor``, and its states. Collective."""
        param, rule = self._params[index], self._rule
        gradient = self._read(param, ObjectKind.GRAD, rule.dtype)
        dtypes = rule.states.values()
        return Call(
            params=[self._read(param, self._stepped, rule.dtype)],
            grads=[gradient if factor is None else gradient * factor],
            states=[tuple(self._read(param, kind, d) for kind, d in zip(rule.state_kinds, dtypes, strict=True))],
            whole=True,
        )

    def write(self, index: int, call: Call, history: History) -> None:
        """This rank's part of what was stepped goes back. ``history``: of the parameter, after the step."""
        param = self._params[index]
        kinds = dict.fromkeys((self._stepped, ObjectKind.WEIGHT))
        self._write(param, list(kinds), call.params[0])
        if self._rounds_in_place:
            param.allocate().copy_(flattened(call.params[0], param.order))
        for kind, state in zip(self._rule.state_kinds, call.states[0], strict=True):
            first, numel = self._io.own_range(param)
            own = flattened(state, param.order)[first : first + numel]
            if kind in self._rounding.forms:
                self._rounding.apply(own, kind, param=index, first=first, history=history)
            self._io.write_own(param, [kind], own)

    def _read(self, param: ShardedParam, kind: ObjectKind, dtype: torch.dtype) -> torch.Tensor:
        return param.unflattened(self._io.read_flat(param, kind).to(dtype))

    def _write(self, param: ShardedParam, kinds: Sequence[ObjectKind], value: torch.Tensor) -> None:
        first, numel = self._io.own_range(param)
        self._io.write_own(param, kinds, flattened(value, param.order)[first : first + numel])

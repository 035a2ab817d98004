"""The rule of a torch optimizer: its own code, run on pieces of parameters and of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.optim import Optimizer

from infinity.errors import EngineStateError
from infinity.update.dry_run import (
    Birth,
    Kept,
    births_of,
    born,
    dry_run,
    options_of,
    refuse,
    unlike,
    way_of,
)
from infinity.update.rule import Call, History, NumberType, Options, UpdateRule, numbers_of
from infinity.update.stand_in import StandIn, State
from infinity.update.watched import steppers_in
from infinity.weights.owners import users_class
from io_daemon.shared.protocol import STATE_KINDS

SLICE_NUMEL: Final = 1 << 16
"""Elements that are stepped together by torch's single operations: what these read and make lies in a core's cache."""


def rule_of(optimizer: Optimizer, *, dtype: torch.dtype, prefers_fused: bool = False) -> UpdateRule:
    """The rule by which ``optimizer`` steps parameters of ``dtype``, with the options of its param groups.

    Args:
        prefers_fused: torch's fused step is taken where there is one; else the one that torch itself would take.

    Raises ConfigError, naming the optimizer and the reason, where it has taken steps already, or steps parameters
    neither element by element nor each by itself.
    """
    births = births_of(optimizer)
    stand_in = StandIn(optimizer, prefers_fused=prefers_fused)
    if stand_in.is_foreign and (held := steppers_in(vars(optimizer))):
        refuse(stand_in, f"holds another that has parameters of its own ({', '.join(held)})")
    groups, closely = options_of(optimizer), stand_in.is_foreign
    ways = unlike(groups, closely=closely)
    watched = {way: dry_run(stand_in, options, births, dtype) for way, options in ways.items()}
    _refuse_attributes(stand_in, optimizer)
    found = list(watched.values())
    states = {label: dtype for kept in found for label, dtype in kept.states.items()}
    numbers = {label: number for kept in found for label, number in kept.numbers.items()}
    if len(states) > len(STATE_KINDS):
        refuse(stand_in, f"keeps {', '.join(states)} for each element, which is more than {len(STATE_KINDS)}")
    from_zeros = all(kept.from_zeros for kept in found)
    whole_groups = frozenset(i for i, each in enumerate(groups) if watched[way_of(each, closely=closely)].is_whole)
    unsigned = frozenset(states).difference(*(kept.states.keys() - kept.unsigned for kept in found))
    return UpdateRule(
        name=stand_in.of.__name__,
        states=states,
        options=frozenset(optimizer.defaults),
        dtype=dtype,
        run=_Run(stand_in, births, tuple(states), numbers, from_zeros, frozenset((*states, *numbers))),
        check=_Check(stand_in, births, dtype, watched, states, numbers, whole_groups, unsigned, from_zeros),
        numbers=numbers,
        whole_groups=whole_groups,
        unsigned=unsigned,
        from_zeros=from_zeros,
        is_foreign=stand_in.is_foreign,
    )


def _refuse_attributes(stand_in: StandIn, optimizer: Optimizer) -> None:
    """Raises ConfigError if the optimizer looks at something that somebody wrote to a parameter."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if found := sorted(name for name in stand_in.asked.attributes if any(name in vars(param) for param in params)):
        refuse(stand_in, f"reads {', '.join(found)} of a parameter, which parts of it have not")
    kinds = {users_class(param).__name__ for param in params} - {"Parameter"}
    if stand_in.is_foreign and kinds:
        refuse(stand_in, f"steps parameters of a class of the user's, {', '.join(sorted(kinds))}, which parts are not")


@dataclass(frozen=True, slots=True)
class _Check:
    """``UpdateRule.check``: options that lead through code which was not watched are watched before they count."""

    stand_in: StandIn
    births: Mapping[str, Birth]
    dtype: torch.dtype
    watched: dict[str, Kept]
    states: Mapping[str, torch.dtype]
    numbers: Mapping[str, NumberType]
    whole_groups: frozenset[int]
    unsigned: frozenset[str]
    from_zeros: bool

    def __call__(self, groups: Sequence[Options]) -> None:
        self.stand_in.look()
        for number, options in enumerate(groups):
            way = way_of(options, closely=self.stand_in.is_foreign)
            kept = self.watched.get(way)
            if kept is None:
                kept = dry_run(self.stand_in, options, self.births, self.dtype, looks_ahead=False)
            new = [*(kept.states.keys() - self.states.keys()), *(kept.numbers.keys() - self.numbers.keys())]
            same_form = (
                kept.is_whole == (number in self.whole_groups)
                and kept.from_zeros >= self.from_zeros
                and self.unsigned & kept.states.keys() <= kept.unsigned
            )
            if new or not same_form:
                keeps = f"keeps {', '.join(sorted(new))}" if new else "needs its states in another form"
                raise EngineStateError(
                    f"optimizer.param_groups[{number}] was changed since infinity.initialize() to where "
                    f"{self.stand_in.of.__name__} {keeps}, for which no place was made: give the group such options "
                    "before initialize()"
                )
            self.watched[way] = kept


@dataclass(frozen=True, slots=True)
class _Run:
    """``UpdateRule.run``."""

    stand_in: StandIn
    births: Mapping[str, Birth]
    states: tuple[str, ...]
    numbers: Mapping[str, NumberType]
    from_zeros: bool
    """The first step is like any other, with states and numbers of zero."""
    known: frozenset[str]
    """What it keeps, of elements and of parameters."""

    def __call__(self, call: Call, history: History, options: Options) -> History:
        device = call.params[0].device
        if device.type == "meta":
            return tuple(0.0 for _ in self.numbers)
        if history is None and self.from_zeros:
            history = tuple(0.0 for _ in self.numbers)
        options = self.stand_in.chosen(options, device)
        numbers_on = device if options.get("fused") or options.get("capturable") else torch.device("cpu")
        if device.type == "cpu" and not call.whole and not options.get("fused"):
            call = _sliced(call)
        given = [
            born(self.births, param) if history is None else self._restored(views, history, numbers_on)
            for param, views in zip(call.params, call.states, strict=True)
        ]
        after = self.stand_in.step(call.params, call.grads, given, options)
        for views, state in zip(call.states, after, strict=True):
            self._refuse_new(state)
            self._keep(views, state)
        if history is None and self.known and not any(after):
            return None  # it has passed over the parameter, whose first step is still to come
        return tuple(float(after[0].get(label, 0.0)) for label in self.numbers)

    def _refuse_new(self, state: State) -> None:
        new = [label for label, value in state.items() if value is not None and label not in self.known]
        if new:
            raise EngineStateError(
                f"{self.stand_in.of.__name__} has begun to keep {', '.join(new)}, which it did not in its first steps, "
                "and for which no place was made: have it make all of its state in the first"
            )

    def _restored(self, views: Sequence[torch.Tensor], history: tuple[float, ...], device: torch.device) -> State:
        return {**dict(zip(self.states, views, strict=True)), **numbers_of(self.numbers, history, device)}

    def _keep(self, views: Sequence[torch.Tensor], state: State) -> None:
        """Most optimizers write to the views; what a first step has made, or any has replaced, is copied there."""
        for label, view in zip(self.states, views, strict=True):
            value = state.get(label)
            if value is not None and value.data_ptr() != view.data_ptr():
                view.copy_(value)


def _sliced(call: Call) -> Call:
    """The same pieces, cut: what is done to each element does not depend on where."""
    if all(param.numel() <= SLICE_NUMEL for param in call.params):
        return call
    cut = Call()
    for param, grad, states in zip(call.params, call.grads, call.states, strict=True):
        for first in range(0, param.numel(), SLICE_NUMEL):
            part = slice(first, first + SLICE_NUMEL)
            cut.params.append(param[part])
            cut.grads.append(grad[part])
            cut.states.append(tuple(state[part] for state in states))
    return cut

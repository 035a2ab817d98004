"""The rule of a torch optimizer, found by watching it step a small matrix.

The dry run steps the matrix, and its parts flattened. What the optimizer keeps then shows its states and its history,
and that both ways give the same bits shows that it is element-wise. An optimizer that looks at norms, rows or whole
matrices, or that draws random numbers, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch.optim import Optimizer

from infinity.errors import ConfigError
from infinity.update.rule import Call, History, Options, UpdateRule
from infinity.update.stand_in import StandIn, State
from io_daemon.shared.protocol import STATE_KINDS

NUM_STEPS: Final = 8
ROWS, COLUMNS, CUT = 12, 32, 128
"""The matrix, and the element at which it is cut: multiples of what kernels take at a time."""

NumberType = torch.dtype | type
"""The type of what is kept once for a parameter: the dtype of a 0-D tensor, or int or float."""


class Birth(NamedTuple):
    """One entry of the state that a constructor makes, as Adagrad's does; most make none."""

    value: float
    number: NumberType | None
    """None: there is one for each element."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps after its steps: for each element, and for a whole parameter."""

    states: Mapping[str, torch.dtype]
    numbers: Mapping[str, NumberType]
    from_zeros: bool = False
    """Whether it does the same when all of that is given as zero before the first step."""


def rule_of(optimizer: Optimizer, *, dtype: torch.dtype) -> UpdateRule:
    """The rule by which ``optimizer`` steps parameters of ``dtype``, with the options of its param groups.

    Raises ConfigError, naming the optimizer and the reason, where it has taken steps already or is not element-wise.
    """
    births = _births(optimizer)
    stand_in = StandIn(optimizer)
    found = [_dry_run(stand_in, options, births, dtype) for options in _unlike(options_of(optimizer))]
    states = {label: dtype for kept in found for label, dtype in kept.states.items()}
    numbers = {label: number for kept in found for label, number in kept.numbers.items()}
    if len(states) > len(STATE_KINDS):
        _refuse(stand_in, f"keeps {', '.join(states)} for each element, which is more than {len(STATE_KINDS)}")
    from_zeros = all(kept.from_zeros for kept in found)
    return UpdateRule(
        name=stand_in.of.__name__,
        states=states,
        options=frozenset(optimizer.defaults),
        dtype=dtype,
        run=_Run(stand_in, births, tuple(states), numbers, from_zeros),
        from_zeros=from_zeros,
    )


def options_of(optimizer: Optimizer) -> list[Options]:
    """What each param group says, without its parameters."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


@dataclass(frozen=True, slots=True)
class _Run:
    """``UpdateRule.run``."""

    stand_in: StandIn
    births: Mapping[str, Birth]
    states: tuple[str, ...]
    numbers: Mapping[str, NumberType]
    from_zeros: bool
    """The first step is like any other, with states and numbers of zero."""

    def __call__(self, call: Call, history: History, options: Options) -> History:
        device = call.params[0].device
        if device.type == "meta":
            return tuple(0.0 for _ in self.numbers)
        if history is None and self.from_zeros:
            history = tuple(0.0 for _ in self.numbers)
        options = self.stand_in.chosen(options, device)
        numbers_on = device if options.get("fused") or options.get("capturable") else torch.device("cpu")
        given = [
            _born(self.births, param) if history is None else self._restored(views, history, numbers_on)
            for param, views in zip(call.params, call.states, strict=True)
        ]
        after = self.stand_in.step(call.params, call.grads, given, options)
        for views, state in zip(call.states, after, strict=True):
            self._keep(views, state)
        return tuple(float(after[0].get(label, 0.0)) for label in self.numbers)

    def _restored(self, views: Sequence[torch.Tensor], history: tuple[float, ...], device: torch.device) -> State:
        state: State = dict(zip(self.states, views, strict=True))
        for (label, number), value in zip(self.numbers.items(), history, strict=True):
            state[label] = _number(value, number, device)
        return state

    def _keep(self, views: Sequence[torch.Tensor], state: State) -> None:
        """Most optimizers write to the views; what a first step has made, or any has replaced, is copied there."""
        for label, view in zip(self.states, views, strict=True):
            value = state.get(label)
            if value is not None and value.data_ptr() != view.data_ptr():
                view.copy_(value)


def _number(value: float, number: NumberType, device: torch.device) -> Any:
    return torch.tensor(value, dtype=number, device=device) if isinstance(number, torch.dtype) else number(value)


# State from the constructor


def _births(optimizer: Optimizer) -> Mapping[str, Birth]:
    """Raises ConfigError unless the state of all parameters is alike, without a step, and one value throughout."""
    found: list[Mapping[str, Birth | None]] = []
    for param, state in optimizer.state.items():
        found.append({label: _birth(value, param) for label, value in state.items() if value is not None})
    births: dict[str, Birth] = {}
    for each in found:
        for label, birth in each.items():
            if birth is None or births.setdefault(label, birth) != birth or (label == "step" and birth.value):
                remedy = "has state: pass it before its first step; state is sharded from step 0 on"
                raise ConfigError("optimizer", type(optimizer).__name__, remedy)
    return births


def _birth(value: object, param: torch.Tensor) -> Birth | None:
    if isinstance(value, int | float):
        return Birth(float(value), type(value))
    if not isinstance(value, torch.Tensor):
        return None
    if value.dim() == 0:
        return Birth(value.item(), value.dtype)
    if value.shape != param.shape or (value.numel() and bool((value != value.view(-1)[0]).any())):
        return None
    return Birth(value.view(-1)[0].item() if value.numel() else 0.0, None)


def _born(births: Mapping[str, Birth], param: torch.Tensor) -> State:
    return {
        label: torch.full_like(param, birth.value)
        if birth.number is None
        else _number(birth.value, birth.number, torch.device("cpu"))
        for label, birth in births.items()
    }


# The dry run


def _unlike(groups: Sequence[Options]) -> list[Options]:
    """One of all groups that take the same way through the code: those that differ in the size of numbers alone."""

    def way(options: Options) -> str:
        return repr(
            sorted(
                (name, bool(value) if type(value) in (int, float) else repr(value)) for name, value in options.items()
            )
        )

    return list({way(options): options for options in groups}.values())


class _Trial:
    """One matrix that a stand-in steps, as it is or cut up."""

    def __init__(self, stand_in: StandIn, params: Sequence[torch.Tensor], births: Mapping[str, Birth]) -> None:
        self._stand_in, self._params = stand_in, [param.clone() for param in params]
        self._states = [_born(births, param) for param in self._params]

    def step(self, grads: Sequence[torch.Tensor], options: Options) -> None:
        for i, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            try:
                (self._states[i],) = self._stand_in.step([param], [grad.clone()], [self._states[i]], options)
            except Exception as error:  # noqa: BLE001 (whatever the user's code raises, the optimizer is refused)
                _refuse(self._stand_in, f"cannot step parts of parameters ({error})")

    def kept(self) -> Kept:
        """What the first parameter has: all are alike, or the bits differ."""
        states: dict[str, torch.dtype] = {}
        numbers: dict[str, NumberType] = {}
        for label, value in self._states[0].items():
            if isinstance(value, torch.Tensor) and value.shape == self._params[0].shape:
                states[label] = value.dtype
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                numbers[label] = value.dtype
            elif type(value) in (int, float):
                numbers[label] = type(value)
            elif value is not None:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                _refuse(self._stand_in, f"keeps {label} {what}, which belongs to no element")
        return Kept(states, numbers)

    def bits(self, states: Sequence[str]) -> list[torch.Tensor]:
        """All elements of the matrix, then all of each of its states."""
        columns = [self._params, *([state[label] for state in self._states] for label in states)]
        return [torch.cat([part.reshape(-1) for part in column]).view(torch.uint8) for column in columns]

    def numbers(self, labels: Sequence[str]) -> set[tuple[float, ...]]:
        """What is kept for each part: one set of numbers if it does not depend on the elements."""
        return {tuple(float(state[label]) for label in labels) for state in self._states}


def _dry_run(stand_in: StandIn, options: Options, births: Mapping[str, Birth], dtype: torch.dtype) -> Kept:
    generator = torch.Generator().manual_seed(NUM_STEPS)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator).to(dtype)
    whole, parts = _Trial(stand_in, [matrix], births), _Trial(stand_in, _cut(matrix), births)
    options = stand_in.chosen(options, matrix.device)
    kept, grads = Kept({}, {}), []
    with torch.random.fork_rng(devices=[]):
        for _ in range(NUM_STEPS):
            grad = torch.randn(ROWS, COLUMNS, generator=generator)
            grad.view(-1)[:CUT] *= 1000  # what looks at norms sees two very different parts
            grad.view(-1)[::37], grad.view(-1)[5::41] = -0.0, 0.0  # a sign of zero is a bit, too
            grads.append(grad.to(dtype))
            whole.step([grads[-1]], options)
            parts.step(_cut(grads[-1]), options)
            kept = whole.kept()
            if kept != parts.kept():
                _refuse(stand_in, "keeps other things for a matrix than for a vector")
            alike = map(torch.equal, whole.bits(list(kept.states)), parts.bits(list(kept.states)))
            if not all(alike) or len(whole.numbers(list(kept.numbers)) | parts.numbers(list(kept.numbers))) != 1:
                _refuse(stand_in, "steps a part of a parameter otherwise alone than within the whole")
        zeros = {label: Birth(0.0, None) for label in kept.states}
        zeros |= {label: Birth(0.0, number) for label, number in kept.numbers.items()}
        again = _Trial(stand_in, [matrix], zeros)
        for grad in grads:
            again.step([grad], options)
    from_zeros = all(map(torch.equal, whole.bits(list(kept.states)), again.bits(list(kept.states))))
    from_zeros &= whole.numbers(list(kept.numbers)) == again.numbers(list(kept.numbers))
    return replace(kept, from_zeros=from_zeros)


def _cut(matrix: torch.Tensor) -> list[torch.Tensor]:
    flat = matrix.view(-1)
    return [flat[:CUT], flat[CUT:]]


def _refuse(stand_in: StandIn, reason: str) -> NoReturn:
    raise ConfigError(
        "optimizer",
        stand_in.of.__name__,
        f"{reason}: only an optimizer that treats each element by itself can be sharded, such as torch's AdamW, SGD or "
        "RMSprop",
    )

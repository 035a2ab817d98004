"""An optimizer watched while it steps a small matrix, whole and in parts: what it keeps, and what it looks at.

That the matrix and its parts, flattened, come to the same bits shows that it is element-wise. One that looks at norms,
rows or whole matrices is stepped on whole parameters, if it looks at each by itself; one that draws random numbers, or
keeps what is no element's, is refused by name.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NoReturn, TypeGuard

import torch
from torch.optim import Optimizer

from infinity.errors import ConfigError
from infinity.update.rule import NumberTensor, NumberType, Options, number_of
from infinity.update.stand_in import NOT_OPTIONS, StandIn, State, Stepped
from infinity.update.watched import Watched

NUM_STEPS: Final = 8
ROWS: Final = 12
COLUMNS: Final = 32
RATE: Final = 1e-3
SMALLER: Final = (0.1, 0.01, 0.001)
"""Shares of its learning rate at which it is looked at, too."""
LATER: Final = (10, 100, 1_000, 10_000, 100_000)
"""The counts of steps after which somebody's own rule is looked at again."""
_TOLD: Final = (int, float, str, tuple, list, dict, torch.Tensor)
_TOLD_MAX: Final = 64
"""Elements of a tensor among the options that are told."""
DECISIVE: Final = (0.0, 1e-7, 1e6, 1e17, float("inf"), float("nan"))
"""Gradients upon which somebody's own rule may decide what to do."""
LOOKS_UP: Final = "asks which parameter it steps (it looks one up in a set or a dict)"
CUT: Final = 128
"""The matrix, and the element at which it is cut: multiples of what kernels take at a time."""


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
    is_whole: bool = False
    """Whether it needs parameters whole."""
    unsigned: frozenset[str] = frozenset()
    """Its fp32 states in which no sign was ever seen."""


def options_of(optimizer: Optimizer) -> list[Options]:
    """What each param group says now, without its parameters, whoever writes to its tensors and lists later."""
    return [
        {name: _as_it_is(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _as_it_is(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return copy.deepcopy(value) if isinstance(value, (list, tuple, dict)) else value


def in_words(options: Sequence[Options]) -> str:
    """Numbers and words of the param groups, equal on ranks that would step alike."""
    told = (
        " ".join(
            f"{name} {_told(value)}"
            for name, value in group.items()
            if name not in NOT_OPTIONS and isinstance(value, _TOLD)
        )
        for group in options
    )
    return "; ".join(words for words, _ in itertools.groupby(told))


def _told(value: object) -> str:
    """One option; of what is no number and no word only the type, as its own words may hold an address."""
    match value:
        case int() | float() | str():
            return str(value)
        case torch.Tensor():
            return str(value.tolist()) if value.numel() <= _TOLD_MAX else f"a tensor of {value.numel()}"
        case tuple() | list():
            return f"({', '.join(map(_told, value))})"
        case dict():
            return f"({', '.join(f'{key} {_told(each)}' for key, each in value.items())})"
        case _:
            return type(value).__name__


# State from the constructor


def births_of(optimizer: Optimizer) -> Mapping[str, Birth]:
    """Raises ConfigError unless the state of all parameters is alike, without a step, and one value throughout."""
    births: dict[str, Birth] = {}
    # the largest first: what is kept for a parameter of one element does not tell what it is kept for
    for param, state in sorted(optimizer.state.items(), key=lambda item: -item[0].numel()):
        for label, value in state.items():
            if value is None:
                continue
            birth = _birth(value, param, births.get(label))
            remedy = "has state: pass it before its first step; state is sharded from step 0 on"
            if birth is None or (label == "step" and birth.value):
                raise ConfigError("optimizer", type(optimizer).__name__, remedy)
            if births.setdefault(label, birth) != birth:
                remedy += (
                    f". If its constructor has made it, {label} must be the same for all parameters: have options of "
                    "param groups tell them apart"
                )
                raise ConfigError("optimizer", type(optimizer).__name__, remedy)
    return births


def _birth(value: object, param: torch.Tensor, of_others: Birth | None) -> Birth | None:
    if isinstance(value, int | float):
        return Birth(float(value), type(value))
    if not isinstance(value, torch.Tensor):
        return None
    if value.numel() == 1 and (of_others.number is not None if of_others else value.shape != param.shape):
        return Birth(value.item(), NumberTensor(value.dtype, tuple(value.shape)))
    if value.shape != param.shape:
        return None
    if not value.numel():  # the largest came first: what theirs is filled with
        return of_others or Birth(0.0, None)
    first = value[(0,) * value.dim()]
    return None if bool((value != first).any()) else Birth(first.item(), None)


def born(births: Mapping[str, Birth], param: torch.Tensor) -> State:
    return {
        label: torch.full_like(param, birth.value)
        if birth.number is None
        else number_of(birth.value, birth.number, torch.device("cpu"))
        for label, birth in births.items()
    }


# The dry run


def _at_some_rate(options: Options) -> Options:
    """The options with another learning rate where it is 0, as before a warm-up: with it no step shows anything."""
    rate = options.get("lr", 1.0)
    if rate:
        return options
    return {**options, "lr": torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE}


def way_of(options: Options, *, closely: bool) -> str:
    """The way that groups take through the code: alike for those that differ in the size of numbers alone; or, looked
    at ``closely``, by less than an order of magnitude."""
    size = _magnitude if closely else bool
    return repr(
        sorted(
            (name, size(value) if _is_number(value) else repr(value))
            for name, value in _at_some_rate(options).items()
            if name not in NOT_OPTIONS
        )
    )


def _is_number(value: object) -> TypeGuard[float | torch.Tensor]:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else type(value) in (int, float)


def _magnitude(value: float | torch.Tensor) -> float | None:
    size = abs(float(value))
    return round(math.log10(size)) if 0 < size < math.inf else size


def unlike(groups: Sequence[Options], *, closely: bool) -> dict[str, Options]:
    """One of all groups that take the same way, by that."""
    return {way_of(options, closely=closely): options for options in groups}


class _Trial:
    """One matrix that a stand-in steps, as it is or cut up."""

    def __init__(self, stand_in: StandIn, params: Sequence[torch.Tensor], births: Mapping[str, Birth]) -> None:
        self.stand_in, self._params = stand_in, [self._watched(param.clone(), stand_in) for param in params]
        self._states = [born(births, param) for param in self._params]

    @staticmethod
    def _watched(tensor: torch.Tensor, stand_in: StandIn) -> torch.Tensor:
        return tensor.as_subclass(Watched) if stand_in.is_foreign else tensor

    def step(self, grads: Sequence[torch.Tensor], options: Options) -> None:
        for i, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            self._states[i] = self._step([Stepped([param], [grad], [self._states[i]])], options)[0][0]

    def step_together(self, grads: Sequence[torch.Tensor], options: Options) -> None:
        self._states = self._step([Stepped(self._params, grads, self._states)], options)[0]

    def step_apart(self, grads: Sequence[torch.Tensor], options: Options, cuts: Sequence[slice]) -> None:
        """Step the parameters in several groups, cut as told."""
        groups = [Stepped(self._params[cut], grads[cut], self._states[cut]) for cut in cuts]
        self._states = [state for states in self._step(groups, options) for state in states]

    def _step(self, groups: Sequence[Stepped], options: Options) -> list[list[State]]:
        own = [
            group._replace(grads=[self._watched(grad.clone(), self.stand_in) for grad in group.grads])
            for group in groups
        ]
        try:
            return self.stand_in.step_groups(own, options)
        except Exception as error:  # noqa: BLE001 (whatever the user's code raises, the optimizer is refused)
            if any(isinstance(told, torch.Tensor) for told in error.args):  # the key of a KeyError
                refuse(self.stand_in, LOOKS_UP)
            refuse(self.stand_in, f"cannot step parts of parameters ({error})")

    def only(self, i: int) -> _Trial:
        """What became of one parameter."""
        trial = object.__new__(_Trial)
        trial.stand_in, trial._params, trial._states = self.stand_in, self._params[i : i + 1], self._states[i : i + 1]
        return trial

    def kept(self) -> Kept:
        """What the first parameter has: all are alike, or the bits differ."""
        states: dict[str, torch.dtype] = {}
        numbers: dict[str, NumberType] = {}
        for label, value in self._states[0].items():
            if isinstance(value, torch.Tensor) and value.shape == self._params[0].shape:
                states[label] = value.dtype
            elif isinstance(value, torch.Tensor) and value.numel() == 1:
                numbers[label] = NumberTensor(value.dtype, tuple(value.shape))
            elif type(value) in (int, float):
                numbers[label] = type(value)
            elif value is not None:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                refuse(self.stand_in, f"keeps {label} {what}, which belongs to no element")
        return Kept(states, numbers)

    def counters(self, num_steps: int) -> list[str]:
        """The numbers that are as many as the steps were."""
        return [label for label in self.kept().numbers if float(self._states[0][label]) == num_steps]

    def count_from(self, labels: Sequence[str], start: int) -> None:
        for state in self._states:
            for label in labels:
                number = state[label]
                state[label] = (
                    torch.full_like(number, start) if isinstance(number, torch.Tensor) else type(number)(start)
                )

    def signed(self) -> set[str]:
        """The states in which some sign bit is set now, or that are not fp32."""
        return {
            label
            for state in self._states
            for label, value in state.items()
            if isinstance(value, torch.Tensor) and (value.dtype != torch.float32 or bool(value.signbit().any()))
        }

    def bits(self, states: Sequence[str]) -> list[torch.Tensor]:
        """All elements of the matrix, then all of each of its states."""
        columns = [self._params, *([state[label] for state in self._states] for label in states)]
        return [torch.cat([part.reshape(-1) for part in column]).view(torch.uint8) for column in columns]

    def numbers(self, labels: Sequence[str]) -> set[tuple[float, ...]]:
        """What is kept for each part: one set of numbers if it does not depend on the elements."""
        return {tuple(float(state[label]) for label in labels) for state in self._states}


def dry_run(
    stand_in: StandIn, options: Options, births: Mapping[str, Birth], dtype: torch.dtype, *, looks_ahead: bool = True
) -> Kept:
    """What it keeps, and whether it needs parameters whole. Raises ConfigError for what cannot be sharded.

    Args:
        looks_ahead: at smaller learning rates, too, where a schedule gets, if somebody else wrote it.
    """
    options = _at_some_rate(options)
    kept = _watched_at(stand_in, options, births, dtype, refuses_idle=True)
    if not (looks_ahead and stand_in.is_foreign and "lr" in options):
        return kept
    for share in SMALLER:
        later = _watched_at(stand_in, {**options, "lr": options["lr"] * share}, births, dtype)
        if (later.states, later.numbers) != (kept.states, kept.numbers):
            refuse(stand_in, f"keeps other things at {share:g} of its learning rate")
        kept = replace(
            kept,
            is_whole=kept.is_whole or later.is_whole,
            from_zeros=kept.from_zeros and later.from_zeros,
            unsigned=kept.unsigned & later.unsigned,
        )
    return kept


def _watched_at(
    stand_in: StandIn,
    options: Options,
    births: Mapping[str, Birth],
    dtype: torch.dtype,
    *,
    refuses_idle: bool = False,
) -> Kept:
    generator = torch.Generator().manual_seed(NUM_STEPS)
    matrix = torch.randn(ROWS, COLUMNS, generator=generator, device="cpu").to(dtype)
    grads = [_gradient(generator).to(dtype) for _ in range(NUM_STEPS)]
    options = stand_in.chosen(options, matrix.device)
    stand_in.asked.shape = False  # that was at other options
    whole = _Trial(stand_in, [matrix], births)
    with torch.random.fork_rng(devices=[]):
        try:
            kept = _watch_parts(whole, _Trial(stand_in, _cut(matrix), births), grads, options)
            if stand_in.is_foreign:
                _watch_decisions(matrix, stand_in, births, grads, options)
                _watch_later([_Trial(stand_in, each, births) for each in ([matrix], _cut(matrix))], grads, options)
        except ConfigError:
            whole = _Trial(stand_in, [matrix], births)
            kept = replace(_watch(whole, grads, options), is_whole=True)
            if not _steps_alone(whole, matrix, births, grads, options):
                once_more = _Trial(stand_in, [matrix], births)
                if _watch(once_more, grads, options) and _are_equal(whole, once_more, kept):
                    refuse(stand_in, "steps a parameter otherwise beside others, as by a norm of all gradients")
                raise
            if stand_in.is_foreign:
                _watch_later([_Trial(stand_in, [matrix], births)], grads, options)
        if stand_in.is_foreign:
            if refuses_idle and torch.equal(whole.bits(())[0], _Trial(stand_in, [matrix], births).bits(())[0]):
                refuse(stand_in, "changed nothing in its step of a parameter with a gradient")
            _check_foreign(whole, matrix, births, grads, options)
        zeros = {label: Birth(0.0, None) for label in kept.states}
        zeros |= {label: Birth(0.0, number) for label, number in kept.numbers.items()}
        again = _Trial(stand_in, [matrix], zeros)
        _watch(again, grads, options)
    unsigned = frozenset(kept.states.keys() - whole.signed() - again.signed())
    return replace(kept, from_zeros=_are_equal(whole, again, kept), unsigned=unsigned)


def _gradient(generator: torch.Generator) -> torch.Tensor:
    grad = torch.randn(ROWS, COLUMNS, generator=generator, device="cpu")
    grad.view(-1)[:CUT] *= 1000  # what looks at norms sees two very different parts
    grad.view(-1)[::37], grad.view(-1)[5::41] = -0.0, 0.0  # a sign of zero is a bit, too
    return grad


def _watch_parts(whole: _Trial, parts: _Trial, grads: Sequence[torch.Tensor], options: Options) -> Kept:
    """What is kept, if parts are stepped as the whole is. Raises ConfigError if they are not."""
    kept = Kept({}, {})
    for grad in grads:
        whole.step([grad], options)
        parts.step(_cut(grad), options)
        kept = _kept_as_before(whole, kept)
        if kept != parts.kept():
            refuse(whole.stand_in, "keeps other things for a matrix than for a vector")
        if not _are_equal(whole, parts, kept):
            refuse(whole.stand_in, "steps a part of a parameter otherwise alone than within the whole")
    if whole.stand_in.asked.shape:
        refuse(whole.stand_in, "looks at shapes or sums, which parts of parameters have not")
    return kept


def _watch_decisions(
    matrix: torch.Tensor,
    stand_in: StandIn,
    births: Mapping[str, Birth],
    grads: Sequence[torch.Tensor],
    options: Options,
) -> None:
    """Raises ConfigError if gradients in one part decide upon what becomes of another, as where a parameter is passed
    over whose gradient is not finite, or is clipped."""
    for value in DECISIVE:
        whole, parts = (_Trial(stand_in, each, births) for each in ([matrix], _cut(matrix)))
        for grad in (grads[0], _decisive(grads[1], value), grads[2]):
            try:
                whole.step([grad], options)
                parts.step(_cut(grad), options)
            except ConfigError:  # it raises, as it would in plain torch
                break
            if not _are_equal(whole, parts, whole.kept()):
                refuse(stand_in, f"steps a part of a parameter otherwise where gradients of another are {value:g}")


def _decisive(grad: torch.Tensor, value: float) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[CUT:] = value
    return grad


def _watch_later(trials: Sequence[_Trial], grads: Sequence[torch.Tensor], options: Options) -> None:
    """Raises ConfigError if what counts its steps does something else after many of them: keeps something new, or steps
    the matrix, the first trial, otherwise than its parts, the second."""

    def step(grad: torch.Tensor) -> None:
        for trial in trials:
            trial.step([grad] if trial is trials[0] else _cut(grad), options)

    for grad in grads:
        step(grad)
    first = trials[0]
    kept, counters = first.kept(), first.counters(NUM_STEPS)
    for start in LATER if counters else ():
        for trial in trials:
            trial.count_from(counters, start)
        for grad in grads[:2]:
            step(grad)
            if first.kept() != kept:
                refuse(first.stand_in, f"keeps other things after {start} steps than after the first")
            if any(not _are_equal(first, trial, kept) for trial in trials):
                refuse(first.stand_in, f"steps a part of a parameter otherwise alone after {start} steps")


def _watch(trial: _Trial, grads: Sequence[torch.Tensor], options: Options) -> Kept:
    """What is kept of the matrix. Raises ConfigError if it cannot be stepped, or keeps what belongs to no element."""
    kept = Kept({}, {})
    for grad in grads:
        trial.step([grad], options)
        kept = _kept_as_before(trial, kept)
    return kept


def _kept_as_before(trial: _Trial, before: Kept) -> Kept:
    """What is kept now. Raises ConfigError for what comes or goes after the first step that keeps anything: a state
    that is given as zero before it is made would be taken for one that is there."""
    kept = trial.kept()
    if (before.states or before.numbers) and kept != before:
        labels = (kept.states.keys() | kept.numbers.keys()) ^ (before.states.keys() | before.numbers.keys())
        what = ", ".join(sorted(labels)) or "its state in another form"
        refuse(trial.stand_in, f"begins or ceases to keep {what} after its first step, in which it must make all of it")
    return kept


def _steps_alone(
    whole: _Trial, matrix: torch.Tensor, births: Mapping[str, Birth], grads: Sequence[torch.Tensor], options: Options
) -> bool:
    """Whether the matrix is stepped in the same way beside another one, and once more."""
    beside = _Trial(whole.stand_in, [matrix, matrix.flip(0)], births)
    for grad in grads:
        beside.step_together([grad, 3 * grad.flip(0)], options)
    return _are_equal(whole, beside.only(0), whole.kept())


def _check_foreign(
    whole: _Trial, matrix: torch.Tensor, births: Mapping[str, Birth], grads: Sequence[torch.Tensor], options: Options
) -> None:
    """Raises ConfigError for what only an optimizer does that somebody else wrote: stepping something else than what
    it is given, or by its place."""
    stand_in = whole.stand_in
    if stand_in.asked.identity:
        refuse(stand_in, LOOKS_UP)
    others = [matrix.flip(0), matrix.flip(1), matrix * 2]
    elsewhere = _Trial(stand_in, [*others, matrix, matrix * 3], births)
    for grad in grads:
        given = [grad.flip(0), grad.flip(1), grad * 2, grad, grad * 3]
        elsewhere.step_apart(given, options, [slice(0, 2), slice(2, 5)])
    if not _are_equal(whole, elsewhere.only(3), whole.kept()):
        refuse(stand_in, "steps a parameter otherwise in another place of its groups, or beside others")
    for value in DECISIVE:
        alone, beside = _Trial(stand_in, [matrix], births), _Trial(stand_in, [matrix, matrix * 2], births)
        for grad, other in zip(grads, (grads[0], torch.full_like(matrix, value), grads[2]), strict=False):
            try:
                beside.step_together([grad, other], options)
            except ConfigError:
                break
            alone.step([grad], options)
            if not _are_equal(alone, beside.only(0), alone.kept()):
                refuse(stand_in, f"steps a parameter otherwise beside another whose gradients are {value:g}")


def _are_equal(left: _Trial, right: _Trial, kept: Kept) -> bool:
    states, numbers = list(kept.states), list(kept.numbers)
    alike = all(map(torch.equal, left.bits(states), right.bits(states)))
    return alike and len(left.numbers(numbers) | right.numbers(numbers)) == 1


def _cut(matrix: torch.Tensor) -> list[torch.Tensor]:
    flat = matrix.view(-1)
    return [flat[:CUT], flat[CUT:]]


def refuse(stand_in: StandIn, reason: str) -> NoReturn:
    raise ConfigError(
        "optimizer",
        stand_in.of.__name__,
        f"{reason}: only an optimizer that treats each element, or each parameter, by itself can be sharded, such as "
        "torch's AdamW, SGD, RMSprop or Muon",
    )

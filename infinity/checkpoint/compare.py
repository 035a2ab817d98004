"""Whether a checkpoint fits a model: every difference in words, before anything changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from infinity.checkpoint.manifest import BUFFER, DTYPES, STATE_PREFIX, TensorEntry

NAMES_MAX: Final = 3
"""How many names are told of those with one problem."""
DECAY: Final = "decoupled_weight_decay"
"""The option of a param group by which Adam is AdamW, for optimizers that have it as one."""
_ADAMS: Final = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_SAME: Final = (_ADAMS, ("Lion", "FusedLion", "DeepSpeedCPULion"), ("Adagrad", "DeepSpeedCPUAdagrad"))
"""Classes of one arithmetic, but for options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """An optimizer as a checkpoint describes it."""

    name: str | None
    """Its class; None where nobody said."""
    options: Sequence[Mapping[str, Any]]
    """What each param group says."""
    members: Sequence[Sequence[str]]
    """The names of each group's parameters; empty where nobody said."""


def matched(saved: Mapping[str, TensorEntry], model: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """By the model's names: which of the checkpoint's tensors is loaded there.

    A tensor that is shared has several names, in the checkpoint, in the model or in both, and any of them will do, as
    in a state dict, which has it under each; the one that it stands under goes first."""
    named = {alias: entry for entry in saved.values() for alias in entry.aliases} | dict(saved)
    found = {name: [named[each] for each in (name, *mine.aliases) if each in named] for name, mine in model.items()}
    return {name: entries[0] for name, entries in found.items() if entries}


def differences(
    saved: Mapping[str, TensorEntry],
    model: Mapping[str, TensorEntry],
    *,
    strict: bool,
    states: bool,
    left_out: Iterable[str] = (),
) -> list[str]:
    """What is in the way of loading; one line a problem, with the names that have it.

    Args:
        saved: the checkpoint's tensors by name.
        model: the engine's.
        strict: whether both must have the same names.
        states: whether the optimizer's states are to be loaded.
        left_out: frozen parameters that were not saved on purpose.
    """
    found: dict[str, list[str]] = {}
    for name, problem in _problems(saved, model, strict=strict, states=states, left_out=frozenset(left_out)):
        found.setdefault(problem, []).append(name)
    return [f"{listed(names)} {problem}" for problem, names in found.items()]


def group_differences(saved: Groups, mine: Groups) -> list[str]:
    """What is in the way of going on with an optimizer's states and options; one line a problem."""
    if len(saved.options) != len(mine.options):
        return [f"the optimizer had {len(saved.options)} param groups, it has {len(mine.options)}"]
    if saved.name and mine.name and not _are_same(saved.name, mine.name):
        return [f"the optimizer was {saved.name}, it is {mine.name}"]
    found = []
    pairs = zip(saved.options, mine.options, strict=True)
    decays = [(there[DECAY], here[DECAY]) for there, here in pairs if DECAY in there and DECAY in here]
    if any(bool(there) != bool(here) for there, here in decays):
        words = ["decoupled, as AdamW's" if each else "added to gradients, as Adam's" for each in decays[0]]
        found.append(f"the optimizer's weight decay was {words[0]}, it is {words[1]}")
    said = [repr(sorted(options.items())) for options in saved.options]
    group_of = {name: number for number, names in enumerate(saved.members) for name in names}
    moved = [
        name
        for number, names in enumerate(mine.members)
        for name in names
        if name in group_of and said[group_of[name]] != said[number]
    ]
    if moved:
        found.append(f"{listed(moved)} would get the options of another param group, whose number it has now")
    return found


def _are_same(one: str, other: str) -> bool:
    return one == other or any(one in names and other in names for names in _SAME)


def listed(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    shown = ", ".join(names[:NAMES_MAX])
    return f"{shown} and {len(names) - NAMES_MAX} more:" if len(names) > NAMES_MAX else f"{shown}:"


def _problems(
    saved: Mapping[str, TensorEntry],
    model: Mapping[str, TensorEntry],
    *,
    strict: bool,
    states: bool,
    left_out: frozenset[str],
) -> Iterator[tuple[str, str]]:
    found = matched(saved, model)
    for name, mine in model.items():
        theirs = found.get(name)
        if theirs is None:
            if strict and mine.persistent and left_out.isdisjoint((name, *mine.aliases)):
                yield name, "the model has it, the checkpoint has not"
        elif problem := _problem(theirs, mine, states=states):
            yield name, problem
    if states:
        yield from _shared_states(found)
    loaded = {entry.name for entry in found.values()}
    shared = {alias: name for name, mine in model.items() for alias in mine.aliases}
    for name, theirs in saved.items():
        if not strict or not theirs.persistent or name in loaded:
            continue
        if name in shared:
            yield name, f"was a tensor of its own when it was saved, and is {shared[name]} in the model"
        else:
            yield name, "the checkpoint has it, the model has not"


def _shared_states(found: Mapping[str, TensorEntry]) -> Iterator[tuple[str, str]]:
    """What was one parameter, trained by the gradients of all its uses, has no states for several."""
    first: dict[str, str] = {}
    for name, theirs in found.items():
        whose = theirs.name if theirs.name in found else first.setdefault(theirs.name, name)
        if name != whose and theirs.trainable and _states(theirs):
            yield name, f"was {whose} when it was saved, and the optimizer's states are of both"


def _problem(saved: TensorEntry, model: TensorEntry, *, states: bool) -> str:
    if saved.is_buffer != model.is_buffer:
        return "is a buffer in one, a parameter in the other"
    if saved.shape != model.shape:
        return f"was saved with shape {_shape(saved)}, the model's is {_shape(model)}" if saved.persistent else ""
    if saved.order != model.order:
        return f"was saved in the memory order {saved.order}, the model's is {model.order}: convert its memory format"
    kind = BUFFER if model.is_buffer else "weight"
    there, here = DTYPES[saved.kinds[kind]], DTYPES[model.kinds[kind]]
    if there != here and not (there.is_floating_point and here.is_floating_point):
        return f"was saved as {saved.kinds[kind]}, the model's is {model.kinds[kind]}"
    if states and not model.is_buffer:
        return _states_problem(saved, model)
    return ""


def _states_problem(saved: TensorEntry, model: TensorEntry) -> str:
    if saved.trainable and not model.trainable:
        return "was trained when it was saved, and is frozen: freeze it behind initialize(), as it was then"
    if not saved.trainable:
        return ""  # what begins to train has states as new
    there, here = _states(saved), _states(model)
    if there != here:
        return f"was saved with the optimizer states {there or 'none'}, this optimizer keeps {here or 'none'}"
    return ""


def _states(entry: TensorEntry) -> str:
    return ", ".join(sorted(kind.removeprefix(STATE_PREFIX) for kind in entry.kinds if kind.startswith(STATE_PREFIX)))


def _shape(entry: TensorEntry) -> str:
    return "x".join(map(str, entry.shape)) or "()"

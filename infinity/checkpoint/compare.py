"""Whether a checkpoint fits a model: every difference in words, before anything changes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from infinity.checkpoint.manifest import BUFFER, DTYPES, STATE_PREFIX, TensorEntry

NAMES_MAX: Final = 3
"""How many names are told of those with one problem."""


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
    return [f"{_names(names)} {problem}" for problem, names in found.items()]


def _names(names: list[str]) -> str:
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
    for name, mine in model.items():
        theirs = saved.get(name)
        if theirs is None:
            if strict and mine.persistent and name not in left_out:
                yield name, "the model has it, the checkpoint has not"
        elif problem := _problem(theirs, mine, states=states):
            yield name, problem
    for name, theirs in saved.items():
        if strict and theirs.persistent and name not in model:
            yield name, "the checkpoint has it, the model has not"


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
    if saved.trainable != model.trainable:
        words = {True: "trained", False: "frozen"}
        return f"was {words[saved.trainable]} when it was saved, and is {words[model.trainable]}"
    there, here = _states(saved), _states(model)
    if there != here:
        return f"was saved with the optimizer states {there or 'none'}, this optimizer keeps {here or 'none'}"
    return ""


def _states(entry: TensorEntry) -> str:
    return ", ".join(sorted(kind.removeprefix(STATE_PREFIX) for kind in entry.kinds if kind.startswith(STATE_PREFIX)))


def _shape(entry: TensorEntry) -> str:
    return "x".join(map(str, entry.shape)) or "()"

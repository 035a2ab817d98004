"""How an optimizer changes weights: the names of its states and options, and its arithmetic as one function. Pure.

A rule is element-wise: a part of a parameter is stepped to the same bits alone as within the whole, whatever its
shape. So sub-groups and shards may cut parameters where they like. In some groups it may look at whole parameters
instead, as Muon does at matrices; these are gathered for their step, one at a time. What a rule keeps for each element
are its *states*, numbered kinds of a chunk (``STATE_KINDS``) whose labels only reports show; what it keeps for a whole
parameter, such as a count of steps, is its *history*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from io_daemon.shared.protocol import STATE_KINDS, ObjectKind

History = tuple[float, ...] | None
"""The numbers that a rule keeps for a parameter; None before its first update."""

Options = Mapping[str, Any]
"""What one param group says: learning rate, decay."""


class NumberTensor(NamedTuple):
    """The type of a number that is kept as a tensor of one element, often of no dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()


NumberType = NumberTensor | type
"""The type of what is kept once for a parameter: that of a tensor, or int or float."""


def number_of(value: float, number: NumberType, device: torch.device) -> Any:
    """A number of a history as the optimizer keeps it."""
    if isinstance(number, NumberTensor):
        return torch.full(number.shape, value, dtype=number.dtype, device=device)
    return number(value)


def numbers_of(numbers: Mapping[str, NumberType], history: tuple[float, ...], device: torch.device) -> dict[str, Any]:
    """The numbers of a history by label, as the optimizer keeps them."""
    return {
        label: number_of(value, number, device) for (label, number), value in zip(numbers.items(), history, strict=True)
    }


@dataclass(slots=True)
class Call:
    """Pieces that are stepped together, all of one param group and one history: lists of one length."""

    params: list[torch.Tensor] = field(default_factory=list)
    grads: list[torch.Tensor] = field(default_factory=list)
    states: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    """The states of each piece, in the order of the rule's labels."""
    whole: bool = False
    """The pieces are whole parameters in their shapes; else they are 1-D, and any part could be stepped alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    name: str
    states: Mapping[str, torch.dtype]
    """Label and dtype of what is kept for each element."""
    options: frozenset[str]
    """What a param group may set for itself."""
    dtype: torch.dtype
    """The dtype of the parameters and gradients of a call."""
    run: Callable[[Call, History, Options], History]
    """Step the pieces in place; the history after it."""
    check: Callable[[Sequence[Options]], None] = lambda _groups: None
    """It is called before a step with the options of all groups, as they are the step's. Raises EngineStateError for
    those that the rule cannot follow."""
    numbers: Mapping[str, NumberType] = field(default_factory=dict)
    """What each number of a history is, such as ``step``, and its type."""
    whole_groups: frozenset[int] = frozenset()
    """The param groups whose parameters are stepped as wholes, each by itself."""
    unsigned: frozenset[str] = frozenset()
    """The fp32 states that are never negative, as far as anybody has seen."""
    is_foreign: bool = False
    """Whether somebody else wrote it: it may look at what is changed after the step, and is never run later."""
    from_zeros: bool = True
    """Whether a first step, which has no history, goes on from zeros, or from what was written to the states; else it
    makes them anew."""

    @property
    def state_kinds(self) -> tuple[ObjectKind, ...]:
        return STATE_KINDS[: len(self.states)]

    @property
    def markers(self) -> ObjectKind | None:
        """The kind of a state whose signs are free; None where there is none."""
        return next(iter(self.unsigned_kinds), None)

    @property
    def unsigned_kinds(self) -> list[ObjectKind]:
        """The kinds of ``unsigned``."""
        return [kind for label, kind in zip(self.states, self.state_kinds, strict=True) if label in self.unsigned]

    @property
    def state_mask(self) -> int:
        return sum(kind.mask for kind in self.state_kinds)

"""Which parameters travel together: param groups from the module tree.

A group is the largest module subtree that holds at most ``numel_max`` elements; elements of a ModuleList stay apart,
since a list is never called. A leaf, see ``leaves``, is one group whatever it holds. Parameters not above the
persistence threshold, and those of PEFT's encoders of prompts, form groups of their own, which stay unsharded;
trainable and frozen parameters never share a group, so that frozen ones carry no optimizer state, and neither do
weights of two dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

import torch
from torch import nn

from infinity.plan.leaves import is_leaf, lay_out
from infinity.plan.registered import children, modules, named_parameters, parameters

_PROMPT_ENCODER: Final = ("peft.tuners.tuners_utils", "BasePromptEncoder")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    params: tuple[nn.Parameter, ...]
    name: str
    """For people: the module that holds the parameters, and who may choose whether it is called."""
    anchor: nn.Module | None
    """The module whose call uses the group; None for persistent groups."""
    trainable: bool
    persistent: bool
    dtype: torch.dtype
    """What the weights are once they are an engine's."""


def group_params(
    model: nn.Module,
    *,
    numel_max: int,
    persistent_numel_max: int | None,
    persistent_total_max: int | None = None,
    bucket_numel: int | None = None,
    dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda param: param.dtype,
) -> list[GroupMembers]:
    """Every parameter of the model in exactly one group; a shared one belongs to the module that comes first.

    Args:
        numel_max: of a group that comes and goes.
        persistent_numel_max: of a persistent parameter; None = all are.
        persistent_total_max: bounds all persistent parameters together: what comes first and still fits is one.
        bucket_numel: of a group of persistent parameters, if it is more than one; these are reduced together.
        dtype_of: what a parameter's weight is once it is an engine's.
    """
    seen: set[int] = set()
    names = {id(param): name for name, param in named_parameters(model)}
    persistent = _persistent(model, persistent_numel_max, persistent_total_max)
    seen.update(id(p) for p in persistent)
    subtrees = _subtrees(model, numel_max, seen)
    groups = [group for anchor, params in subtrees for group in _alike(params, anchor, names, dtype_of)]
    lay_out(model)
    buckets = [
        group for bucket in _buckets(persistent, bucket_numel) for group in _alike(bucket, None, names, dtype_of)
    ]
    return [*buckets, *_with_choosers(model, groups)]


def _persistent(model: nn.Module, numel_max: int | None, total_max: int | None) -> list[nn.Parameter]:
    stays = {id(param) for module in modules(model) if _stays(module) for param in parameters(module)}
    chosen, total = [], 0
    for param in parameters(model):
        if id(param) in stays or (
            (numel_max is None or param.numel() <= numel_max)
            and (total_max is None or total + param.numel() <= total_max)
        ):
            chosen.append(param)
            total += param.numel()
    return chosen


def _stays(module: nn.Module) -> bool:
    """Whether it is one of PEFT's encoders of prompts: to save one, PEFT calls it, on one rank alone."""
    return any((kind.__module__, kind.__name__) == _PROMPT_ENCODER for kind in type(module).__mro__)


def _buckets(params: list[nn.Parameter], numel_max: int | None) -> Iterator[list[nn.Parameter]]:
    """``params`` in their order, cut so that backward completes one bucket after the other. Trainable and frozen ones
    are cut apart, so that what is frozen changes no bucket of what is trained."""
    for trainable in (True, False):
        bucket: list[nn.Parameter] = []
        numel = 0
        for param in (p for p in params if p.requires_grad is trainable):
            if bucket and numel_max is not None and numel + param.numel() > numel_max:
                yield bucket
                bucket, numel = [], 0
            bucket.append(param)
            numel += param.numel()
        if bucket:
            yield bucket


def common_name(names: Sequence[str]) -> str:
    """The module that holds all parameters of these names, or the first and the last of them."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return ".".join(shared) if shared else f"{names[0]} to {names[-1]}"


def _with_choosers(model: nn.Module, groups: Sequence[GroupMembers]) -> Iterator[GroupMembers]:
    """A group inside an element of a list may be skipped, or not, by the module that has the list."""
    chooser_of: dict[nn.Module, str] = {}
    for module in modules(model):
        for child in children(module):
            if _is_list(child):
                inner = (each for element in children(child) for each in modules(element))
                chooser_of.update(dict.fromkeys(inner, type(module).__name__))
    for group in groups:
        chooser = chooser_of.get(group.anchor) if group.anchor is not None else None
        yield replace(group, name=f"{group.name}, called by {chooser}") if chooser else group


def _alike(
    params: list[nn.Parameter],
    anchor: nn.Module | None,
    names: Mapping[int, str],
    dtype_of: Callable[[nn.Parameter], torch.dtype],
) -> Iterator[GroupMembers]:
    """``params`` parted by what they are to an engine, trainable ones first."""
    parts: dict[tuple[bool, torch.dtype], list[nn.Parameter]] = {}
    for param in sorted(params, key=lambda param: not param.requires_grad):
        parts.setdefault((param.requires_grad, dtype_of(param)), []).append(param)
    for (trainable, dtype), members in parts.items():
        yield GroupMembers(
            params=tuple(members),
            name=common_name([names[id(param)] for param in members]),
            anchor=anchor,
            trainable=trainable,
            persistent=anchor is None,
            dtype=dtype,
        )


def _subtrees(module: nn.Module, numel_max: int, seen: set[int]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    if _is_called(module):
        subtree = [p for p in parameters(module) if id(p) not in seen]
        fits = sum(p.numel() for p in subtree) <= numel_max and not _holds_list(module)
        if subtree and (fits or is_leaf(module)):
            seen.update(id(p) for p in subtree)
            yield module, subtree
            return
    own = [p for p in parameters(module, recurse=False) if id(p) not in seen]
    if own:
        seen.update(id(p) for p in own)
        yield module, own
    for child in children(module):
        yield from _subtrees(child, numel_max, seen)


def _is_called(module: nn.Module) -> bool:
    """A container without a forward (ModuleList, ModuleDict, ParameterList) is never called itself."""
    return type(module).forward is not nn.Module.forward


def _holds_list(module: nn.Module) -> bool:
    return any(_is_list(m) and sum(1 for _ in children(m)) > 1 for m in modules(module))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))

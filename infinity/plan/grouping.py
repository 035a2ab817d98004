"""Which parameters travel together: param groups from the module tree.

A group is the largest module subtree that holds at most ``numel_max`` elements; elements of a ModuleList stay apart,
since a list is never called. Parameters not above the persistence threshold form groups of their own, which stay
unsharded; trainable and frozen parameters never share a group, so that frozen ones carry no optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMembers:
    params: tuple[nn.Parameter, ...]
    anchor: nn.Module | None
    """The module whose call uses the group; None for persistent groups."""
    trainable: bool
    persistent: bool


def group_params(model: nn.Module, *, numel_max: int, persistent_numel_max: int) -> list[GroupMembers]:
    """Every parameter of the model in exactly one group; a shared one belongs to the module that comes first."""
    seen: set[int] = set()
    persistent = [p for p in model.parameters() if p.numel() <= persistent_numel_max]
    seen.update(id(p) for p in persistent)
    groups = [g for anchor, params in _subtrees(model, numel_max, seen) for g in _by_training(params, anchor)]
    return [*_by_training(persistent, None), *groups]


def common_name(names: Sequence[str]) -> str:
    """The module that holds all parameters of these names, or the first and the last of them."""
    if len(names) == 1:
        return names[0]
    columns = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    return ".".join(shared) if shared else f"{names[0]} to {names[-1]}"


def _by_training(params: list[nn.Parameter], anchor: nn.Module | None) -> Iterator[GroupMembers]:
    for trainable in (True, False):
        members = tuple(p for p in params if p.requires_grad is trainable)
        if members:
            yield GroupMembers(params=members, anchor=anchor, trainable=trainable, persistent=anchor is None)


def _subtrees(module: nn.Module, numel_max: int, seen: set[int]) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    if _is_called(module):
        subtree = [p for p in module.parameters() if id(p) not in seen]
        if subtree and sum(p.numel() for p in subtree) <= numel_max and not _holds_list(module):
            seen.update(id(p) for p in subtree)
            yield module, subtree
            return
    own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
    if own:
        seen.update(id(p) for p in own)
        yield module, own
    for child in module.children():
        yield from _subtrees(child, numel_max, seen)


def _is_called(module: nn.Module) -> bool:
    """A container without a forward (ModuleList, ModuleDict, ParameterList) is never called itself."""
    return type(module).forward is not nn.Module.forward


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(m, (nn.ModuleList, nn.ModuleDict)) and len(m) > 1 for m in module.modules())

"""Calls of leaf modules: everything in a leaf is there for the whole of its forward and of its part of backward.

What a leaf calls inside depends on the data, and so would the gathers of each rank. They happen at its borders instead,
which every rank passes: when the leaf is called (its groups are anchored there), and in backward when the first
gradient of its outputs is there. The hold ends with the gradients of its inputs, or with backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.weights.param_group import ParamGroup


class LeafCalls:
    """Hooks on the leaves of a model.

    Args:
        groups_of: each leaf's groups.
        hold: have a group's weights here until they are released as often as they were held.
        release: the groups are not needed any more.
        complete: a backward has no more gradients for the group.
    """

    def __init__(
        self,
        groups_of: Mapping[nn.Module, Sequence[ParamGroup]],
        *,
        hold: Callable[[ParamGroup], None],
        release: Callable[[Sequence[ParamGroup]], None],
        complete: Callable[[ParamGroup], None],
    ) -> None:
        self._hold, self._release, self._complete = hold, release, complete
        self._pending: dict[nn.Module, set[_LeafCall]] = {leaf: set() for leaf in groups_of}
        """Calls whose backward has not passed."""
        self._held: list[_LeafCall] = []
        self._removable = [
            leaf.register_forward_hook(self._hook(leaf, groups), with_kwargs=True) for leaf, groups in groups_of.items()
        ]

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable.clear()

    def end_backward(self) -> None:
        """Nothing else tells that backward has passed a leaf whose inputs need no gradient, or has failed."""
        while self._held:
            self._let_go(self._held[-1])
        for calls in self._pending.values():
            calls.clear()

    def _hook(self, leaf: nn.Module, groups: Sequence[ParamGroup]) -> Callable[..., Any]:
        def called(_leaf: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            inputs = _differentiated((args, kwargs))
            output = _apart_from(inputs, output)
            outputs = _differentiated(output)
            if not outputs:
                return output
            call = _LeafCall(leaf, groups)
            if torch._C._current_autograd_node() is None:  # what is recomputed in backward is held by its first call
                self._pending[leaf].add(call)
            register_multi_grad_hook(outputs, lambda _gradient: self._begin(call), mode="any")
            if inputs:
                register_multi_grad_hook(inputs, lambda _gradients: self._passed(call))
            return output

        return called

    def _begin(self, call: _LeafCall) -> None:
        for group in call.groups:
            self._hold(group)
        self._held.append(call)

    def _passed(self, call: _LeafCall) -> None:
        """The gradients of the call's inputs are there."""
        if call not in self._held:
            return
        self._let_go(call)
        pending = self._pending[call.leaf]
        if call in pending:
            pending.discard(call)
            if not pending:  # no gradient comes any more: a parameter without one counts as zero
                for group in call.groups:
                    if group.placement.trainable:
                        self._complete(group)

    def _let_go(self, call: _LeafCall) -> None:
        self._held.remove(call)
        self._release(call.groups)


class _LeafCall:
    __slots__ = ("groups", "leaf")

    def __init__(self, leaf: nn.Module, groups: Sequence[ParamGroup]) -> None:
        self.leaf, self.groups = leaf, groups


def _apart_from(inputs: Sequence[torch.Tensor], output: Any) -> Any:
    """``output``; an input that was passed through, because nothing was called, gets a place in the graph of its own:
    two leaves in a row would else share it, and backward would enter the first before the second."""
    # held: a node that nobody holds in Python is another object the next time
    places = {id(place): place for place in map(_place_of, inputs)}

    def apart(value: torch.Tensor) -> torch.Tensor:
        return value.clone() if id(_place_of(value)) in places else value

    return tree_map_only(torch.Tensor, apart, output)


def _place_of(value: torch.Tensor) -> object:
    """In the graph: the node that made it, or the tensor itself."""
    return value if value.grad_fn is None else value.grad_fn


def _differentiated(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor) and value.requires_grad]

"""*When* groups are used: module calls in forward, saved tensors in backward, and any other access in between.

Three nets, from coarse to fine, so that every model works without being told to us:

1. Forward hooks on each module that owns parameters, or anchors a group: the usual path.
2. ``AccessGuard``, a TorchFunctionMode: an operation on a parameter that is not unsharded (a tied head, a parent
   that uses ``self.child.weight``) unshards it first, and the innermost running module counts as its user.
3. Saved-tensor hooks: when a backward node unpacks a view of a parameter, its group is unsharded at that moment and
   counts as in use until another node runs. Outputs need no hooks, so any output type works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from infinity.states import ShardedState
from infinity.weights.live_set import LiveSet
from infinity.weights.param_group import ParamGroup

_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "itemsize",
    "requires_grad",
    "grad",
    "grad_fn",
    "is_leaf",
    "is_cuda",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_nested",
    "is_mkldnn",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "get_device",
    "__hash__",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
)
METADATA = frozenset(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES) | frozenset(
    getattr(torch.Tensor, name) for name in _METHODS
)
"""What may be asked of a parameter without its weights."""

unguarded = torch._C.DisableTorchFunction
"""Around the engine's own work on parameters, which must not be taken for a use of them."""


class AccessGuard(TorchFunctionMode):
    """Calls ``touch`` with the managed parameters that an operation takes, before it runs."""

    def __init__(
        self, is_managed: Callable[[nn.Parameter], bool], touch: Callable[[Sequence[nn.Parameter]], None]
    ) -> None:
        super().__init__()
        self._is_managed, self._touch = is_managed, touch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in METADATA:
            found: list[nn.Parameter] = []
            self._collect(args, found)
            if kwargs:
                self._collect(kwargs.values(), found)
            if found:
                self._touch(found)
        return func(*args, **(kwargs or {}))

    def _collect(self, values: Iterable[Any], found: list[nn.Parameter]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                if self._is_managed(value):
                    found.append(value)
            elif isinstance(value, (list, tuple)):
                self._collect(value, found)


class ModuleHooks:
    """Registers the hooks on a model and translates what they see into uses of param groups."""

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        anchors: Mapping[nn.Module, Sequence[ParamGroup]],
        live_set: LiveSet,
        on_gradient: Callable[[ParamGroup], None],
    ) -> None:
        self._live_set = live_set
        self._groups = groups
        self._group_of = {id(param.param): group for group in groups for param in group.params}
        self._group_of_storage = {param.storage_key: group for group in groups for param in group.params}
        self._calls: list[list[ParamGroup]] = []
        self._node: object = None
        self._node_groups: list[ParamGroup] = []
        self._in_backward = False
        self._guard = AccessGuard(self._is_sharded, self._touch)
        self._removable: list[Any] = []
        for module in model.modules():
            used = dict.fromkeys(anchors.get(module, ()))
            used |= dict.fromkeys(self._group_of[id(p)] for p in module.parameters(recurse=False))
            if used or module is model:
                self._hook_module(module, list(used))
        for group in groups:
            for param in group.params if group.placement.trainable else ():
                hook = self._gradient_hook(group, on_gradient)
                self._removable.append(param.param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
        self._removable.clear()

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._guard, torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        self._in_backward = True
        try:
            with self.forward():
                yield
        finally:
            self._in_backward = False

    def reset(self) -> None:
        """After an exception, or at the end of backward: no module call is in progress."""
        self._calls.clear()
        self._leave_node()
        for group in self._groups:
            group.forget_users()

    def release(self, group: ParamGroup) -> None:
        """All gradients of the group are reduced: backward has passed it."""
        group.held_for_backward = False
        self._live_set.done(group)

    def _hook_module(self, module: nn.Module, used: list[ParamGroup]) -> None:
        frozen = [group for group in used if not group.placement.trainable]

        def enter(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            call: list[ParamGroup] = []
            self._calls.append(call)
            with unguarded():
                for group in used:
                    self._begin(group, call)
                if frozen:
                    self._watch_inputs(frozen, (args, kwargs))

        def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self._calls:
                output = self._detach_from_weights(output)
                with unguarded():
                    for group in self._calls.pop():
                        self._end(group)
            return output

        self._removable.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._removable.append(module.register_forward_hook(leave, always_call=True))

    def _detach_from_weights(self, output: Any) -> Any:
        """``output`` with views of weights replaced by copies: their memory goes when the group is resharded."""
        leaves = tree_leaves(output)
        if not any(isinstance(x, torch.Tensor) and self._owner(x) is not None for x in leaves):
            return output
        return tree_map_only(torch.Tensor, lambda x: x if self._owner(x) is None else x.clone(), output)

    def _watch_inputs(self, frozen: list[ParamGroup], arguments: Any) -> None:
        """Frozen parameters get no gradient to tell that backward has passed them; the call's inputs do."""
        inputs = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor) and x.requires_grad]

        def passed(_gradients: Sequence[torch.Tensor | None]) -> None:
            with unguarded():
                for group in frozen:
                    self.release(group)

        if inputs and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(inputs, passed)

    def _begin(self, group: ParamGroup, call: list[ParamGroup]) -> None:
        self._live_set.use(group)
        group.num_users += 1
        call.append(group)

    def _end(self, group: ParamGroup) -> None:
        group.num_users -= 1
        if self._in_backward:
            group.held_for_backward = True
        self._live_set.done(group)

    def _is_sharded(self, param: nn.Parameter) -> bool:
        group = self._group_of.get(id(param))
        return group is not None and group.state is not ShardedState.UNSHARDED

    def _touch(self, params: Sequence[nn.Parameter]) -> None:
        for group in dict.fromkeys(self._group_of[id(param)] for param in params):
            if self._calls:
                self._begin(group, self._calls[-1])
            else:
                self._live_set.use(group)
                self._live_set.linger(group)

    def _gradient_hook(
        self, group: ParamGroup, on_gradient: Callable[[ParamGroup], None]
    ) -> Callable[[torch.Tensor], None]:
        def accumulated(_param: torch.Tensor) -> None:
            with unguarded():
                self._leave_node()
                on_gradient(group)

        return accumulated

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | tuple[ParamGroup, torch.Tensor]:
        group = self._owner(tensor)
        return tensor if group is None else (group, tensor)

    def _owner(self, tensor: torch.Tensor) -> ParamGroup | None:
        """The group whose weights the tensor is a view of."""
        if tensor.layout is not torch.strided:
            return None
        return self._group_of_storage.get(tensor.untyped_storage()._cdata)

    def _unpack(self, packed: torch.Tensor | tuple[ParamGroup, torch.Tensor]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        group, tensor = packed
        node = torch._C._current_autograd_node()
        with unguarded():
            if node is None or node is not self._node:
                self._leave_node()
                self._node = node
            group.held_by_node = True
            self._node_groups.append(group)
            self._live_set.use(group)
            self._live_set.linger(group)
        return tensor

    def _leave_node(self) -> None:
        """The node that unpacked last is done, since another one runs: nothing it unpacked is in use by it."""
        for group in self._node_groups:
            group.held_by_node = False
        self._node_groups.clear()
        self._node = None

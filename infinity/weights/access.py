"""What a parameter is while an engine, or ``Init``, has its weights: a class that asks its owner before it is used.

Python looks up a tensor's ``__torch_function__`` on its class, so a parameter changes hands by ``param.__class__ = …``
and stays the same object, with the same ties and references:

======================  ===============================================================================================
``ShardedParameter``    the weights are elsewhere; every operation, in any thread, inside backward and out of lists of
                        weights, comes here first, and the owner lends the weights to it, or refuses by name
``UnshardedParameter``  the weights are here; operations run as on any parameter, without a detour. Only what would
                        escape the owner's notice (``.data``, ``.grad``, copies) is answered in Python
``LentParameter``       the same of weights that leave again: their casts are known, too (``casts``)
``nn.Parameter``        nobody's but the user's
======================  ===============================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from infinity.weights import casts, placeholder
from infinity.weights.ds_names import MAKING_A_PARAMETER, DsNames, ZeroParamStatus, partitioning_owner_of
from infinity.weights.owners import (
    Owner,
    become,
    known_owner_of,
    refuse_memory,
    refuse_pickle,
    refuse_remake,
    refuse_write,
    users_class,
)

raw = torch._C.DisableTorchFunctionSubclass
"""Around an owner's own work on parameters, which must not be taken for a use of them."""


def _callables(names: str) -> frozenset[Any]:
    """How ``__torch_function__`` names a method, or a property's getter."""
    found = (getattr(torch.Tensor, name, None) for name in names.split())
    return frozenset(attribute if callable(attribute) else attribute.__get__ for attribute in found if attribute)


METADATA: Final = _callables(
    """
    shape dtype device ndim itemsize nbytes requires_grad grad_fn is_leaf is_cuda is_cpu is_xpu is_mps is_sparse
    is_sparse_csr is_quantized is_meta is_nested is_mkldnn names name _version _base _backward_hooks retains_grad
    size dim numel nelement element_size is_floating_point is_complex get_device __hash__ __len__ requires_grad_
    register_hook register_post_accumulate_grad_hook retain_grad is_inference has_names
    """
)
"""What a placeholder answers truly."""
LAYOUT: Final = _callables("stride is_contiguous storage_offset layout is_pinned is_shared is_conj is_neg")
"""What only the owner knows: how the weights lie when they are here."""
MEMORY: Final = _callables(
    """
    data_ptr const_data_ptr untyped_storage storage _typed_storage share_memory_ __dlpack__ resize_ resize_as_
    pin_memory _use_count _is_view
    """
)
"""What reaches past the tensor into memory that is given back."""

_tensor_base: Any = torch._C.TensorBase
_get_grad, _set_grad = _tensor_base.grad.__get__, _tensor_base.grad.__set__
_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


def show(param: nn.Parameter, weights: torch.Tensor, *, stays: bool = True) -> None:
    """From now on the parameter is ``weights``, in ``weights``' own memory. ``stays``: until further notice."""
    become(param, UnshardedParameter if stays else LentParameter)
    placeholder.put(param, weights)


def hide(param: nn.Parameter, stand_in: torch.Tensor) -> None:
    """The weights leave, ``placeholder.make`` made what stands for them: every use asks the owner, from now on."""
    become(param, UnshardedParameter)  # whatever it was: setting its data must not ask anybody
    placeholder.put(param, stand_in)
    become(param, ShardedParameter)


def take_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """What autograd has accumulated; the parameter has none any more."""
    with raw():
        gradient: torch.Tensor | None = _get_grad(param)
        _set_grad(param, None)
    return gradient


def own_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """What autograd accumulated and nobody took, asked by the owner."""
    with raw():
        gradient: torch.Tensor | None = _get_grad(param)
    return gradient


def put_gradient(param: nn.Parameter, gradient: torch.Tensor) -> None:
    """The owner's way of ``param.grad = gradient``, with torch's own checks."""
    with raw():
        _set_grad(param, gradient)


def drop_gradient(param: nn.Parameter) -> None:
    """The owner's way of ``param.grad = None``."""
    with raw():
        _set_grad(param, None)


class OwnedParameter(DsNames):
    """What holds wherever the weights are: a copy of the parameter would not be it, and other memory not its own."""

    def set_(self, *source: Any, **kwargs: Any) -> Any:
        """Torch asks no ``__torch_function__`` about it."""
        return _set(self, *source, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), known_owner_of(self).copy(self))

    def __reduce_ex__(self, _protocol: Any) -> Any:
        refuse_pickle(known_owner_of(self), self)


class UnshardedParameter(OwnedParameter):
    """The weights are here, for the length of a module's call, or for good."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super(OwnedParameter, self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def ds_status(self) -> ZeroParamStatus:
        """The weights are in memory now."""
        partitioning_owner_of(self)
        return ZeroParamStatus.AVAILABLE

    @property
    def data(self) -> torch.Tensor:
        """The weights without their history. What is written to it shows in the version counter, unlike torch's."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _set_data(self, value)

    def detach(self) -> torch.Tensor:
        """Torch's, unless ``nn.Parameter(param)`` asks."""
        if sys._getframe(1).f_code is MAKING_A_PARAMETER:
            refuse_remake(known_owner_of(self), self)
        return super().detach()

    @property
    def grad(self) -> torch.Tensor | None:
        """The owner answers, who takes gradients away as they appear."""
        return known_owner_of(self).gradient_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        known_owner_of(self).set_gradient(self, value)


class LentParameter(UnshardedParameter):
    """The weights are here for a while. (Not of those that stay: torch.compile would break its graphs at a cast.)"""


class _Elsewhere:
    """What stands for weights that are elsewhere: answers what it can, and has the weights lent for the rest."""

    __slots__ = ()

    def as_subclass(self: Any, cls: Any) -> Any:
        """Torch asks no ``__torch_function__`` about it."""
        return self.view_as(self).as_subclass(cls)

    answers: ClassVar[Mapping[Any, Callable[..., Any]]]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in METADATA:
            with raw():
                return func(*args, **(kwargs or {}))
        if (answer := cls.answers.get(getattr(func, "__wrapped__", func))) is not None:  # some are, see ``arrays``
            return answer(*args, **(kwargs or {}))
        return lend(func, args, kwargs or {})


class ShardedParameter(_Elsewhere, OwnedParameter):
    """The weights are elsewhere; see ``placeholder`` for what C++ finds."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, sharded=True)"


def _casting(name: str) -> Callable[..., Any]:
    @wraps(getattr(torch.Tensor, name))
    def cast(param: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        return casts.noted(getattr(users_class(param), name)(param, *args, **kwargs))

    return cast


for _method in casts.CASTING:
    for _kind in (LentParameter, ShardedParameter):
        setattr(_kind, _method, _casting(_method))


class ShardedAlias(_Elsewhere, torch.Tensor):
    """``param.detach()`` or ``param.data`` of a sharded parameter: lends the weights of the day to every operation.

    So it says what torch's alias would say after any number of updates, and costs nothing while nobody reads it.
    """

    _param: nn.Parameter
    _unreadable: bool

    @staticmethod
    def of(param: nn.Parameter) -> ShardedAlias:
        with raw(), placeholder.unasked():
            alias = torch.Tensor._make_subclass(ShardedAlias, _tensor_base.detach(param))
        alias._param, alias._unreadable = param, False
        return alias

    @property
    def param(self) -> nn.Parameter:
        return self._param

    def make_unreadable(self) -> ShardedAlias:
        """From now on the weights are not lent, but refused: as an entry of a state dict."""
        self._unreadable = True
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, sharded=True)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), self.clone())

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_pickle(known_owner_of(self._param), self._param)


def lend(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` with the weights of every sharded parameter, or alias of one, among its arguments."""
    leaves = tree_leaves((args, dict(kwargs)))
    params: dict[int, nn.Parameter] = {}
    aliases: dict[int, ShardedAlias] = {}
    for leaf in leaves:
        if (param := param_behind(leaf)) is not None:
            params[id(param)] = param
            if leaf is not param:
                aliases[id(leaf)] = leaf
    by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in params.values():
        owner = known_owner_of(param)
        by_owner.setdefault(id(owner), (owner, []))[1].append(param)
    if not by_owner:
        raise TypeError(f"{_name(func)} takes a sharded parameter where it is not found: pass it as an argument")
    _refuse_what_cannot_be_lent(func, args, params, aliases)
    with ExitStack() as loans:
        for owner, owned in by_owner.values():
            loans.enter_context(owner.borrow(owned))
        lent = {key: alias.param.detach() for key, alias in aliases.items()}
        if lent:
            args, kwargs = _replaced(args, lent), _replaced(dict(kwargs), lent)
        result = _kept_readable(func(*args, **kwargs), params)
        del args, kwargs, lent  # an owner keeps weights in memory of which somebody has an alias when the loan ends
    return result


def _refuse_what_cannot_be_lent(
    func: Any, args: Sequence[Any], params: Mapping[int, nn.Parameter], aliases: Mapping[int, ShardedAlias]
) -> None:
    """Raise WeightsError before anything is done."""
    for alias in aliases.values():
        if alias._unreadable:
            known_owner_of(alias.param).refuse(
                alias.param,
                "is sharded: its entry in a state dict holds no weights",
                "read engine.full_state_dict() instead, or ask inside GatheredParameters(model.parameters())",
            )
    if getattr(func, "__wrapped__", func) in MEMORY:
        param = next(iter(params.values()))
        refuse_memory(known_owner_of(param), param, _name(func))
    if _writes(func) and args:
        for leaf in tree_leaves(args[0]):
            target = _param_of(leaf)
            if id(target) in params:
                owner = known_owner_of(target)
                if not owner.keeps_writes:
                    refuse_write(owner, target)


def _writes(func: Any) -> bool:
    """Whether the function is known to write to its first argument; what is not shows in the version counter."""
    name = _name(func)
    if name.startswith("__"):
        return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__ipow__")
    return name.endswith("_")


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def param_behind(tensor: torch.Tensor) -> nn.Parameter | None:
    """The parameter that a tensor is, or is an alias of, as the classes here know it."""
    return _param_of(tensor) if isinstance(tensor, _Elsewhere) else None


def _replaced(structure: Any, lent: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(structure, ShardedAlias):
        return lent[id(structure)]
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_replaced(part, lent) for part in structure))
    if isinstance(structure, (list, tuple)):
        return type(structure)(_replaced(part, lent) for part in structure)
    if isinstance(structure, dict):
        return {key: _replaced(value, lent) for key, value in structure.items()}
    return structure


def _kept_readable(result: Any, params: Mapping[int, nn.Parameter]) -> Any:
    """What C++ takes inside backward must hold its weights itself (``save_on_cpu`` may return the parameter), and an
    array of numpy's, which cannot show that it was written to, must not be written to."""
    inside_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: made again
    if isinstance(result, nn.Parameter) and id(result) in params and inside_backward:
        return result.detach()
    if type(result).__module__ == "numpy" and hasattr(result, "setflags"):
        result.setflags(write=False)
    return result


def _param_of(tensor: torch.Tensor) -> nn.Parameter:
    return tensor.param if isinstance(tensor, ShardedAlias) else tensor  # type: ignore[return-value]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of a sharded parameter, or an alias, its weights. Raises WeightsError where they cannot be kept."""
    if not isinstance(tensor, _Elsewhere):
        return tensor
    param = _param_of(tensor)
    owner = known_owner_of(param)
    if not owner.keeps_writes:
        refuse_remake(owner, param)
    with owner.borrow([param]):
        return param.detach()


class StorageElsewhere:
    """What ``untyped_storage()`` of a state dict's entry without weights gives: a storage of its own, without a byte.

    So ``save_pretrained(is_main_process=False)``, which tells entries apart before it writes none of them, goes on.
    """

    def __init__(self, entry: ShardedAlias) -> None:
        self.device, self._entry = entry.device, entry

    def data_ptr(self) -> int:
        """No address: a number that no other entry has, also of a tied weight."""
        return id(self._entry)

    def nbytes(self) -> int:
        return self._entry.nbytes


def _storage(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, ShardedAlias) and tensor._unreadable:
        return StorageElsewhere(tensor)
    return lend(placeholder.storage_of, (tensor,), {})


def _layout(func: Any) -> Callable[..., Any]:
    def answer(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        param = _param_of(tensor)
        return func(known_owner_of(param).layout_of(param), *args, **kwargs)

    return answer


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    param = _param_of(tensor)
    owner = known_owner_of(param)
    if sys._getframe(2).f_code is MAKING_A_PARAMETER:  # behind __torch_function__
        if param is not tensor:
            refuse_remake(owner, param)
        return owner.remake(param)
    return owner.alias(param)


def _set(tensor: torch.Tensor, *source: Any, **kwargs: Any) -> torch.Tensor:
    """``param.set_(values)``, as parametrizations write to what they replace."""
    param = _param_of(tensor)
    owner = known_owner_of(param)
    value = source[0] if len(source) == 1 and not kwargs else None
    if not isinstance(value, torch.Tensor):
        refuse_memory(owner, param, "set_")
    if _param_of(value) is param:  # so a parametrization sets what it replaces, when it is registered
        owner.set_to_itself(param)
        return tensor
    if not owner.keeps_writes:
        refuse_memory(owner, param, "set_")
    _set_data(param, value)
    return tensor


def _set_data(param: nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(param, ShardedAlias):
        refuse_write(known_owner_of(param.param), param.param)
    if _param_of(value) is not param:  # as Module.to assigns what it left as it was
        known_owner_of(param).set_data(param, value)


def watch_data(data: Any) -> None:
    """``data`` is torch's descriptor from now on: torch asks by it."""
    tensors: Any = torch.Tensor
    tensors.data = data
    for asked in (ShardedAlias, ShardedParameter):
        asked.answers = {**asked.answers, data.__get__: _alias, data.__set__: _set_data}


ShardedAlias.answers = {
    _DATA.__get__: _alias,
    _DATA.__set__: _set_data,
    torch.Tensor.detach: _alias,
    placeholder.storage_of: _storage,
    **{func: _layout(func) for func in LAYOUT},
}
ShardedParameter.answers = {
    **ShardedAlias.answers,
    _GRAD.__get__: lambda param: known_owner_of(param).gradient_of(param),
    _GRAD.__set__: lambda param, value: known_owner_of(param).set_gradient(param, value),
    _GRAD.__delete__: lambda param: known_owner_of(param).set_gradient(param, None),
}

"""What autograd keeps for backward: of weights a note where to find them, of everything else the tensor itself.

A node that saves ``weight.t()`` would keep the weights of the whole model alive. So while a module is called the hooks
below replace every view of sharded weights by its place in them; when backward asks for it, the owner brings the
weights back and the view is made anew. It holds their memory itself: nobody need know when the node is done with it.

Torch checks saved tensors for writes in between only where nobody hooks them; so the checks are repeated here. Torch's
own ``save_on_cpu``, where it stands outside, goes on seeing everything but the weights; hooks of the user's see all of
it, see ``beside_user_hooks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import WeightsError
from infinity.weights import casts, placeholder, transforms
from infinity.weights.owners import of_kind, users_class
from infinity.weights.param import ShardedParam

_torchs_save: Any = FunctionCtx.save_for_backward
_torchs_saved: Any = BackwardCFunction.saved_tensors
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class SavedWeights(NamedTuple):
    """A view of a parameter's weights as they were at that age."""

    param: ShardedParam
    age: tuple[int, int]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class SavedCast(NamedTuple):
    """A view of the weights cast to another dtype, as autocast makes it."""

    weights: SavedWeights
    """The weights of the whole parameter."""
    cast: casts.Cast
    written: torch.Tensor
    """Empty, with the cast's count of writes: one after this would be lost where the weights are cast anew."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


class SavedTensor(NamedTuple):
    tensor: torch.Tensor
    version: int | None
    """None: a view of a parameter, whose version says more than whether somebody wrote to it."""

    def back(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError, as torch would, if somebody has written to it since."""
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; expected "
                f"version {self.version} instead"
            )
        return self.tensor


class SavedByUser(NamedTuple):
    """What the user's own hook made of a tensor."""

    packed: Any


class SavedTensors:
    """``params``: by id of the ``nn.Parameter``. ``resident``: those whose weights are here, by storage. ``bring``: has
    a parameter's weights here, and gives them. ``note_casts``: hears of parameters that autocast has cast."""

    def __init__(
        self,
        params: Mapping[int, ShardedParam],
        resident: dict[int, ShardedParam],
        bring: Callable[[ShardedParam], torch.Tensor],
        note_casts: Callable[[Iterable[ShardedParam]], None],
    ) -> None:
        self._params, self._resident, self._bring, self._note_casts = params, resident, bring, note_casts
        watch_contexts()

    def around_call(self) -> AbstractContextManager[None]:
        """Hooks for a call of a module from outside, or for one operation."""
        top = _top()
        if top is not None and self._is_own(top[0]):
            return nullcontext()
        if top is None or _gives_back_what_it_took(top[0]):
            return saved_tensors_hooks(_Pack(self, top), self._unpacker(top))
        return self.beside_user_hooks()

    def end(self) -> None:
        """Nothing is a view of weights any more. Hooks that an interrupt has left on the stack pass all on."""
        self._params, self._resident = {}, {}

    def _is_own(self, pack: Any) -> bool:
        """Whether the hook is this owner's: inside a model another engine's may be called, whose weights are its."""
        return isinstance(pack, _Pack | _PackForUser) and pack.owner is self

    def beside_user_hooks(self) -> AbstractContextManager[None]:
        """Inside hooks that the user put around the model or a part of it (or checkpointing did), theirs see every
        tensor: what they do to it, as rounding, they do to weights in plain torch, too.

        Only for a parameter itself they get an alias, since what they keep of it must not be hidden again. What
        they make of weights, if it is still a view of them, is noted instead: a node that nobody asks any more would
        keep it (checkpointing's, of a recomputed output that a module keeps; or one that torch never frees, since what
        such hooks keep of its output holds the node).
        """
        top = _top()
        if top is None or self._is_own(top[0]):
            return nullcontext()
        if isinstance(top[0], _Pack | _PackForUser):
            return self.around_call()
        unpack = top[1]
        return saved_tensors_hooks(_PackForUser(self, top[0]), lambda packed: unpack(self._viewed(packed)))

    def _unpacker(self, outer: Hooks | None) -> Callable[[Any], torch.Tensor]:
        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, SavedTensor):
                return packed.back()
            if isinstance(packed, SavedWeights):
                return self._view(packed)
            if isinstance(packed, SavedCast):
                if packed.written._version:
                    raise _written_cast(packed)
                return self._cast_of(packed).as_strided(packed.size, packed.stride, packed.offset)
            if outer is None:
                raise AssertionError(f"{type(packed).__name__} was packed by nobody")
            return outer[1](packed.packed)

        return unpack

    def _viewed(self, packed: Any) -> Any:
        """What ``_PackForUser`` was given, with weights where it has noted some."""
        if isinstance(packed, SavedWeights):
            return self._view(packed)
        if type(packed) is tuple and any(isinstance(part, SavedWeights) for part in packed):
            return tuple(map(self._viewed, packed))
        return packed

    @transforms.apart
    def _view(self, saved: SavedWeights) -> torch.Tensor:
        param = saved.param
        weights = self._bring(param)
        if param.age != saved.age:
            raise stale_weights(param.name)
        return param.counting(weights).as_strided(saved.size, saved.stride, saved.offset)

    @transforms.apart
    def _cast_of(self, saved: SavedCast) -> torch.Tensor:
        """All of the cast: the one that somebody may have written to, or another."""
        if saved.cast.memory is None:
            return self._view(saved.weights).to(saved.dtype)
        return torch.empty(0, dtype=saved.dtype, device=saved.cast.memory.device).set_(saved.cast.memory)

    def note_of(self, tensor: torch.Tensor) -> SavedWeights | None:
        """Where the tensor is a view of weights."""
        param = self.find(tensor)
        if param is None:
            return None
        return SavedWeights(param, param.note_saved(), tensor.size(), tensor.stride(), tensor.storage_offset())

    def find(self, tensor: torch.Tensor) -> ShardedParam | None:
        """The parameter whose weights, of its own dtype, the tensor is a view of."""
        if tensor.layout is not torch.strided:
            return None
        try:
            param = self._resident.get(placeholder.identity_of(tensor))
        except RuntimeError:  # a tensor without a storage: a wrapper of the user's
            return None
        if param is None or tensor.dtype is not param.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return param

    def find_cast(self, whole: torch.Tensor) -> ShardedParam | None:
        """The parameter that ``whole`` is a cast of, as it lies."""
        param = None if whole._version else self._params.get(id(casts.source_of(whole)))
        if param is None or whole.device != param.device or whole.stride() != param.layout.stride():
            return None
        return param


@cache
def watch_contexts() -> None:
    """Torch gives a custom function what it saved back, the very objects; where hooks are, tensors that Python knows
    nothing of. For the life of the process they have what was set on what they were saved as, and its class if that was
    a parameter. (They are not the parameter, whose memory may be elsewhere when compiled code asks for it.)"""
    contexts: Any = FunctionCtx
    contexts.save_for_backward = _save
    BackwardCFunction.saved_tensors = property(_saved, doc=_torchs_saved.__doc__)  # type: ignore[assignment]


@wraps(_torchs_save)
def _save(context: Any, *tensors: torch.Tensor | None) -> None:
    context._given_to_save = [
        tensor if isinstance(tensor, nn.Parameter) else getattr(tensor, "__dict__", None) for tensor in tensors
    ]
    _torchs_save(context, *tensors)


def _saved(context: Any) -> Any:
    saved = _torchs_saved.__get__(context)
    for tensor, given in zip(saved, getattr(context, "_given_to_save", ()), strict=False):
        if given is None or type(tensor) is not torch.Tensor or transforms.is_inside():
            continue
        if isinstance(given, nn.Parameter):
            _pass_for(tensor, given)
        else:
            tensor.__dict__ = given
    return saved


class _Passing(nn.Parameter):
    """A tensor that the user takes for a parameter whose weights it has: what it says of the gradient, and does to it
    or to ``data``, is the parameter's."""

    _users_class: ClassVar[type[nn.Parameter]] = nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's."""
        return _passing_for(self).grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _passing_for(self).grad = value

    @property
    def data(self) -> torch.Tensor:
        """Its own, which are the parameter's weights."""
        own: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return own

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _passing_for(self).data = value


_passed_for: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _passing_for(tensor: torch.Tensor) -> nn.Parameter:
    param: nn.Parameter = _passed_for[tensor]
    return param


def _pass_for(tensor: torch.Tensor, param: nn.Parameter) -> None:
    """The user takes ``tensor`` for the parameter from now on, whose attributes are there, too."""
    _passed_for[tensor] = param
    tensor.__class__, tensor.__dict__ = of_kind(_Passing, users_class(param)), param.__dict__


def stale_weights(name: str) -> WeightsError:
    """The error of a backward that needs weights which are no more."""
    return WeightsError(
        name,
        "is needed for gradient computation and has been modified by an inplace operation, the optimizer's update or a "
        "write after that forward",
        "call backward before step() and before the write, or forward again",
    )


def _written_cast(saved: SavedCast) -> WeightsError:
    """The error of a backward that needs a cast of weights which is to be made anew, and was written to."""
    return WeightsError(
        saved.weights.param.name,
        f"was cast to {saved.dtype}, and the cast was changed in place after forward had saved it",
        "change the cast before its first use, or a copy of it, .clone()",
    )


class _Pack:
    """The pack hook; a class, so that it is recognised on the stack of hooks."""

    def __init__(self, owner: SavedTensors, outer: Hooks | None) -> None:
        self.owner, self._outer = owner, outer
        self._first_node: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        """What this thread will number the next node of its graphs."""

    def __call__(self, tensor: torch.Tensor) -> SavedWeights | SavedCast | SavedTensor | SavedByUser:
        if (whole := self.owner._params.get(id(tensor))) is not None:
            return SavedWeights(whole, whole.note_saved(), whole.layout.size(), whole.layout.stride(), 0)
        if (note := self.owner.note_of(tensor)) is not None:
            return note
        if (cast := self._cast(tensor)) is not None:
            return cast
        if self._outer is not None:
            return SavedByUser(self._outer[0](tensor))
        if tensor._base is not None and id(tensor._base) in self.owner._params:
            return SavedTensor(_alias(tensor), None)  # a view of weights that are gone by now: it keeps their memory
        # an output would hold the node that saves it, and so itself: its alias holds no history, but the same counter
        return SavedTensor(tensor if tensor.grad_fn is None else _alias(tensor), tensor._version)

    def _cast(self, tensor: torch.Tensor) -> SavedCast | None:
        """What autocast, or the model, made of weights: cast again in backward, it need not be kept.

        (Inside an operation that casts, torch says that autocast is off.)
        """
        if tensor.grad_fn is None or tensor.is_meta:
            return None
        whole = tensor._base if tensor._base is not None else tensor
        param = self.owner.find_cast(whole)
        if param is None or tensor.dtype is not whole.dtype:  # as by ``view_as_complex``: other elements
            return None
        node = whole.grad_fn
        if node is None or node._sequence_nr() < self._first_node:  # of weights that were updated since?
            return None
        cast = casts.to_be_made_again(whole)
        if cast is None:
            return None
        self.owner._note_casts((param,))
        weights = SavedWeights(param, param.note_saved(), param.layout.size(), param.layout.stride(), 0)
        lies = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return SavedCast(weights, cast, _count_of(whole), tensor.dtype, *lies)


class _PackForUser:
    """What the user's hooks stand for inside a call."""

    def __init__(self, owner: SavedTensors, pack: Callable[[torch.Tensor], Any]) -> None:
        self.owner, self._pack = owner, pack

    def __call__(self, tensor: torch.Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            param, tensor = tensor, _alias(tensor).requires_grad_(tensor.requires_grad)
            _pass_for(tensor, param)
        packed = self._pack(tensor)
        if type(packed) is not tuple:
            return self._noted(packed)
        noted = tuple(map(self._noted, packed))  # as torch's ``save_on_cpu`` gives, which keeps what is there already
        return noted if any(isinstance(part, SavedWeights) for part in noted) else packed

    def _noted(self, packed: Any) -> Any:
        note = self.owner.note_of(packed) if isinstance(packed, torch.Tensor) else None
        return packed if note is None else note


@transforms.apart
def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history; to a mode of the user's it is no operation."""
    return torch.Tensor.detach(tensor)


@transforms.apart
def _count_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that shares the given one's count of writes."""
    count = tensor.detach()
    placeholder.put(count, tensor.new_empty(0))
    return count


@contextmanager
def stale_graphs_named(name: str) -> Iterator[None]:
    """Torch's own check, in our words: what a backward of the module ``name`` needs was written to, by an update or by
    the user, after forward saved it."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WeightsError) or "modified by an inplace operation" not in str(error):
            raise
        raise WeightsError(
            name,
            f"cannot be differentiated: {str(error).partition(' Hint:')[0].rstrip('.')}",
            "call backward before step(), and forward again after it; write to nothing that forward saved",
        ) from error


def hooks_are_allowed() -> bool:
    """Whether nobody has switched saved-tensor hooks off in this thread."""
    autograd: Any = torch._C._autograd
    return bool(autograd._saved_tensors_hooks_is_enabled())


def _top() -> Hooks | None:
    top: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top


def _gives_back_what_it_took(pack: Any) -> bool:
    """Whether the hook's tensors are known to come back as they were, as ``save_on_cpu`` has it: weights need not go
    through it. Checkpointing compares what its forward and its recomputation save, so it must see the same in both; and
    a user's may round what it sees, weights too, or count it."""
    return getattr(pack, "__module__", "").startswith(("torch.autograd.", __name__))

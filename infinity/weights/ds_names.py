"""The dialect's attributes of sharded parameters: ``ds_id``, ``ds_shape``, ``all_gather`` … A parameter that nobody
shards has none of them, nor has one of an engine below stage 3, which is how scripts tell them apart."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.weights.owners import Owner, known_owner_of


class ZeroParamStatus(Enum):
    """Whether a parameter's weights are in memory now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_ids: WeakIdKeyDictionary = WeakIdKeyDictionary()
_next_id: Final = itertools.count()
_held: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""What ``all_gather`` opened and ``partition`` closes, by parameter."""
MAKING_A_PARAMETER: Final = nn.Parameter.__new__.__code__
"""Detaches what it is given, and raises a RuntimeError unless that is of the same class."""


def partitioning_owner_of(param: nn.Parameter) -> Owner:
    """The owner that shards the parameter. Raises AttributeError if it keeps the weights whole."""
    owner = known_owner_of(param)
    if not owner.shards_weights:
        raise AttributeError("weights stay whole below stage 3: the parameter has no attributes of a sharded one")
    return owner


class DsNames(nn.Parameter):
    """A parameter with the dialect's attributes, which its owner answers."""

    _users_class: ClassVar[type[nn.Parameter]] = nn.Parameter
    """See ``owners.users_class``."""

    def _owner(self) -> Owner:
        return partitioning_owner_of(self)

    @property
    def ds_id(self) -> int:
        """A number of this parameter's own."""
        self._owner()
        if self not in _ids:
            _ids[self] = next(_next_id)
        return int(_ids[self])

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        self._owner()
        return self.numel()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        self._owner()
        return self.shape

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the weights are in memory now."""
        self._owner()
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's part of the weights, 1-D, on the CPU; a copy, read from the store."""
        return self._owner().shard_of(self)

    @property
    def ds_persist(self) -> bool:
        """Whether the weights stay in memory between uses."""
        return self._owner().is_persistent(self)

    def partition_numel(self) -> int:
        """Elements of each rank's part, in the dialect's division: the last one may be padded."""
        self._owner()
        return -(-self.numel() // (dist.get_world_size() if dist.is_initialized() else 1))

    def ds_summary(self, slice_shape: bool = False, use_debug_name: bool = False) -> dict[str, Any]:
        """The above in one dict; the arguments are the dialect's and change nothing."""
        return {
            "id": self.ds_id,
            "status": self.ds_status.name,
            "numel": self.ds_numel,
            "shape": tuple(self.ds_shape),
            "requires_grad": self.requires_grad,
            "persist": self.ds_persist,
        }

    def all_gather(
        self, param_list: Sequence[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
    ) -> None:
        """Have the weights in memory until ``partition``. Collective.

        Args:
            param_list: the parameters; by default this one.
            async_op: taken for the dialect's sake, the weights are there on return.
            hierarchy: taken for the dialect's sake.
        """
        for param in _these(self, param_list):
            if isinstance(param, DsNames):
                opened = ExitStack()
                if not isinstance(param, GatheredParameter):
                    opened.enter_context(known_owner_of(param).gathered([param], 0))
                _held.setdefault(param, []).append(opened)  # type: ignore[no-untyped-call]

    def partition(
        self,
        param_list: Sequence[nn.Parameter] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        free_data: bool = True,
    ) -> None:
        """The counterpart of ``all_gather``: what rank 0 has changed since is kept, on all ranks. Collective.

        Args:
            param_list: the parameters; by default this one.
            hierarchy: taken for the dialect's sake.
            has_been_updated: taken for the dialect's sake, changes are noticed.
            free_data: taken for the dialect's sake: who reads the weights finds them, be they in memory or not.
        """
        for param in _these(self, param_list):
            if param in _held:
                stack = _held[param].pop()
                if not _held[param]:
                    del _held[param]
                stack.close()


class GatheredParameter(DsNames):
    """What ``Init`` has staged, while it is gathered: the user's own weights, and the names of a sharded parameter."""

    def _owner(self) -> Owner:
        owner: Owner = _lenders[self]
        return owner

    @property
    def ds_status(self) -> ZeroParamStatus:
        """The weights are in memory now."""
        return ZeroParamStatus.AVAILABLE

    def __init__(self, *_given: Any, **_more: Any) -> None:
        """What ``nn.Parameter(param)`` has made is a parameter of the user's own, in the same memory."""
        del self._is_param
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        """Torch's; of this class, as torch wants it, where ``nn.Parameter(param)`` asks."""
        detached = super().detach()
        if sys._getframe(1).f_code is MAKING_A_PARAMETER:
            return torch.Tensor._make_subclass(GatheredParameter, detached)
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad))


_lenders: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The owner whose shards a gathered parameter has."""


def lend(param: nn.Parameter, owner: Owner) -> None:
    """The parameter, which is the user's own for a while, shows the names that ``owner`` answers."""
    if type(param) is nn.Parameter:
        _lenders[param] = owner
        param.__class__ = GatheredParameter


def end_loan(param: nn.Parameter) -> None:
    """The counterpart of ``lend``."""
    if type(param) is GatheredParameter:
        param.__class__ = nn.Parameter  # type: ignore[assignment]


def _these(param: nn.Parameter, params: Sequence[nn.Parameter] | None) -> Sequence[nn.Parameter]:
    return [param] if params is None else params

"""Who has a parameter's weights, and how it refuses what it cannot serve.

One table tells the owner of every parameter that is not the user's alone: the area where ``Init`` stages what it
builds, or the runtime of an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from infinity.errors import ConfigError
from infinity.tiers.collectives import Collectives

NAMED_MAX: Final = 20
"""Parameters that one message names; of the rest it tells how many."""

_USERS: Final = "_users_class"
"""The attribute of our classes of parameters that says which class of the user's they are for."""

Values = Callable[[int, int], torch.Tensor]
"""(first element, numel) -> that part of new weights, 1-D in the parameter's memory order, of any float dtype."""


class Owner(ABC):
    """Who has the weights of a parameter: an engine, or the area where ``Init`` stages what it builds."""

    keeps_writes: ClassVar[bool] = False
    """Whether what an operation writes to borrowed weights is kept."""
    collectives: Collectives
    """Those of the ranks that share the parameters."""
    shards_weights: bool = True
    """Whether weights are sharded between their uses, as at stage 3: below, parameters are whole for everybody."""

    @abstractmethod
    def alias(self, param: nn.Parameter) -> torch.Tensor:
        """``param.detach()`` and ``param.data``."""

    @abstractmethod
    def borrow(self, params: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """The weights of ``params`` are here for one operation. Raises WeightsError, and so does its end if the
        operation has written to them and the owner cannot keep that."""

    @abstractmethod
    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> AbstractContextManager[None]:
        """The weights of ``params`` are here inside; what ``modifier_rank`` writes to them is kept, on all ranks, and
        if it is None nothing may be written. Collective."""

    @abstractmethod
    def shard_of(self, param: nn.Parameter) -> torch.Tensor:
        """This rank's part of the weights, 1-D, on the CPU; a copy."""

    @abstractmethod
    def is_persistent(self, param: nn.Parameter) -> bool:
        """Whether the weights stay in memory between uses."""

    @abstractmethod
    def layout_of(self, param: nn.Parameter) -> torch.Tensor:
        """A tensor on the meta device that lies as the weights do."""

    @abstractmethod
    def gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """What ``param.grad`` says. Raises WeightsError if torch would have a gradient there and the owner took it."""

    @abstractmethod
    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """``param.grad = gradient``."""

    @abstractmethod
    def set_data(self, param: nn.Parameter, data: torch.Tensor) -> None:
        """``param.data = data``."""

    def set_to_itself(self, param: nn.Parameter) -> None:
        """``param.set_(param)``: nothing changes, and to torch's graphs of before it is a write."""
        return

    @abstractmethod
    def copy(self, param: nn.Parameter) -> nn.Parameter:
        """``copy.deepcopy(param)``."""

    def remake(self, param: nn.Parameter) -> nn.Parameter:
        """``nn.Parameter(param)``: another parameter of the same memory."""
        refuse_remake(self, param)

    def overwrite(self, values: Sequence[tuple[nn.Parameter, Values]]) -> None:
        """Give parameters new weights, of which every rank asks for its part alone. Collective.

        Nothing has changed where this refuses; where asking for values fails, a part of them may have.
        """
        self.refuse(values[0][0], "cannot be given new weights", "build the model anew")

    @abstractmethod
    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        """Raise WeightsError about the parameter."""


def check_modifier_rank(rank: object, world_size: int) -> None:
    """Raises ConfigError unless it is one of the ranks that share the parameters, or None."""
    if rank is not None and (type(rank) is not int or not 0 <= rank < world_size):
        raise ConfigError(
            "modifier_rank", rank, f"must be None, or the number of a rank that shares the model: 0 to {world_size - 1}"
        )


_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


def owner_of(param: torch.Tensor) -> Owner | None:
    """Who has the parameter's weights; None if they are the user's."""
    owner: Owner | None = _owners[param] if param in _owners else None  # noqa: SIM401 (get is untyped)
    return owner


def owned() -> list[nn.Parameter]:
    """Every parameter that has an owner."""
    return list(_owners)


def adopt(param: nn.Parameter, owner: Owner) -> None:
    """``owner`` answers for the parameter from now on, in place of whoever did."""
    _owners[param] = owner


def disown(param: nn.Parameter) -> None:
    """The parameter, whose weights must be in it, is the user's again."""
    _owners.pop(param, None)  # type: ignore[no-untyped-call]
    param.__class__ = users_class(param)


def users_class(param: torch.Tensor) -> type[nn.Parameter]:
    """The class that the parameter has where it is the user's alone."""
    kind: type[nn.Parameter] = type(param)  # type: ignore[assignment]
    return getattr(kind, _USERS, kind)


def become(param: nn.Parameter, kind: type[nn.Parameter]) -> None:
    """The parameter is of this class, and of a class of the user's own as before: its methods are there, and
    ``isinstance`` says so."""
    param.__class__ = of_kind(kind, users_class(param))


def of_kind(kind: type[nn.Parameter], own: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class that is of our kind, and of the user's ``own``."""
    made: type[nn.Parameter] = kind if own is nn.Parameter else _of_both(kind, own)
    return made


@cache
def _of_both(kind: type[nn.Parameter], own: type[nn.Parameter]) -> Any:
    return type(own.__name__, (kind, own), {_USERS: own, "__module__": own.__module__, "__doc__": own.__doc__})


def known_owner_of(param: nn.Parameter) -> Owner:
    """Who has the weights of a parameter that is owned."""
    owner = owner_of(param)
    if owner is None:
        raise AssertionError("a parameter whose class says that it is owned has no owner")
    return owner


def refuse_pickle(owner: Owner, param: nn.Parameter) -> NoReturn:
    owner.refuse(
        param,
        "is sharded: a copy of it, pickled, would hold no weights",
        "save what engine.full_state_dict() returns",
    )


def refuse_ended(owner: Owner, param: nn.Parameter) -> NoReturn:
    owner.refuse(param, "is used after its engine ended", "export engine.full_state_dict() before destroy()")


def refuse_remake(owner: Owner, param: nn.Parameter) -> NoReturn:
    owner.refuse(
        param,
        "is sharded: a parameter made of it would share its memory, which is given back",
        "make it of a copy, nn.Parameter(param.clone()), or before infinity.initialize()",
    )


def refuse_memory(owner: Owner, param: nn.Parameter, name: str) -> NoReturn:
    owner.refuse(
        param,
        f"is sharded: {name} would reach into memory that is given back",
        "copy it first, with .clone(), or use engine.full_state_dict()",
    )


def refuse_write(owner: Owner, param: nn.Parameter, others: Sequence[str] = ()) -> NoReturn:
    """Weights live in the store and only the optimizer writes there: any other change would be lost in silence.
    ``others``: the names of parameters that were changed with it."""
    named = [*others[:NAMED_MAX], *([f"{len(others) - NAMED_MAX} more"] if len(others) > NAMED_MAX else [])]
    too = f", as {'was' if len(named) == 1 else 'were'} {', '.join(named)}" if named else ""
    owner.refuse(
        param,
        f"was changed in place{too}, which sharded weights do not keep",
        "change it inside infinity.zero.GatheredParameters(param, modifier_rank=0), before infinity.initialize(), or "
        "make the change part of forward's arithmetic instead of an in-place modification",
    )

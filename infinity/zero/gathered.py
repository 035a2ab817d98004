"""``GatheredParameters``: sharded weights in memory for a while, to be read or to be changed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn

from infinity.weights.owners import Owner, owner_of


class GatheredParameters:
    """Context manager: inside, the parameters are their full weights. Collective, at both ends.

    What belongs to nobody but the user (plain tensors, models without an engine) is left as it is. It may be nested,
    used inside forward, between steps, and between ``Init`` and ``initialize``.

    Weights in 16 bits that are swapped out (for an average's, say) and in again are their masters' rounding: swap them
    back before the context ends, which leaves those masters alone, or put aside and set back what
    ``safe_get_full_fp32_param`` gives. Of what is swapped back in a context of its own the masters are rounded.

    Args:
        params: one parameter, or any iterable of them.
        modifier_rank: the rank (of the ranks that share the model) whose changes are broadcast and kept, in the weights
            and in their master weights. By default none: then a change of any bit is refused, by name, at the end;
            what was written with the values that were there (a state dict that is loaded to be looked at) is none.
        fwd_module: the module that uses the parameters though others own them. Taken for the dialect's sake: here
            every use of a weight finds it, wherever it happens.
        enabled: False makes the context do nothing.

    Raises:
        ConfigError: ``modifier_rank`` is none of the ranks.
        WeightsError: a parameter was changed without a ``modifier_rank``, or a view that would not follow is kept.
    """

    def __init__(
        self,
        params: nn.Parameter | torch.Tensor | Iterable[nn.Parameter | torch.Tensor] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params: list[nn.Parameter] = []
        self._modifier_rank = modifier_rank
        self._inside: list[ExitStack] = []
        if enabled:
            # None: a bias that is not there
            given = [params] if isinstance(params, torch.Tensor) else list(params or ())
            unique = {id(param): param for param in given if isinstance(param, nn.Parameter)}
            self._params = list(unique.values())

    def __enter__(self) -> None:
        by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
        for param in self._params:
            if (owner := owner_of(param)) is not None:
                by_owner.setdefault(id(owner), (owner, []))[1].append(param)
        with ExitStack() as opening:
            for owner, params in by_owner.values():
                opening.enter_context(owner.gathered(params, self._modifier_rank))
            self._inside.append(opening.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.pop().__exit__(kind, error, traceback)

"""Who answers for parameters whose engine has ended: it knows their names and how they lay, and nothing else.

An engine's runtime refers to the model. Were it to go on answering, no model that was ever trained would be freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.tiers.collectives import Collectives
from infinity.weights import access, owners
from infinity.weights.param import ShardedParam


class Ended(owners.Owner):
    collectives = Collectives(None)

    def __init__(self, params: Iterable[ShardedParam]) -> None:
        self._known = {id(param.param): (param.name, param.layout) for param in params}

    def alias(self, param: nn.Parameter) -> torch.Tensor:
        return access.ShardedAlias.of(param)

    def borrow(self, params: Sequence[nn.Parameter]) -> NoReturn:
        owners.refuse_ended(self, params[0])

    def gathered(self, params: Sequence[nn.Parameter], modifier_rank: int | None) -> NoReturn:
        owners.refuse_ended(self, params[0])

    def shard_of(self, param: nn.Parameter) -> NoReturn:
        owners.refuse_ended(self, param)

    def is_persistent(self, param: nn.Parameter) -> bool:
        return False

    def layout_of(self, param: nn.Parameter) -> torch.Tensor:
        return self._known[id(param)][1]

    def gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return access.own_gradient(param)

    def set_gradient(self, param: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            owners.refuse_ended(self, param)
        access.drop_gradient(param)

    def set_data(self, param: nn.Parameter, data: torch.Tensor) -> NoReturn:
        owners.refuse_ended(self, param)

    def copy(self, param: nn.Parameter) -> NoReturn:
        owners.refuse_ended(self, param)

    def overwrite(self, values: Sequence[tuple[nn.Parameter, owners.Values]]) -> NoReturn:
        owners.refuse_ended(self, values[0][0])

    def name_of(self, param: torch.Tensor) -> str:
        return self._known[id(param)][0]

    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        raise WeightsError(f"{self.name_of(param)} (shape {tuple(param.shape)})", problem, remedy)

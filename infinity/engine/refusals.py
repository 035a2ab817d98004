"""What a user is told who uses a sharded parameter as its engine cannot serve: WeightsError, with name and remedy."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn

from infinity.errors import WeightsError
from infinity.weights.param import ShardedParam


class Refusals:
    """``param_of``: the sharded parameter of each of the model's, by id."""

    def __init__(self, param_of: Mapping[int, ShardedParam]) -> None:
        self._param_of = param_of

    def refuse(self, param: nn.Parameter, problem: str, remedy: str) -> NoReturn:
        found = self._param_of.get(id(param))
        name = found.name if found is not None else "a parameter"
        raise WeightsError(f"{name} (shape {tuple(param.shape)})", problem, remedy)

    def refuse_data(self, param: nn.Parameter, data: torch.Tensor) -> NoReturn:
        if data.dtype is not param.dtype:
            self.refuse(
                param,
                f"is sharded: it cannot be cast to {data.dtype}",
                "cast the model before infinity.initialize(), or by the config; where Transformers' bf16_full_eval or "
                "fp16_full_eval casts it, leave that out",
            )
        self.refuse(
            param,
            "is sharded: its .data cannot be replaced",
            "change values inside infinity.zero.GatheredParameters(param, modifier_rank=0), dtype and device before "
            "infinity.initialize() or by the config",
        )

    def refuse_copy(self, param: nn.Parameter) -> NoReturn:
        self.refuse(
            param,
            "is sharded: a deep copy would need the whole model in memory",
            "copy the model before infinity.initialize(), or load engine.full_state_dict() into one built anew",
        )

    def refuse_backward(self, param: ShardedParam) -> None:
        """Returns None by its type alone: it stands where the engine's own answer to a gradient may stand."""
        self.refuse(
            param.param,
            "got a gradient from a backward that its engine does not see",
            "call engine.backward(loss) instead of loss.backward(); where another engine's loss depends on this "
            "model, freeze it meanwhile with requires_grad_(False)",
        )

    def refuse_unseen(self, param: ShardedParam) -> NoReturn:
        self.refuse(
            param.param,
            "was saved for backward where its engine does not see it, or is read, in another thread or with hooks "
            "switched off",
            "use it in the thread that calls the engine, or call a module that owns it there, or take turns by a "
            "threading.Lock",
        )

    def refuse_views(self, param: ShardedParam) -> None:
        """Raises WeightsError if anybody keeps a view of the weights, which are about to change. An error that was
        caught in backward leaves views in circles of objects that nobody has: those are collected first."""
        if not param.has_outliving_views():
            return
        gc.collect()
        if param.has_outliving_views():
            self.refuse(
                param.param,
                "has a view that is kept outside the model, perhaps by the graph of a loss, and would not follow its "
                "update",
                "keep a copy, with .clone(), or drop the view or the loss before its weights change",
            )

"""What a model looked like when it was sharded, and what has become of it: looked at when it is called.

A parameter that comes later is nobody's: the optimizer does not know it, as torch's would not. One that does not train
may come and go; one that would have to train, and never would, is refused by name: the engine keeps no gradient and no
states of what was frozen when it was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from infinity.errors import WeightsError
from infinity.plan.registered import modules, named_parameters
from infinity.weights.access import raw
from infinity.weights.owners import owner_of

REMEDY = "change the model before infinity.initialize(), which makes its optimizer and its shards"


@dataclass(slots=True)
class _Seen:
    module: nn.Module
    params: dict[str, nn.Parameter | None]
    children: dict[str, nn.Module | None]

    @property
    def is_unchanged(self) -> bool:
        now, children = self.module._parameters, self.module._modules
        return (
            len(now) == len(self.params)
            and all(now.get(name) is param for name, param in self.params.items())
            and len(children) == len(self.children)
            and all(children.get(name) is child for name, child in self.children.items())
        )


class Structure:
    def __init__(self, model: nn.Module, frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        """``frozen``: names and parameters that do not train."""
        self._model, self._frozen = model, frozen
        self._seen = self._look()

    def check(self, *, trains: bool = True) -> None:
        """Raises WeightsError for a parameter that came, or, where a backward may follow, began to train after the
        model was sharded."""
        with raw():
            for name, param in self._frozen if trains else ():
                if param.requires_grad:
                    raise WeightsError(
                        name,
                        "was frozen when the model was sharded, and requires a gradient now",
                        "let it require one at infinity.initialize() and freeze it right afterwards (what gets no "
                        "gradient is not stepped, as in torch), or load engine.save_checkpoint()'s files into an "
                        "engine that is made after it was unfrozen",
                    )
        if all(seen.is_unchanged for seen in self._seen):
            return
        for name, param in named_parameters(self._model, remove_duplicate=False):
            if isinstance(param, nn.Parameter) and owner_of(param) is None and param.requires_grad:
                raise WeightsError(name, "came after infinity.initialize(), so nothing would train it", REMEDY)
        self._seen = self._look()

    def check_owned(self, use: str) -> None:
        """Raises WeightsError for a parameter, trained or not, that came after the model was sharded."""
        for name, param in named_parameters(self._model, remove_duplicate=False):
            if isinstance(param, nn.Parameter) and owner_of(param) is None:
                raise WeightsError(name, f"came after infinity.initialize(), so {use} would lack it", REMEDY)

    def _look(self) -> list[_Seen]:
        return [_Seen(m, dict(m._parameters), dict(m._modules)) for m in modules(self._model)]

"""Leaf modules of stage 3."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import utils  # type: ignore[import-not-found]
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import config, start, train_on


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Experts(nn.Module):
    """Each batch goes to the expert of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.experts[self.calls % 3](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.experts, self.after = nn.Linear(6, 6), Experts(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.experts(self.before(x))).pow(2).mean()


def _mixture() -> Mixture:
    torch.manual_seed(2)
    return Mixture()


def _names(model: nn.Module) -> list[str]:
    return sorted(type(each).__name__ for each in utils.get_z3_leaf_modules(model))


def _train(engine: Any) -> list[float]:
    return train_on(engine, [(torch.full((2, 6), 0.1 * (number + 1)),) for number in range(4)])


@case()
def set_and_unset(_directory: Path) -> Any:
    model = _mixture()
    returned = utils.set_z3_leaf_modules(model, [Expert])
    seen = [len(returned), _names(model), [utils.z3_leaf_module(each) for each in returned]]
    utils.unset_z3_leaf_modules(model, [Expert])
    return [*seen, _names(model), utils.z3_leaf_module(model)]


@case()
def by_names_of_classes(_directory: Path) -> Any:
    model = _mixture()
    by_name = utils.set_z3_leaf_modules(model, ["Experts"])
    other = _mixture()
    by_path = utils.set_z3_leaf_modules(other, [f"{Expert.__module__}.{Expert.__qualname__}"])
    return len(by_name), len(by_path), _names(model), _names(other)


@case()
def of_nothing(_directory: Path) -> Any:
    model = _mixture()
    return [
        raised(lambda: utils.set_z3_leaf_modules(model, [nn.Conv2d])),
        raised(lambda: utils.set_z3_leaf_modules(model, ["NoSuchClass"])),
        raised(lambda: utils.unset_z3_leaf_modules(model, [nn.Conv2d])),
        utils.set_z3_leaf_modules(model, [nn.Conv2d], raise_if_not_found=False),
    ]


@case()
def by_names_of_modules(_directory: Path) -> Any:
    model = _mixture()
    found, missing = utils.set_z3_leaf_modules_by_name(model, ["experts", "nothing"], raise_if_not_found=False)
    strict = raised(lambda: utils.set_z3_leaf_modules_by_name(model, ["nothing"]))
    utils.set_z3_leaf_modules_by_name(model, ["experts"], flag=False)
    after = _names(model)
    ended, absent = utils.set_z3_leaf_modules_by_suffix(model, ["1", "zzz"], raise_if_not_found=False)
    return len(found), missing, strict, after, len(ended), absent, _names(model)


@case()
def one_module(_directory: Path) -> Any:
    model = _mixture()
    utils.set_z3_leaf_module(model.experts, True)
    first = _names(model)
    utils.set_z3_leaf_module(model.experts, False)
    return first, _names(model), utils.z3_leaf_module(model.experts)


@cases_over({"none": None, "experts": [Experts], "expert": [Expert], "names": ["Experts"]})
def trained(_directory: Path, classes: Any) -> Any:
    model = _mixture()
    if classes:
        utils.set_z3_leaf_modules(model, classes)
    return _train(start(model, config(3)))


@case(ranks=2)
def trained_by_two(_directory: Path) -> Any:
    model = _mixture()
    utils.set_z3_leaf_modules(model, [Experts])
    return _train(start(model, config(3)))


@case()
def by_the_configuration(_directory: Path) -> Any:
    leaf = {"classes": ["Experts"], "names": [], "name_suffixes": []}
    model = _mixture()
    engine = start(model, config(3, zero={"leaf_module": leaf}))
    return _names(model), _train(engine), engine._config.zero_config.leaf_module.classes


@case()
def section_of_the_configuration(_directory: Path) -> Any:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # type: ignore[import-not-found]

    made = DeepSpeedZeroConfig(stage=3, leaf_module={"classes": ["A", "A", "B"], "names": "x", "name_suffixes": ["y"]})
    bare = DeepSpeedZeroConfig(stage=3)
    return [
        made.leaf_module.classes, made.leaf_module.names, made.leaf_module.name_suffixes, bare.leaf_module.classes,
        bare.leaf_module.names, raised(lambda: DeepSpeedZeroConfig(leaf_module={"unknown": 1})),
    ]  # fmt: skip


@case()
def the_granularity_makes_leaves(_directory: Path) -> Any:
    model = _mixture()
    engine = start(model, config(3, zero={"stage3_module_granularity_threshold": 10}))
    return _train(engine)


@case()
def a_leaf_that_returns_containers(_directory: Path) -> Any:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": self.a(x), "rest": [self.b(x)]}

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.several = Several()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.several(x)
            return (out["a"] + out["rest"][0]).pow(2).mean()

    torch.manual_seed(3)
    model = Around()
    utils.set_z3_leaf_modules(model, [Several])
    return _train(start(model, config(3)))


@case()
def parameters_of_leaves(_directory: Path) -> Any:
    model = _mixture()
    utils.set_z3_leaf_modules(model, [Experts])
    engine = start(model, config(3))
    return engine.zero_optimization_stage(), [utils.z3_leaf_parameter(param) for param in model.parameters()]

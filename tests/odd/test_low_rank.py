"""Frozen weights and low-rank updates, with and without checkpointing, in groups of one module and of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.odd.nets import ROWS, WIDTH, Net, square, trains
from tests.support.cases import DEFAULT, EACH, EACH_BF16, GROUPED, GROUPED_BF16, NVME, POISON, Case, Cases

cases = Cases(__name__)
EVERY = (EACH, GROUPED, DEFAULT, EACH_BF16, GROUPED_BF16, POISON)


class LowRank(nn.Module):
    """A frozen linear and a trained update of rank 3."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


class Merged(LowRank):
    """The update is merged into the weight before it is used."""

    def forward(self, x: torch.Tensor) -> Any:
        return F.linear(x, self.base.weight + self.up.weight @ self.down.weight, self.base.bias)


class Decomposed(LowRank):
    """DoRA: direction and magnitude."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base)
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.base.weight + self.up.weight @ self.down.weight
        return F.linear(x, self.magnitude[:, None] * weight / weight.norm(dim=1, keepdim=True).detach(), self.base.bias)


def adapted(model: nn.Module, kind: Callable[[nn.Linear], nn.Module] = LowRank) -> nn.Module:
    """Every linear of ``model`` with an adapter, all else frozen."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear) and not isinstance(module, LowRank):
                setattr(module, name, kind(child))
    return model


class Checkpointed(nn.Module):
    """A net whose blocks run under a checkpoint."""

    def __init__(self, net: nn.Module, *, use_reentrant: bool, twice: bool = False) -> None:
        super().__init__()
        self.net, self.use_reentrant, self.twice = net, use_reentrant, twice

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            if self.twice:
                x = checkpoint(block, torch.tanh(x), use_reentrant=self.use_reentrant)
        return self.net.head(x)


@cases(must="equal", settings=(*EVERY, NVME))
def adapters_on_every_linear(world: Any) -> None:
    trains(world, adapted(Net()))


@cases(must="equal", settings=EVERY)
def merged_adapters(world: Any) -> None:
    trains(world, adapted(Net(), Merged))


@cases(must="equal", settings=EVERY)
def decomposed_adapters(world: Any) -> None:
    trains(world, adapted(Net(), Decomposed))


@cases(must="equal", settings=(*EVERY, NVME))
def checkpointed_without_reentrance(world: Any) -> None:
    """Groups of several modules: the crash "storage of size 0"."""
    trains(world, Checkpointed(adapted(Net()), use_reentrant=False))


@cases(must="equal", settings=EVERY)
def checkpointed_without_reentrance_inputs_that_need_gradients(world: Any) -> None:
    engine = world.initialize(Checkpointed(adapted(Net()), use_reentrant=False))
    for step in range(3):
        x = world.randn(ROWS, WIDTH, seed=step, requires_grad=True)
        world.backward(engine, square(engine(x)))
        world.observe("input gradient", x.grad)
        engine.step()


@cases(must="equal", settings=EVERY)
def checkpointed_with_reentrance(world: Any) -> None:
    """``enable_input_require_grads`` of Transformers: the input must need a gradient."""
    engine = world.initialize(Checkpointed(adapted(Net()), use_reentrant=True))
    for step in range(3):
        x = world.randn(ROWS, WIDTH, seed=step, requires_grad=True)
        world.backward(engine, square(engine(x)))
        engine.step()


@cases(must="equal", settings=EVERY)
def a_checkpointed_block_called_twice(world: Any) -> None:
    trains(world, Checkpointed(adapted(Net()), use_reentrant=False, twice=True))


@cases(must="equal", settings=EVERY)
def merged_and_checkpointed(world: Any) -> None:
    trains(world, Checkpointed(adapted(Net(), Merged), use_reentrant=False))


@cases(must="equal", settings=EVERY)
def decomposed_and_checkpointed(world: Any) -> None:
    trains(world, Checkpointed(adapted(Net(), Decomposed), use_reentrant=False))


@cases(must="equal")
def a_frozen_module_called_twice(world: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = Net(1).requires_grad_(False)
            self.trained = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            return self.frozen(torch.tanh(self.frozen(self.trained(x))))

    trains(world, Twice())


@cases(must="equal")
def frozen_layers_below_trained_ones(world: Any) -> None:
    model = Net()
    model.blocks[:2].requires_grad_(False)
    trains(world, model)


@cases(must="equal")
def trained_layers_below_frozen_ones(world: Any) -> None:
    model = Net()
    model.blocks[1:].requires_grad_(False)
    model.head.requires_grad_(False)
    trains(world, model)


@cases(must="equal")
def only_biases_are_trained(world: Any) -> None:
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    trains(world, model)


@cases(must="equal")
def a_frozen_input_branch_beside_a_trained_one(world: Any) -> None:
    """The frozen call has an input that needs no gradient: no gradient tells that backward has passed it."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained, self.mix = Net(1).requires_grad_(False), Net(1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            return self.mix(self.frozen(x) * self.trained(x))

    trains(world, Beside())


@cases(must="equal")
def checkpoint_sequential_of_adapters(world: Any) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = adapted(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    trains(world, Sequence())


@cases(must="equal")
def nested_checkpoints(world: Any) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = adapted(Net())

        def forward(self, x: torch.Tensor) -> Any:
            def inner(h: torch.Tensor) -> Any:
                return checkpoint(self.net.blocks[0], h, use_reentrant=False)

            def outer(h: torch.Tensor) -> Any:
                return self.net.blocks[1](inner(h))

            return self.net.head(checkpoint(outer, x, use_reentrant=False))

    trains(world, Nested())


@cases(must="equal")
def adapters_with_accumulation(world: Any) -> None:
    trains(world, Checkpointed(adapted(Net()), use_reentrant=False), accumulation=2)


@cases
def adapters_are_merged_after_training(world: Any) -> None:
    model = adapted(Net())
    trains(world, model)
    with torch.no_grad():
        layer = model.blocks[0].expand
        world.observe("merged", layer.base.weight + layer.up.weight @ layer.down.weight)


@cases
def adapters_are_switched_off_for_a_reference_pass(world: Any) -> None:
    """DPO: the reference is the same model without its adapters, under no_grad."""
    model = adapted(Net())
    engine = world.initialize(model)
    for step in range(3):
        x = world.randn(ROWS, WIDTH, seed=step)
        with torch.no_grad():
            reference = model.head.base(model.blocks[0].norm(x))
        world.observe("reference", reference)
        world.backward(engine, square(engine(x) - reference))
        engine.step()


@cases.parametrized()
def test_low_rank(case: Case, judged: Any) -> None:
    judged(__name__, case)

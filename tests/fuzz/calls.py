"""What random programs call: a root with a head, losses, parameters and optimizers of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.fuzz.leaves import WIDTH, Linear, Part, Wide
from tests.fuzz.wrappers import Chain, Residual


class Scored(NamedTuple):
    hidden: Tensor
    penalty: Tensor


@dataclass
class Report:
    hidden: Tensor
    weight: Tensor


class Root(nn.Module):
    """The part, a head, and an output of some shape."""

    def __init__(self, part: Part, output: str = "tensor") -> None:
        super().__init__()
        self.part, self.head, self.output = part, nn.Linear(WIDTH, 5), output

    def forward(self, x: Tensor) -> Any:
        hidden = self.part(x)
        y = self.head(hidden)
        match self.output:
            case "dict":
                return {"y": y, "more": [hidden, None, 3]}
            case "named":
                return Scored(y, hidden.float().square().mean())
            case "dataclass":
                return Report(y, self.head.weight[:2])
            case "weight":
                return y, self.head.weight
            case "generator":
                return self._yielded(hidden, y)
            case "closure":
                return lambda: y * self.head.bias
            case _:
                return y

    def _yielded(self, hidden: Tensor, y: Tensor) -> Iterator[Tensor]:
        yield hidden
        yield y * self.head.weight.sum()


def another(seed: int, *, trains: bool) -> Root:
    """The model of a second engine."""
    torch.manual_seed(seed + 1)
    model = Root(Chain(Linear(), Residual(Wide())))
    return model if trains else model.requires_grad_(False).eval()


def loss_of(output: Any) -> Tensor:
    """A scalar from whatever a Root gave."""
    if isinstance(output, Report):
        output = [output.hidden, output.weight]
    elif callable(output):
        output = output()
    elif isinstance(output, Iterator):
        output = list(output)
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def input_gradient(loss: Tensor, engine: Any, x: Tensor) -> Tensor:
    """For a penalty: the gradient of another forward's output with respect to its input, with its graph."""
    given = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(engine(given)), given, create_graph=True, allow_unused=True)
    return loss.detach() * 0 if gradient is None else gradient


def nth(model: nn.Module, number: int) -> nn.Parameter:
    """A parameter of the model."""
    params = list(model.parameters())
    return params[number % len(params)]


def part_of(model: nn.Module, number: int) -> nn.Module:
    """A part somewhere inside the model."""
    parts = [module for module in model.modules() if isinstance(module, Part)]
    return parts[number % len(parts)]


def tie(left: Part, right: Part) -> None:
    """Let the first parameter of ``left`` that ``right`` has a like of be that one."""
    for module in left.modules():
        for name, param in module.named_parameters(recurse=False):
            for other in right.parameters():
                if other is not param and other.shape == param.shape and name in ("weight", "bias", "scale"):
                    setattr(module, name, other)
                    return


def freeze(part: nn.Module, every: int = 1) -> None:
    """Freeze every n-th parameter of a part."""
    for number, param in enumerate(part.parameters()):
        if number % every == 0:
            param.requires_grad_(False)


def follow(average: dict[str, Tensor], model: nn.Module, *, data: bool = False) -> None:
    """An exponential moving average of the weights."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = param.data if data else param
            if name in average:
                average[name].mul_(0.5).add_(value, alpha=0.5)
            else:
                average[name] = value.clone()


def in_two_groups(given: Iterable[Any]) -> list[dict[str, Any]]:
    """Every other parameter at a smaller rate, and decayed."""
    params = [p for group in given for p in (group["params"] if isinstance(group, dict) else [group])]
    return [
        {"params": params[::2], "lr": 3e-3, "weight_decay": 0.1},
        {"params": params[1::2], "lr": 1e-3, "weight_decay": 0.0},
    ]


class Lamb(torch.optim.Optimizer):
    """Steps as long as the parameter is: a rule of whole parameters."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(param), torch.zeros_like(param)
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].mul_(0.95).addcmul_(param.grad, param.grad, value=0.05)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                ratio = param.norm() / update.norm().clamp_min(1e-6)
                param.sub_(update * ratio.clamp(max=10.0), alpha=group["lr"])
        return None

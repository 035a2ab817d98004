"""What random programs are made of: modules from rows of WIDTH to the same shape, and what scripts do with them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 12
ROWS = 3


class Part(nn.Module):
    """Takes and gives (ROWS, WIDTH)."""

    def forward(self, x: Tensor) -> Any:
        raise NotImplementedError


class Linear(Part):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Wide(Part):
    """Two linears through a wider middle, with dropout perhaps."""

    def __init__(self, times: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.expand, self.contract = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Any:
        return self.contract(F.dropout(F.gelu(self.expand(x)), self.dropout, self.training))


class Norm(Part):
    def __init__(self, kind: str = "layer") -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch" else nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class Raw(Part):
    """A parameter of the module's own, used by function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight)


class Scale(Part):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.shift = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Any:
        return x * self.scale + self.shift


class Sliced(Part):
    """One parameter, used in pieces and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        first, second, third = self.table.chunk(3)
        return F.linear(torch.tanh(F.linear(x, first)), second.t()) + x * third[0]


class TwoWays(Part):
    """The weight and its transpose: two uses of one parameter in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.weight) @ self.weight.t()


class Strided(Part):
    """A parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight


class LowRank(Part):
    """A frozen weight with a trained update; ``merged`` before it is used."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.merged = merged

    def forward(self, x: Tensor) -> Any:
        if self.merged:
            return F.linear(x, self.base.weight + self.up.weight @ self.down.weight, self.base.bias)
        return self.base(x) + self.up(self.down(x))


class Listed(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        return x


class Recurrent(Part):
    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x.unsqueeze(0))[0].squeeze(0)


class Attention(Part):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(0)


class Normed(Part):
    """Weight norm, new or old, or spectral norm."""

    def __init__(self, kind: str = "weight") -> None:
        super().__init__()
        linear = nn.Linear(WIDTH, WIDTH)
        change: Any = {
            "weight": parametrizations.weight_norm,
            "old_weight": nn.utils.weight_norm,
            "spectral": parametrizations.spectral_norm,
        }[kind]
        self.linear = change(linear)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class _OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.x


class OnContext(Raw):
    """A custom function that keeps the weight where no saved-tensor hook sees it."""

    def forward(self, x: Tensor) -> Any:
        return _OnContext.apply(x, self.weight)


class Hooked(Raw):
    """A tensor hook that uses a weight in backward."""

    def forward(self, x: Tensor) -> Any:
        y = F.linear(x, self.weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 0.1 * gradient @ self.weight.detach())
        return y


# Parts of parts


class Chain(Part):
    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


class Sequence(Part):
    """An nn.Sequential, which is called."""

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Any:
        return self.parts(x)


class Residual(Part):
    def __init__(self, part: Part, in_place: bool = False) -> None:
        super().__init__()
        self.part, self.in_place = part, in_place

    def forward(self, x: Tensor) -> Any:
        y = self.part(x)
        return y.add_(x) if self.in_place and y.grad_fn is not None else y + x


class Twice(Part):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(torch.tanh(self.part(x)))


class Checkpointed(Part):
    def __init__(self, part: Part, use_reentrant: bool = False) -> None:
        super().__init__()
        self.part, self.use_reentrant = part, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=self.use_reentrant)


class Borrowing(Part):
    """Uses its child's first matrix itself, and calls the child or not."""

    def __init__(self, part: Part, calls: bool = True) -> None:
        super().__init__()
        self.part, self.calls = part, calls

    def forward(self, x: Tensor) -> Any:
        weight = next((p for p in self.part.parameters() if p.shape == (WIDTH, WIDTH)), None)
        y = x if weight is None else F.linear(torch.sin(x), weight)
        return y + self.part(x) if self.calls else y


class Branches(Part):
    def __init__(self, left: Part, right: Part, detached: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.detached = left, right, detached

    def forward(self, x: Tensor) -> Any:
        right = self.right(x)
        return self.left(x) * torch.sigmoid(right.detach() if self.detached else right)


class WithoutGradient(Part):
    """A target that gets no gradient beside a branch that does."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.mix = part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.part(x)
        return self.mix(x) - target


class Routed(Part):
    """Which part a row goes to depends on the data; a part may get none."""

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.router, self.parts = nn.Linear(WIDTH, len(parts)), nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        y = torch.zeros_like(x)
        for number, part in enumerate(self.parts):
            rows = torch.where(chosen == number)[0]
            if len(rows) > 1:  # batch norm wants two
                y = y.index_add(0, rows, part(x[rows]) * scores[rows, number, None])
        return y + 0.1 * x


class Alternating(Part):
    """The second part is used in every other call of training."""

    def __init__(self, first: Part, second: Part) -> None:
        super().__init__()
        self.first, self.second, self.calls = first, second, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += self.training
        return self.first(x) if self.calls % 2 else self.second(x)


class OnCpu(Part):
    """The user's own saved-tensor hooks."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        with save_on_cpu():
            return self.part(x)


class InThread(Part):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        found: list[Any] = []
        enabled = torch.is_grad_enabled()

        def call() -> None:
            with torch.set_grad_enabled(enabled):
                try:
                    found.append(self.part(x))
                except BaseException as error:  # noqa: BLE001 (raised again where the user waits)
                    found.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]


class Keeps(Part):
    """Keeps views of a weight and of an activation from one call for the next."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.mix = part, nn.Linear(WIDTH, WIDTH)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = self.mix(self.part(x))
        if self.last is not None and self.last.shape == y.shape:
            y = y + 0.1 * self.last.to(y.dtype)
        self.last = y.detach()
        return y


class Counting(Part):
    """Buffers that forward changes: one in place, one by another tensor."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        y = self.mix(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(y.detach().mean(0).to(self.mean.dtype), alpha=0.1)
            self.calls = self.calls + 1
        return y - self.mean.to(y.dtype)


class Narrow(Part):
    """Switches autocast on itself."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.part(x)
        return y.to(x.dtype)


class Overwriting(Part):
    """Changes what it gave its part, in place, once that has read it."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        given = x * 1.5
        y = self.part(torch.sin(given))
        return y + given.mul_(0.5)


class Noisy(Part):
    """Draws random numbers before and after its part, which may draw some again when it is recomputed."""

    def __init__(self, part: Part, rate: float = 0.3) -> None:
        super().__init__()
        self.part, self.rate = part, rate

    def forward(self, x: Tensor) -> Any:
        y = self.part(F.dropout(x, self.rate, self.training))
        return y + 0.1 * torch.rand_like(y)


class Structured(Part):
    """Its inner module takes keywords and gives a dict of tuples."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.inner = _InDict(part)

    def forward(self, x: Tensor) -> Any:
        found = self.inner(hidden=x, scale=2.0)
        return found["pair"][0] + found["pair"][1] * found["scale"]


class _InDict(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.gain = part, nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, *, hidden: Tensor, scale: float) -> Any:
        return {"pair": (self.part(hidden), hidden * self.gain), "scale": scale}


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


# What scripts call


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

"""Modules from rows of WIDTH to the same shape, of which random programs are built: those that hold parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations, prune

from tests.support.functions import KeepsOnContext

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


class Stored(Part):
    """A frozen weight in fewer bits than what learns beside it, as somebody has stored it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        drawn = torch.randn(WIDTH, WIDTH) * (0.3 if dtype.is_floating_point else 20)
        self.stored = nn.Parameter(drawn > 0 if dtype is torch.bool else drawn.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH) / (1 if dtype.is_floating_point else 60))
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.stored.to(x.dtype)) * self.scale + self.up(self.down(x))


class Tower(Part):
    """A frozen layer that computes in its own 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = nn.Linear(WIDTH, WIDTH).to(dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.tower(x.to(self.tower.weight.dtype)).to(x.dtype)


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


class OnContext(Raw):
    """A custom function that keeps the weight where no saved-tensor hook sees it."""

    def forward(self, x: Tensor) -> Any:
        return KeepsOnContext.apply(x, self.weight)


class Hooked(Raw):
    """A tensor hook that uses a weight in backward."""

    def forward(self, x: Tensor) -> Any:
        y = F.linear(x, self.weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 0.1 * gradient @ self.weight.detach())
        return y


class Convolved(Part):
    """A row as three channels of four."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        kind: Any = nn.ConvTranspose1d if transposed else nn.Conv1d
        self.convolution = kind(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.convolution(x.reshape(len(x), 3, WIDTH // 3)).reshape(len(x), WIDTH)


class Grouped(Part):
    """Norms that torch has no fused kernel for everywhere."""

    def __init__(self, kind: str = "group") -> None:
        super().__init__()
        self.norm: nn.Module = nn.GroupNorm(3, WIDTH) if kind == "group" else nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class Looked(Part):
    """Rows of a table, looked up or summed, by what the values round to."""

    def __init__(self, kind: str = "one", max_norm: float | None = None) -> None:
        super().__init__()
        self.kind = kind
        table: Any = nn.EmbeddingBag if kind == "bag" else nn.Embedding
        self.table = table(16, WIDTH, padding_idx=1, max_norm=max_norm)

    def forward(self, x: Tensor) -> Any:
        places = (x.detach().float() * 3).long().abs() % 16
        return x + self.table(places if self.kind == "bag" else places[:, 0])


class Rectified(Part):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.mix = nn.PReLU(WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.slope(self.mix(x, torch.cos(x)))


class Encoder(Part):
    """In evaluation torch takes another way through it, which reads the weights of all that is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.unsqueeze(0)).squeeze(0)


class Celled(Part):
    def __init__(self, kind: str = "LSTMCell") -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        for factor in (1.0, 0.5):
            state = self.cell(x * factor, state)
        return state[0] if isinstance(state, tuple) else state


class Named(Part):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.randn(WIDTH, WIDTH) * 0.3 for name in ("in", "out")})

    def forward(self, x: Tensor) -> Any:
        return torch.einsum("ij,kj->ik", torch.tanh(x @ self.weights["in"]), self.weights["out"])


class Pruned(Part):
    def __init__(self) -> None:
        super().__init__()
        self.linear = prune.random_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.3)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Quantized(Raw):
    """Rounded on the way forward, straight through on the way back."""

    def forward(self, x: Tensor) -> Any:
        rounded = (self.weight * 8).round() / 8
        return F.linear(x, self.weight + (rounded - self.weight).detach())


class Detached(Raw):
    """The weight with its gradient, and without."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)


class Doubled(Raw):
    """In another dtype than the weight's."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x.double(), self.weight.double()).to(x.dtype)


class Ensemble(Part):
    """Two weights in one batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return vmap(F.linear, in_dims=(None, 0))(x, torch.stack(list(self.members))).mean(0)


class Damped(Part):
    """A module called with other values than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return functional_call(self.linear, {name: p * 0.9 for name, p in self.linear.named_parameters()}, (x,))


class Regular(Part):
    """All its parameters once more, beside the module's call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * (1 + 1e-2 * sum(p.float().square().mean() for p in self.parameters())).to(x.dtype)

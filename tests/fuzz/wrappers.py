"""Parts of parts: what random programs do with a module, or with several."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.fuzz.leaves import WIDTH, Part
from tests.support.functions import MadeAgain


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


class Direct(Part):
    """Its part's ``forward``, which is no call: hooks see none."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part.forward(x)


class Watched(Part):
    """Its part has the user's own hooks, of one kind."""

    def __init__(self, part: Part, kind: str) -> None:
        super().__init__()
        self.part = part
        match kind:
            case "forward":
                part.register_forward_hook(lambda _, __, y: y * 0.9)
            case "pre":
                part.register_forward_pre_hook(lambda _, given: (given[0] * 0.9,))
            case "backward":
                part.register_full_backward_hook(lambda _, to_inputs, __: _shrunk(to_inputs))
            case _:
                part.register_full_backward_pre_hook(lambda _, of_outputs: _shrunk(of_outputs))

    def forward(self, x: Tensor) -> Any:
        return self.part(x)


def _shrunk(gradients: Any) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * 0.9 for gradient in gradients)


class Dropped(Part):
    """Stochastic depth."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return x if self.training and float(torch.rand(())) < 0.4 else x + self.part(x)


class Repeated(Part):
    """Its part as often as the call's number says."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.calls = part, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        for _ in range(self.calls % 3):
            x = torch.tanh(self.part(x))
        return x


class Reversible(Part):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return x + MadeAgain.apply(self.part, x, *self.part.parameters())


class Sloped(Part):
    """A gradient inside of forward, which is differentiated itself."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            given = x if x.requires_grad else x.detach().requires_grad_()
            y = self.part(given)
            (slope,) = torch.autograd.grad(y.float().square().sum(), given, create_graph=True, allow_unused=True)
        return y if slope is None else y + 0.1 * slope


class Caught(Part):
    """Every other call fails behind its part, and is made up for by another."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.inner, self.mix = _Failing(part), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        try:
            return self.inner(x)
        except ArithmeticError:
            return self.mix(x) + self.inner.part(x)


class _Failing(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.calls = part, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        y = self.part(x)
        if self.calls % 2 == 0:
            raise ArithmeticError("every other time")
        return y


class InPieces(Part):
    """Rows go through its part in two calls."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return torch.cat([self.part(x[:2]), self.part(x[-2:])])[: len(x)]


class Inferred(Part):
    """A target from inference mode, of its part in evaluation."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.mix = part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        training = self.part.training
        self.part.eval()
        with torch.inference_mode():
            target = self.part(x).clone()
        self.part.train(training)
        return self.mix(self.part(x)) - target


class Scaled(Part):
    """By the size of its part's first parameter."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Any:
        return self.part(x) * torch.sigmoid(next(self.part.parameters()).float().norm()).to(x.dtype)

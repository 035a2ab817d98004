"""torch's fused AdamW on the CPU is wrong on parameters that are not contiguous; ours must be right, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.odd.nets import ROWS, WIDTH, square
from tests.support.cases import DEFAULT, EACH, EACH_BF16, GROUPED, NVME, Case, Cases

cases = Cases(__name__)
EVERY = (EACH, GROUPED, DEFAULT, EACH_BF16, NVME)


class Strided(nn.Module):
    """A parameter with the given layout; its gradient has another one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.weight.reshape(-1)[: WIDTH * 5].reshape(WIDTH, 5))


def layout(name: str, make: Any) -> None:
    def script(world: Any) -> None:
        torch.manual_seed(3)
        engine = world.initialize(Strided(make()))
        world.train(engine, lambda step: square(engine(world.randn(ROWS, WIDTH, seed=step))))

    script.__name__ = name
    script.__doc__ = f"A parameter that is {name.replace('_', ' ')}."
    cases(must="equal", settings=EVERY)(script)


layout("transposed", lambda: torch.randn(5, WIDTH).t())
layout("permuted", lambda: torch.randn(2, WIDTH, 5).permute(2, 0, 1))
layout("channels_last", lambda: torch.randn(5, 4, 6, 6).to(memory_format=torch.channels_last))
layout("sliced_by_columns", lambda: torch.randn(WIDTH, 10)[:, ::2])
layout("sliced_with_an_offset", lambda: torch.randn(WIDTH * 6)[WIDTH:].view(WIDTH, 5))
layout("sliced_by_rows_of_a_transpose", lambda: torch.randn(10, WIDTH).t()[:, 3:8])


@cases(must="equal", settings=EVERY)
def convolutions_in_channels_last(world: Any) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)).to(memory_format=torch.channels_last)
    engine = world.initialize(model)
    world.train(engine, lambda step: square(engine(world.randn(ROWS, 3, 8, 8, seed=step))))


@cases.parametrized()
def test_fused_adam(case: Case, judged: Any) -> None:
    judged(__name__, case)


def test_torchs_own_is_wrong_or_mended() -> None:
    """What is reported upstream: the moments are made in the layout of the parameter, the gradient keeps its own.

    A release that mends it makes this test skip: then the reference may step such parameters directly.
    """
    torch.manual_seed(0)
    values, gradient = torch.randn(4, 3), torch.randn(4, 3)
    strided = nn.Parameter(values.clone().t().contiguous().t())
    dense = nn.Parameter(values.clone())
    for param in (strided, dense):
        optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        for step in range(2):
            param.grad = gradient * (step + 1)  # row by row, whatever the parameter's strides are
            optimizer.step()
    assert torch.equal(dense.grad, gradient * 2)
    if not torch.equal(strided, dense):
        return  # still wrong: the engine's own bits are what `test_fused_adam` holds

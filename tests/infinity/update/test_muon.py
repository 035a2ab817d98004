"""Muon against the paper's program, operation by operation, and which parameters are matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from infinity.config.optimizer import MuonParams
from infinity.update.muon import Muon, orthogonalised, split_groups
from tests.support.optimizers import PaperMuon
from tests.support.reference import differing_bits

SHAPES = [(12, 5), (5, 12), (7, 7), (9,), (1, 6), (6, 1)]
CHOICES = [(1e-2, 0.95, 0.0), (3e-2, 0.8, 0.1)]
"""Learning rate, momentum, decay."""


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def muon(params: Sequence[nn.Parameter], lr: float, momentum: float, decay: float) -> Muon:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params if p.dim() > 1], "use_muon": True},
        {"params": [p for p in params if p.dim() < 2]},
    ]
    chosen: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": decay, "ns_method": "standard"}
    return Muon([g for g in groups if g["params"]], **chosen)


def give_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for number, param in enumerate(params):
        param.grad = None if (number + step) % 4 == 0 else torch.randn(param.shape, generator=generator)


@pytest.mark.parametrize(("lr", "momentum", "decay"), CHOICES)
def test_it_steps_as_the_papers_program(lr: float, momentum: float, decay: float) -> None:
    ours, paper = parameters(), parameters()
    optimizer = muon(ours, lr, momentum, decay)
    expected = PaperMuon([{"params": paper}], lr, momentum, decay)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(paper, step)
        optimizer.step()
        expected.step()
        assert [differing_bits(a, b) for a, b in zip(ours, paper, strict=True)] == [0] * len(SHAPES)
    assert [group["use_muon"] for group in optimizer.param_groups] == [True, False]


def test_a_convolution_is_a_matrix_of_its_filters_and_a_stack_is_each_matrix() -> None:
    (filters,) = parameters([(6, 2, 3, 2)])
    (matrix,) = parameters([(6, 12)])
    matrix.data.copy_(filters.data.flatten(1))
    (stack,) = parameters([(3, 4, 6)])
    apart = [nn.Parameter(part.detach().clone()) for part in stack]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        filters.grad = torch.randn(filters.shape, generator=generator)
        matrix.grad = filters.grad.flatten(1).clone()
        stack.grad = torch.randn(stack.shape, generator=generator)
        for param, gradient in zip(apart, stack.grad, strict=True):
            param.grad = gradient.clone()
        if step == 0:
            optimizers = [muon(p, 1e-2, 0.9, 0.1) for p in ([filters], [matrix], [stack], apart)]
        for optimizer in optimizers:
            optimizer.step()
    # scaled by the last two sizes: 3 x 2, and not 6 x 12
    assert torch.equal(optimizers[0].state[filters]["exp_avg"].flatten(1), optimizers[1].state[matrix]["exp_avg"])
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in apart]), rtol=1e-2, atol=1e-4)


def test_a_filter_is_scaled_by_its_last_two_sizes() -> None:
    (filters,) = parameters([(4, 3, 8, 2)])
    before = filters.detach().clone()
    filters.grad = torch.ones_like(filters)
    direction = torch.ones_like(filters).lerp(torch.full_like(filters, 0.1), 0.9)
    expected = before.add(
        orthogonalised(direction.flatten(1), "standard").mul(4**0.5).reshape(filters.shape), alpha=-1e-2
    )
    muon([filters], 1e-2, 0.9, 0.0).step()
    torch.testing.assert_close(filters.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8), (3, 4, 9)])
def test_what_is_orthogonalised_has_singular_values_about_one(shape: tuple[int, ...], method: str) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalised(matrix, method).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert orthogonalised(torch.zeros(4, 3), method).isfinite().all()


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8), (3, 4, 9), (64, 300)])
def test_both_ways_to_orthogonalise_are_one_but_for_rounding(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    by_gram, exact = orthogonalised(matrix, "gram"), matrix.double()
    exact = exact / exact.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        products = exact @ exact.mT
        exact = 3.4445 * exact + (-4.7750 * products + 2.0315 * products @ products) @ exact
    torch.testing.assert_close(by_gram.double(), exact, rtol=0, atol=1e-2)


def test_an_exception_leaves_all_groups_there(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = muon(params, *CHOICES[0])
    give_gradients(params, 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("the fused kernel")

    monkeypatch.setattr(optim.AdamW, "step", fail)
    with pytest.raises(RuntimeError, match="the fused kernel"):
        optimizer.step()
    assert len(optimizer.param_groups) == 2


def test_what_a_group_does_not_say_it_has_from_the_defaults() -> None:
    optimizer = Muon([{"params": parameters(), "use_muon": True, "momentum": 0.5}], lr=0.1, momentum=0.7)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"], group["use_muon"], group["fused"]) == (0.1, 0.5, True, True)
    optimizer.add_param_group({"params": parameters()})
    assert (optimizer.param_groups[1]["use_muon"], optimizer.param_groups[1]["momentum"]) == (False, 0.7)


def marked(param: nn.Parameter, use_muon: bool) -> nn.Parameter:
    vars(param)["use_muon"] = use_muon
    return param


MATRIX, VECTOR = (4, 3), (4,)
NAMED: list[tuple[str, tuple[int, ...], bool | None, bool]] = [
    # name, shape, its own attribute, whether it is orthogonalised
    ("layers.0.weight", MATRIX, None, True),
    ("layers.0.bias", VECTOR, None, False),
    ("model.Embed_tokens.weight", MATRIX, None, False),
    ("lm_head.weight", MATRIX, None, False),
    ("lm_head.weight", MATRIX, True, True),
    ("layers.0.weight", MATRIX, False, False),
    ("conv.weight", (2, 3, 4, 5), None, True),
]


@pytest.mark.parametrize(("name", "shape", "told", "expected"), NAMED)
def test_which_parameters_are_matrices(name: str, shape: tuple[int, ...], told: bool | None, expected: bool) -> None:
    param = nn.Parameter(torch.zeros(shape))
    if told is not None:
        marked(param, told)
    (group,) = split_groups([{"params": [param]}], MuonParams(), {id(param): name})
    assert group["use_muon"] is expected


@pytest.mark.parametrize(
    ("section", "own", "rates"),
    [
        ({}, None, (0.02, 3e-4)),
        ({"lr": 0.5}, None, (0.5, 0.5)),
        ({"lr": 0.5, "muon_lr": 0.3}, None, (0.3, 0.5)),
        ({"lr": 0.5, "adam_lr": 0.2}, None, (0.5, 0.2)),
        ({"muon_lr": 0.0, "adam_lr": 0.0}, None, (0.0, 0.0)),
        ({"lr": 0.5, "muon_lr": 0.3}, 0.7, (0.7, 0.7)),
    ],
)
def test_each_half_of_a_group_has_its_rate(
    section: dict[str, float], own: float | None, rates: tuple[float, float]
) -> None:
    matrix, vector = parameters([MATRIX, VECTOR])
    group: dict[str, Any] = {"params": [vector, matrix], "weight_decay": 0.3, **({} if own is None else {"lr": own})}
    split = split_groups([group], MuonParams.model_validate(section), {})
    assert [(each["use_muon"], each["lr"], each["weight_decay"]) for each in split] == [
        (True, rates[0], 0.3),
        (False, rates[1], 0.3),
    ]
    found: list[list[Tensor]] = [each["params"] for each in split]
    assert found[0][0] is matrix
    assert found[1][0] is vector

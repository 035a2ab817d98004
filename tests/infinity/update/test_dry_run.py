"""What watching an optimizer finds out: a table of torch's, and which groups are watched apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from infinity.config import parse_config
from infinity.errors import ConfigError
from infinity.update import dry_run, torch_rule
from infinity.update.algorithms import make_optimizer
from infinity.update.dry_run import Birth, in_words, options_of, unlike
from infinity.update.dry_run import dry_run as watch
from infinity.update.rule import NumberTensor, UpdateRule
from infinity.update.stand_in import StandIn
from infinity.update.torch_rule import rule_of
from tests.infinity.update.test_rules import TensorCounted

Make = Callable[[list[nn.Parameter]], Optimizer]


class NormScaled(optim.SGD):
    """Looks at the norm of each parameter's gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.div_(param.grad.norm())
        return super().step(closure)


class Counted(optim.SGD):
    """Keeps a number beside its buffers, which counts the steps and matters to none."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["seen"] = self.state[param].get("seen", 0) + 1
        return result


class Neighbours(optim.SGD):
    """Looks at the first element of the whole list of parameters: none by itself."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(float(grad.norm()) for grad in grads)
        for grad in grads:
            grad.div_(total)
        return super().step(closure)


TABLE: list[tuple[Make, list[str], set[str], bool]] = [
    # what makes it, states in order, those that are never negative, whether parameters stay whole
    (lambda p: optim.SGD(p, lr=0.1), [], set(), False),
    (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"], set(), False),
    (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), ["momentum_buffer"], set(), False),
    (lambda p: optim.Adam(p), ["exp_avg", "exp_avg_sq"], {"exp_avg_sq"}, False),
    (lambda p: optim.AdamW(p, weight_decay=0.1), ["exp_avg", "exp_avg_sq"], {"exp_avg_sq"}, False),
    (
        lambda p: optim.AdamW(p, amsgrad=True),
        ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        {"exp_avg_sq", "max_exp_avg_sq"},
        False,
    ),
    (lambda p: optim.Adagrad(p), ["sum"], {"sum"}, False),
    (lambda p: optim.Adagrad(p, initial_accumulator_value=0.5), ["sum"], {"sum"}, False),
    (lambda p: optim.Adadelta(p), ["square_avg", "acc_delta"], {"square_avg", "acc_delta"}, False),
    (lambda p: optim.Adamax(p), ["exp_avg", "exp_inf"], {"exp_inf"}, False),
    (lambda p: optim.RMSprop(p), ["square_avg"], {"square_avg"}, False),
    (lambda p: optim.RMSprop(p, momentum=0.9), ["square_avg", "momentum_buffer"], {"square_avg"}, False),
    (lambda p: NormScaled(p, lr=0.1), [], set(), True),
    (lambda p: NormScaled(p, lr=0.1, momentum=0.9), ["momentum_buffer"], set(), True),
    (lambda p: Counted(p, lr=0.1, momentum=0.9), ["momentum_buffer"], set(), False),
]


def found_of(make: Make) -> UpdateRule:
    return rule_of(make([nn.Parameter(torch.zeros(4, 4))]), dtype=torch.float32)


@pytest.mark.parametrize(("make", "states", "unsigned", "whole"), TABLE)
def test_what_is_found(make: Make, states: list[str], unsigned: set[str], whole: bool) -> None:
    rule = found_of(make)
    assert list(rule.states) == states
    assert rule.unsigned == unsigned
    assert rule.whole_groups == ({0} if whole else set())
    kinds = dict(zip(rule.states, rule.state_kinds, strict=True))
    assert rule.unsigned_kinds == [kinds[label] for label in states if label in unsigned]
    assert rule.markers == next((kinds[label] for label in states if label in unsigned), None)


def test_a_state_that_is_neither_number_nor_tensor_is_refused() -> None:
    class Noted(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param]["note"] = "stepped"
            return super().step(closure)

    with pytest.raises(ConfigError, match="Noted"):
        rule_of(Noted([nn.Parameter(torch.ones(3))], lr=0.1), dtype=torch.float32)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_states_of_16_bits_are_never_taken_for_unsigned(weights: torch.dtype) -> None:
    rule = rule_of(optim.AdamW([nn.Parameter(torch.zeros(4, 4))]), dtype=weights)
    assert bool(rule.unsigned) == (weights is torch.float32)


def test_a_state_is_unsigned_only_if_no_group_gives_it_a_sign() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "centered": True, "momentum": 0.5}]
    rule = rule_of(optim.RMSprop(groups), dtype=torch.float32)
    assert set(rule.states) == {"square_avg", "momentum_buffer", "grad_avg"}
    assert rule.unsigned == {"square_avg"}


def test_what_no_parameter_has_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="by itself"):
        found_of(lambda p: Neighbours(p, lr=0.1))


@pytest.mark.parametrize(
    ("groups", "num_ways"),
    [
        ([{"lr": 0.1}, {"lr": 3.0}], 1),  # the size of a number is no other way
        ([{"lr": 1}, {"lr": 0.5}], 1),
        ([{"weight_decay": 0.0}, {"weight_decay": 0.1}], 2),  # whether it is zero is
        ([{"momentum": 0}, {"momentum": 0.0}], 1),
        ([{"a": 1, "b": 2}, {"b": 5, "a": 7}], 1),  # in whatever order they are written
        ([{"a": 1.0, "b": 0}, {"a": 0, "b": 1.0}], 2),
        ([{"amsgrad": False}, {"amsgrad": True}], 2),
        ([{"foreach": None}, {"foreach": False}], 2),  # both are nothing, and not the same
        ([{"method": "newton"}, {"method": "gram"}], 2),  # both are something
        ([{"betas": (0.9, 0.99)}, {"betas": (0.9, 0.0)}], 2),
        ([{"lr": 1.0}, {"lr": 1.0, "more": 1.0}], 2),
    ],
)
def test_groups_that_take_the_same_way_are_watched_once(groups: Sequence[dict[str, Any]], num_ways: int) -> None:
    ways = unlike(groups, closely=False)
    assert len(ways) == num_ways
    assert all(options in groups for options in ways.values())


def test_a_tensor_of_several_elements_among_the_options_is_no_number() -> None:
    """Whether it is zero has no answer, as torch says."""
    some, other = {"of_channels": torch.ones(2)}, {"of_channels": torch.zeros(2)}
    assert len(unlike([some, {**some}, other, {"of_channels": torch.ones(0)}], closely=False)) == 3
    assert len(unlike([{"lr": torch.tensor(0.1)}, {"lr": torch.tensor(3.0)}], closely=False)) == 1


def test_each_way_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = []

    def noted(stand_in: Any, options: Any, *rest: Any) -> Any:
        watched.append((options["lr"], options["momentum"]))
        return watch(stand_in, options, *rest)

    monkeypatch.setattr(torch_rule, "dry_run", noted)
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    given = ((0.1, 0.5), (0.0, 0.7), (0.2, 0.0))  # at a rate of 0, as before a warm-up, as at any
    groups: list[dict[str, Any]] = [
        {"params": [p], "lr": lr, "momentum": momentum} for p, (lr, momentum) in zip(params, given, strict=True)
    ]
    rule_of(optim.SGD(groups), dtype=torch.float32)
    assert watched == [(0.0, 0.7), (0.2, 0.0)]


@pytest.mark.parametrize(("make", "from_zeros"), [(optim.AdamW, True), (optim.Adagrad, True), (NormScaled, True)])
def test_history_of_zeros(make: Any, from_zeros: bool) -> None:
    assert found_of(lambda p: make(p, lr=0.1)).from_zeros == from_zeros


def test_a_first_step_that_takes_the_gradient_does_not_go_on_from_zeros() -> None:
    """SGD's dampening is not applied to the first gradient."""
    assert not found_of(lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)).from_zeros
    assert not found_of(lambda p: optim.Adagrad(p, initial_accumulator_value=0.5)).from_zeros


def test_what_is_kept_once_has_its_type() -> None:
    def numbers(make: Make) -> Any:
        optimizer = make([nn.Parameter(torch.zeros(4))])
        (options,) = options_of(optimizer)
        births: dict[str, Birth] = dict(dry_run.births_of(optimizer))
        return watch(StandIn(optimizer), options, births, torch.float32).numbers

    assert numbers(lambda p: optim.AdamW(p)) == {"step": NumberTensor(torch.float32)}
    assert numbers(lambda p: TensorCounted(p, lr=0.1)) == {"seen": NumberTensor(torch.int64, (1,))}
    assert numbers(lambda p: Counted(p, lr=0.1)) == {"seen": int}
    assert numbers(lambda p: optim.SGD(p, lr=0.1)) == {}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("AdamW", {"weight_decay": 0.1}),
        ("AdamW", {"weight_decay": 0.1, "bias_correction": False}),
        ("Lion", {"weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("Adagrad", {"weight_decay": 0.1}),
    ],
)
def test_a_parameter_without_a_gradient_neither_moves_nor_gets_state(kind: str, params: dict[str, Any]) -> None:
    """As torch's: decay is a part of the step that it does not take."""
    config = parse_config({"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}})
    assert config.optimizer is not None
    optimizer = make_optimizer(config.optimizer, [{}])
    (group,) = optimizer.param_groups
    still, moved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    group["params"][:] = [still, moved]
    optimizer.state.clear()
    if kind == "Adagrad":
        for param in (still, moved):
            optimizer.state[param] = {"step": torch.tensor(0.0), "sum": torch.zeros(3)}
    moved.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(still, torch.ones(3))
    assert not torch.equal(moved, torch.ones(3))
    state = optimizer.state.get(still, {})
    assert not state or (kind == "Adagrad" and not state["sum"].any())


def test_an_empty_parameter_is_born_as_the_others_are() -> None:
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.empty(0, 2))]
    rule = rule_of(optim.Adagrad(params, initial_accumulator_value=0.5), dtype=torch.float32)
    assert list(rule.states) == ["sum"]


def test_ranks_are_told_numbers_and_words_wherever_they_lie_and_no_names_or_addresses() -> None:
    options = {
        "lr": torch.tensor(0.5),
        "betas": (torch.tensor(0.25), 0.5),
        "schedule": {"warm": [1, len]},
        "table": torch.zeros(1000),
        "params": [0, 1],
        "param_names": ["weight", "bias"],
        "function": len,
    }
    told = "lr 0.5 betas (0.25, 0.5) schedule (warm (1, builtin_function_or_method)) table a tensor of 1000"
    assert in_words([options, dict(options)]) == told

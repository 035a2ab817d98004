"""Optimizers that somebody else wrote: what they ask beside elements is found in their dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import infinity
from infinity.errors import ConfigError, EngineStateError
from infinity.update.rule import Call
from infinity.update.torch_rule import rule_of
from infinity.update.watched import glance, steppers_in


class Factored(optim.Optimizer):
    """SGD times what ``factor`` says of a parameter and its place."""

    def __init__(self, params: Any, factor: Callable[..., float], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.factor = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.factor(self, group, number, i, p))


class Counting(Factored):
    """The factor sees how many steps a parameter has taken."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
        super().step()


class Wrapping(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.parts = {"inner": [optim.SGD(self.param_groups[0]["params"], lr=0.1)]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts["inner"]:
            part.step()


class Idle(optim.Optimizer):
    """Steps what it has noted, and not what it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.noted = tuple(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.noted:
            if p.grad is not None:
                p.sub_(p.grad)


class Late(Counting):
    """Keeps something from its tenth step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            if state["step"] > 10:
                state["mean"] = 1.0


def params() -> list[nn.Parameter]:
    found = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3))]
    found[1].rate_scale = 0.5  # type: ignore[attr-defined]
    return found


def _counts(optimizer: Any, *_: Any) -> float:
    optimizer.counts["steps"] += 1
    return 1.0


def _with_counts(given: Any) -> optim.Optimizer:
    made = Factored(given, _counts)
    made.counts = {"steps": 0}  # type: ignore[attr-defined]
    return made


def _steps_of_its_group(_optimizer: Any, group: dict[str, Any], *_: Any) -> float:
    group["step"] = group.get("step", 0) + 1
    return 1 / float(group["step"])


def _centred(_optimizer: Any, _group: Any, _number: int, _i: int, param: Any) -> float:
    """What raises for a matrix, and not for a convolution."""
    try:
        return float(param.mean(dim=(1, 2, 3))[0])
    except IndexError:
        return 1.0


def _with_a_set(given: Any) -> optim.Optimizer:
    made = Factored(given, lambda optimizer, _group, _number, _i, p: 0.5 if p in optimizer.slow else 1.0)
    made.slow = {made.param_groups[0]["params"][1]}  # type: ignore[attr-defined]
    return made


REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "holds another optimizer": (Wrapping, r"holds another .*\(SGD\)"),
    "steps something else": (Idle, "changed nothing in its step"),
    "an attribute": (lambda given: Factored(given, lambda *args: getattr(args[-1], "rate_scale", 1.0)), "rate_scale"),
    "a set of parameters": (_with_a_set, "asks which parameter"),
    "the group's place": (
        lambda given: Factored(given, lambda _o, _g, number, *_: (1.0, 0.5)[number]),
        "another place",
    ),
    "the place in its group": (lambda given: Factored(given, lambda _o, _g, _n, i, _p: 0.9**i), "another place"),
    "the group's length": (lambda given: Factored(given, lambda _o, g, *_: 1 / len(g["params"])), "another place"),
    "counts in a dict": (_with_counts, "keeps counts for all parameters together"),
    "counts in its group": (lambda given: Factored(given, _steps_of_its_group), r"keeps step .*self\.state\[param\]"),
    "keeps something late": (lambda given: Late(given, lambda *_: 1.0), "other things after 10 steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_parts_of_parameters_cannot_show_is_refused_by_name(case: str) -> None:
    make, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        rule_of(make(params()), dtype=torch.float32)


@pytest.mark.parametrize(
    "factor",
    [
        lambda *args: 1.0 if args[-1].dim() > 3 else 0.5,
        lambda *args: 1.0 if args[-1].numel() < 20 else 0.5,
        _centred,
        lambda *args: 1.0 if args[-1].grad.double().shape[0] == 4 else 0.5,
        lambda *args: 1.0 if len(args[-1]) == 3 else 0.5,
    ],
)
def test_who_asks_for_a_shape_gets_whole_parameters(factor: Any) -> None:
    assert rule_of(Factored(params(), factor), dtype=torch.float32).whole_groups == {0}


def test_who_looks_at_norms_after_many_steps_gets_whole_parameters() -> None:
    def factor(optimizer: Any, *args: Any) -> float:
        p = args[-1]
        return 1.0 if optimizer.state[p]["step"] < 5000 else float(1 / p.grad.norm())

    assert rule_of(Counting(params(), factor), dtype=torch.float32).whole_groups == {0}
    assert not rule_of(Counting(params(), lambda *_: 1.0), dtype=torch.float32).whole_groups


class Deciding(optim.Optimizer):
    """SGD that passes over what ``passes`` says, of a parameter's gradient or of those of its group."""

    def __init__(self, params: Any, passes: Callable[[Any, Any], Any], of_all: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.passes, self.of_all = passes, of_all

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            if self.of_all and any(self.passes(p.grad, group) for p in with_grad):
                return
            for p in with_grad:
                if not self.passes(p.grad, group):
                    p.mul_(0.99).sub_(group["lr"] * p.grad)


DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "not finite": lambda grad, _: not torch.isfinite(grad).all(),
    "a sum that is NaN": lambda grad, _: bool(grad.sum().isnan()),
    "zeros": lambda grad, _: not grad.any(),
    "tiny": lambda grad, _: grad.norm() < 1e-6,
    "large": lambda grad, _: grad.abs().max() > 1e5,
    "sparse": lambda grad, _: (grad != 0).float().mean() < 0.5,
    "the first element": lambda grad, _: grad.reshape(-1)[0] > 0,
    "a far norm": lambda grad, _: grad.norm() > 1e30,
    "infinite squares": lambda grad, _: torch.isinf((grad * grad).sum()),
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_who_decides_by_a_gradient_gets_whole_parameters(decision: str) -> None:
    """Gradients of every day show nothing of it, and parts were passed over apart, in silence."""
    assert rule_of(Deciding(params(), DECISIONS[decision]), dtype=torch.float32).whole_groups == {0}
    by_element = rule_of(Deciding(params(), lambda grad, _: grad is None), dtype=torch.float32)
    assert not by_element.whole_groups


@pytest.mark.parametrize("decision", ["not finite", "a sum that is NaN", "large", "infinite squares"])
def test_who_decides_by_gradients_of_others_is_refused(decision: str) -> None:
    with pytest.raises(ConfigError, match="beside another whose gradients are"):
        rule_of(Deciding(params(), DECISIONS[decision], of_all=True), dtype=torch.float32)


def test_who_refuses_a_gradient_as_in_plain_torch_is_not_refused() -> None:
    def passes(grad: Any, _group: Any) -> bool:
        if bool(torch.isnan(grad).any()):
            raise ValueError("a gradient is NaN")
        return False

    rule_of(Deciding(params(), passes), dtype=torch.float32)


def test_who_does_something_else_at_a_smaller_rate_is_looked_at_there() -> None:
    def factor(_optimizer: Any, group: Any, *args: Any) -> float:
        return float(1 / args[-1].grad.norm()) if group["lr"] < threshold else 1.0

    threshold = 0.05
    assert rule_of(Factored(params(), factor), dtype=torch.float32).whole_groups == {0}
    threshold = 1e-5  # beyond what is looked at before
    rule = rule_of(Factored(params(), factor), dtype=torch.float32)
    assert not rule.whole_groups
    rule.check([{"lr": 1e-4}])
    with pytest.raises(EngineStateError, match="needs its states in another form"):
        rule.check([{"lr": 1e-6}])


class Rebinding(optim.Optimizer):
    """Has another tensor in the place of a parameter's memory after its step."""

    def __init__(self, params: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = (p.data - group["lr"] * p.grad).to(self.dtype or p.dtype)


def test_what_takes_the_place_of_a_parameter_is_kept_where_that_was() -> None:
    """Pieces lie in frames: what was put beside them was lost, and nothing was trained."""
    rule = rule_of(Rebinding(params()), dtype=torch.float32)
    memory = torch.ones(8)
    rule.run(Call(params=[memory[:4], memory[4:]], grads=[torch.ones(4)] * 2, states=[(), ()]), None, {"lr": 0.5})
    assert memory.tolist() == [0.5] * 8
    with pytest.raises(ConfigError, match=r"makes torch\.float64"):
        rule_of(Rebinding(params(), torch.float64), dtype=torch.float32)


class Waiting(optim.Optimizer):
    """Begins to keep a mean with the first gradient that is not zero."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.any():
                    state = self.state[p]
                    state["mean"] = state["mean"].lerp(p.grad, 0.5) if "mean" in state else p.grad.clone()
                    p.sub_(group["lr"] * state["mean"])


def test_a_parameter_that_is_passed_over_has_its_first_step_before_it() -> None:
    rule = rule_of(Waiting(params()), dtype=torch.float32)
    assert not rule.from_zeros
    call = Call(params=[torch.ones(8)], grads=[torch.zeros(8)], states=[(torch.zeros(8),)], whole=True)
    assert rule.run(call, None, {"lr": 0.5}) is None
    call.grads[0] = torch.ones(8)
    assert rule.run(call, None, {"lr": 0.5}) == ()
    assert call.params[0].tolist() == [0.5] * 8
    assert call.states[0][0].tolist() == [1.0] * 8


def test_a_warm_up_from_zero_hides_nothing() -> None:
    """With a rate of 0 no step shows anything."""

    def factor(*args: Any) -> float:
        return float(1 / args[-1].grad.norm())

    for rate in (0.0, torch.tensor(0.0)):
        rule = rule_of(Factored(params(), factor, lr=rate), dtype=torch.float32)
        assert rule.whole_groups == {0}
        rule.check([{"lr": 0.1 if isinstance(rate, float) else torch.tensor(0.1)}])


def test_parts_pass_for_parameters() -> None:
    rule = rule_of(Factored(params(), lambda *args: float(isinstance(args[-1], nn.Parameter))), dtype=torch.float32)
    call = Call(params=[torch.ones(8)], grads=[torch.ones(8)], states=[()])
    rule.run(call, None, {"lr": 0.5})
    assert call.params[0].tolist() == [0.5] * 8
    assert not rule.whole_groups


def test_its_attributes_are_those_of_the_step() -> None:
    """Chunks are stepped after it, when somebody uses them."""
    optimizer = Factored(params(), lambda optimizer, *_: optimizer.scale)
    optimizer.scale = 1.0  # type: ignore[attr-defined]
    rule = rule_of(optimizer, dtype=torch.float32)
    stepped = []
    for scale in (1.0, 0.5):
        optimizer.scale = scale  # type: ignore[attr-defined]
        rule.check([{"lr": 0.5}])
        optimizer.scale = 7.0  # type: ignore[attr-defined]
        call = Call(params=[torch.ones(8)], grads=[torch.ones(8)], states=[()])
        rule.run(call, None, {"lr": 0.5})
        stepped.append(call.params[0][0].item())
    assert stepped == [0.5, 0.75]


def test_options_that_need_another_state_are_refused_before_the_step() -> None:
    rule = rule_of(optim.SGD(params(), lr=0.1), dtype=torch.float32)
    (options,) = [{k: v for k, v in group.items() if k != "params"} for group in optim.SGD(params()).param_groups]
    rule.check([{**options, "weight_decay": 0.1, "lr": 0.0}])
    with pytest.raises(EngineStateError, match=r"param_groups\[0\] .* SGD keeps momentum_buffer"):
        rule.check([{**options, "momentum": 0.9}])


def test_options_of_another_group_that_is_stepped_whole_are_refused() -> None:
    def factor(_optimizer: Any, group: Any, *args: Any) -> float:
        return float(1 / args[-1].grad.norm()) if group["by_norm"] else 1.0

    given = [{"params": [param], "by_norm": i == 0} for i, param in enumerate(params())]
    rule = rule_of(Factored(given, factor), dtype=torch.float32)
    assert rule.whole_groups == {0}
    options = [{"lr": 0.1, "by_norm": True}, {"lr": 0.2, "by_norm": False}]
    rule.check(options)
    with pytest.raises(EngineStateError, match=r"param_groups\[1\] .* needs its states in another form"):
        rule.check([options[0], options[0]])


def test_what_is_begun_to_be_kept_is_refused() -> None:
    def factor(optimizer: Any, _group: Any, _number: int, _i: int, p: Any) -> float:
        if optimizer.late:
            optimizer.state[p]["more"] = 1.0
        return 1.0

    optimizer = Factored(params(), factor)
    optimizer.late = False  # type: ignore[attr-defined]
    rule = rule_of(optimizer, dtype=torch.float32)
    optimizer.late = True  # type: ignore[attr-defined]
    rule.check([{"lr": 0.1}])
    with pytest.raises(EngineStateError, match="has begun to keep more"):
        rule.run(Call(params=[torch.ones(8)], grads=[torch.ones(8)], states=[()]), None, {"lr": 0.1})


def test_hooks_for_all_optimizers_hear_of_no_part() -> None:
    called: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *args: called.append(args))
    try:
        rule = rule_of(optim.SGD(params(), lr=0.1), dtype=torch.float32)
        rule.run(
            Call(params=[torch.ones(8)], grads=[torch.ones(8)], states=[()]), None, {**optim.SGD(params()).defaults}
        )
        assert called == []
        optim.SGD(params(), lr=0.1).step()
        assert len(called) == 1
    finally:
        handle.remove()


class Plain:
    def __init__(self) -> None:
        self.count, self.inside = 0, {"a": [1.0]}


def test_a_glance_sees_what_was_changed_in_place() -> None:
    tensor, plain = torch.zeros(2), Plain()
    held: dict[str, Any] = {"tensor": tensor, "plain": plain, "set": {1}, "long": [0] * 1000, "none": None}
    before = glance(held)
    assert glance(held) == before
    for change in (
        lambda: tensor.add_(1),
        lambda: plain.inside["a"].append(2.0),
        lambda: setattr(plain, "count", 1),
        lambda: held["set"].add(2),
        lambda: held["long"].append(1),
        lambda: held.update(none=0),
    ):
        change()
        assert glance(held) != before
        before = glance(held)


def test_steppers_are_found_wherever_they_are_held() -> None:
    sgd = optim.SGD(params(), lr=0.1)
    plain = Plain()
    plain.inside["a"] = [optim.lr_scheduler.ExponentialLR(sgd, 0.5)]  # type: ignore[list-item]
    assert steppers_in({"a": [sgd], "b": plain, "c": {sgd}}) == ["SGD", "ExponentialLR", "SGD"]
    assert steppers_in({"a": 1, "b": torch.zeros(1), "c": nn.Linear(1, 1)}) == []


class Slow(optim.Optimizer):
    """SGD that keeps ``slow`` from the step ``first`` to the step ``last``, and mixes it in while it is there."""

    def __init__(self, params: Any, first: int, last: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.first, self.last = first, last

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                p.add_(p.grad, alpha=-group["lr"])
                if state["steps"] == self.first:
                    state["slow"] = p.clone()
                if "slow" in state:
                    p.lerp_(state["slow"], 0.5)
                if state["steps"] == self.last:
                    del state["slow"]


@pytest.mark.parametrize(("first", "last"), [(2, 0), (3, 0), (8, 0), (1, 4), (3, 5)])
def test_a_state_that_comes_or_goes_later_is_refused(first: int, last: int) -> None:
    """It was given as zero in the steps before it was made, and mixed into weights."""
    model = nn.Linear(4, 1)
    with pytest.raises(ConfigError, match=r"'Slow': begins or ceases to keep slow after its first step"):
        infinity.initialize(
            model=model,
            optimizer=Slow(model.parameters(), first, last),
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}},
        )

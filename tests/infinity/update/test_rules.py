"""Every rule steps as the optimizer that it was taken from, bit by bit; what is not element-wise is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import infinity
import infinity.utils
from infinity.deepspeed.optimizers import FusedAdam
from infinity.errors import ConfigError, EngineStateError
from infinity.update.algorithms import Lion
from infinity.update.rule import Call
from infinity.update.torch_rule import SLICE_NUMEL, rule_of
from tests.support.optimizers import PaperLion, PaperMuon
from tests.support.ranks import run_ranks
from tests.support.reference import differing_bits

NUM_STEPS = 50
Make = Callable[[Iterable[Any]], optim.Optimizer]


class Small(nn.Module):
    """Two matrices, the first one of more than a chunk, a gate that only every second step uses, and two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(131, 191)
        self.gate = nn.Parameter(torch.randn(191))
        self.narrow = nn.Linear(191, 67)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, *, gated: bool) -> Tensor:
        hidden = torch.tanh(self.wide(x)) * self.scale + self.shift
        output: Tensor = self.narrow(hidden * self.gate if gated else hidden)
        return output.square().mean()


pytestmark = pytest.mark.usefixtures("one_thread")


def small() -> Small:
    torch.manual_seed(3)
    return Small()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with options of their own, everything else with the defaults."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": matrices, "lr": 2e-3}, {"params": [p for p in model.parameters() if p.dim() <= 1]}]


def batch(step: int) -> tuple[Tensor, bool]:
    return torch.randn(3, 131, generator=torch.Generator().manual_seed(step)), step % 2 == 0


def plain_weights(make: Make, num_steps: int = NUM_STEPS) -> dict[str, Tensor]:
    model = small()
    optimizer = make(groups_of(model))
    for step in range(num_steps):
        x, gated = batch(step)
        model(x, gated=gated).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: value.detach() for name, value in model.state_dict().items()}


def engine_weights(make: Make | None, num_steps: int = NUM_STEPS, **config: Any) -> dict[str, Tensor]:
    """``make`` None: the configuration names the optimizer."""
    model = small()
    own: dict[str, Any] = {"model_parameters": groups_of(model)} if make is None else {}
    if make is not None:
        own["optimizer"] = make(groups_of(model))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "sub_group_size": 16384, "stage3_param_persistence_threshold": 0},
        **config,
    }
    with infinity.initialize(model=model, config=settings, **own)[0] as engine:
        for step in range(num_steps):
            x, gated = batch(step)
            engine.backward(engine(x, gated=gated))
            engine.step()
        weights: dict[str, Tensor] = engine.full_state_dict()
        return weights


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert {name: differing_bits(left[name], right[name]) for name in right} == dict.fromkeys(right, 0)


FUSED = (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW)
OPTIMIZERS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.3}),
    (optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "maximize": True}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (optim.RMSprop, {"lr": 0.01}),
    (optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01, "momentum_decay": 0.01}),
    (optim.RAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
    (optim.Adadelta, {"lr": 1.0}),
    (optim.ASGD, {"lr": 0.01, "t0": 10}),
    (optim.Rprop, {"lr": 0.01}),
]


class TensorCounted(optim.SGD):
    """Keeps a count for each parameter in a tensor of one element, beginning with the constructor."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"seen": torch.tensor([3]), "sum": torch.zeros_like(param)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                state["seen"] += 1
                state["sum"] += param.grad
                param.sub_(group["lr"] * state["sum"] / state["seen"].to(param.dtype).view(()))


@pytest.mark.parametrize(
    ("kind", "options"), [*OPTIMIZERS, (TensorCounted, {"lr": 0.1})], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_client_optimizer_steps_as_torch_does(kind: Any, options: dict[str, Any]) -> None:
    """Where the user leaves it to torch which of its codes runs, it is the one that torch runs."""
    expected = plain_weights(lambda groups: kind(groups, **options))
    assert_equal(engine_weights(lambda groups: kind(groups, **options)), expected)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("fused", [True, False])
def test_the_code_of_torchs_that_is_asked_for_is_run(kind: Any, fused: bool) -> None:
    def make(groups: Iterable[Any]) -> optim.Optimizer:
        optimizer: optim.Optimizer = kind(groups, lr=0.01, weight_decay=0.1, fused=fused)
        return optimizer

    assert_equal(engine_weights(make, 10), plain_weights(make, 10))


@pytest.mark.parametrize("prefers_fused", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_large_pieces_are_stepped_in_slices_to_the_bit(kind: Any, prefers_fused: bool) -> None:
    """Torch's fused code and its single operations differ in some elements of a hundred thousand after some steps."""
    numel = 2 * SLICE_NUMEL + 4_003
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(numel, generator=generator)
    own, piece = nn.Parameter(values.clone()), values.clone()
    plain = kind([own], lr=1e-2, fused=prefers_fused or None)
    rule = rule_of(kind([nn.Parameter(torch.zeros(1))], lr=1e-2), dtype=torch.float32, prefers_fused=prefers_fused)
    states, history = tuple(torch.zeros(numel) for _ in rule.states), None
    options = {name: value for name, value in plain.param_groups[0].items() if name != "params"} | {"fused": None}
    for _ in range(20):
        own.grad = torch.randn(numel, generator=generator) * 1e-3
        history = rule.run(Call(params=[piece], grads=[own.grad.clone()], states=[states]), history, options)
        plain.step()
    assert torch.equal(piece, own.detach())


NAMED: list[tuple[str, dict[str, Any], Make]] = [
    ("adamw", {"lr": 0.01, "weight_decay": 0.1}, lambda g: optim.AdamW(g, lr=0.01, weight_decay=0.1, fused=True)),
    (
        "Adam",
        {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True},
        lambda g: optim.Adam(g, lr=0.01, weight_decay=0.1),
    ),
    ("Adam", {"lr": 0.01, "torch_adam": True}, lambda g: optim.AdamW(g, lr=0.01)),
    ("AdamW", {"lr": 0.01, "amsgrad": True}, lambda g: optim.AdamW(g, 0.01, weight_decay=0, amsgrad=True, fused=True)),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    ),
    (
        "sgd",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        lambda g: optim.SGD(g, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    ),
    (
        "adagrad",
        {"lr": 0.1, "lr_decay": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.1},
        lambda g: optim.Adagrad(g, lr=0.1, lr_decay=0.01, eps=1e-8, initial_accumulator_value=0.1, fused=True),
    ),
    ("Lion", {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}, lambda g: PaperLion(g, 1e-3, (0.9, 0.99), 0.1)),
    ("AdamW", {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1}, lambda g: PaperAdam(g, 0.01, 0.1)),
    (
        "Adam",
        {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1, "betas": [0.8, 0.9]},
        lambda g: FusedAdam(g, 0.01, bias_correction=False, weight_decay=0.1, betas=(0.8, 0.9)),
    ),
    (
        "Adam",
        {"lr": 0.01, "bias_correction": False, "weight_decay": 0.1, "betas": [0.8, 0.9], "adam_w_mode": False},
        lambda g: FusedAdam(g, 0.01, False, adam_w_mode=False, weight_decay=0.1, betas=(0.8, 0.9)),
    ),
    (
        "rmsprop",
        {"lr": 0.01, "alpha": 0.9, "centered": True, "momentum": 0.9},
        lambda g: optim.RMSprop(g, lr=0.01, alpha=0.9, centered=True, momentum=0.9),
    ),
    ("Adadelta", {"rho": 0.8, "eps": 1e-5}, lambda g: optim.Adadelta(g, rho=0.8, eps=1e-5)),
    ("adamax", {"lr": 0.01, "weight_decay": 0.1}, lambda g: optim.Adamax(g, lr=0.01, weight_decay=0.1)),
    (
        "NAdam",
        {"lr": 0.01, "momentum_decay": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
        lambda g: optim.NAdam(g, lr=0.01, momentum_decay=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    ),
    ("RAdam", {"betas": [0.8, 0.9]}, lambda g: optim.RAdam(g, betas=(0.8, 0.9))),
    ("ASGD", {"lambd": 1e-3, "alpha": 0.8, "t0": 10}, lambda g: optim.ASGD(g, lambd=1e-3, alpha=0.8, t0=10)),
    ("Rprop", {"etas": [0.4, 1.3], "step_sizes": [1e-5, 10]}, lambda g: optim.Rprop(g, 0.01, (0.4, 1.3), (1e-5, 10))),
    (
        "muon",
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "ns_method": "standard"},
        lambda g: PaperMuon(g, 0.01, 0.9, 0.1),
    ),
]


class PaperAdam(optim.Optimizer):
    """AdamW without the correction of its moments."""

    def __init__(self, params: Iterable[Any], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
                m.copy_(0.9 * m + 0.1 * p.grad)
                v.copy_(0.999 * v + 0.001 * p.grad.square())
                p.copy_(p - group["lr"] * (m / (v.sqrt() + 1e-8) + group["weight_decay"] * p))


@pytest.mark.parametrize(("kind", "params", "make"), NAMED, ids=[f"{kind}-{len(params)}" for kind, params, _ in NAMED])
def test_an_optimizer_of_the_configuration_steps_as_torch_or_the_paper(
    kind: str, params: dict[str, Any], make: Make
) -> None:
    found = engine_weights(None, optimizer={"type": kind, "params": params})
    expected = plain_weights(make)
    if isinstance(make([nn.Parameter(torch.zeros(1))]), PaperAdam):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-6)
    else:
        assert_equal(found, expected)


# What looks at whole parameters


class Clipped(optim.SGD):
    """Scales each parameter's update by the norm of its gradient."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.grad.div_(p.grad.norm())
        super().step()


class Rowwise(optim.SGD):
    """Is element-wise on vectors alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=0))
        super().step()


class Layerwise(optim.Optimizer):
    """LAMB: Adam's direction, scaled by the norms of weights and direction."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                m = state["m"].mul_(0.9).add_(p.grad, alpha=0.1) / (1 - 0.9 ** state["step"])
                v = state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01) / (1 - 0.99 ** state["step"])
                direction = m / (v.sqrt() + 1e-6) + 0.01 * p
                p.add_(direction, alpha=float(-group["lr"] * p.norm() / direction.norm().clamp(min=1e-6)))


WHOLE: list[Make] = [
    lambda groups: Clipped(groups, lr=0.1, momentum=0.9),
    lambda groups: Rowwise(groups, lr=0.1),
    lambda groups: Layerwise(groups, lr=0.01),
]


@pytest.mark.parametrize("make", WHOLE, ids=["Clipped", "Rowwise", "Layerwise"])
def test_an_optimizer_that_looks_at_whole_parameters_steps_them_whole(make: Make) -> None:
    assert rule_of(make(groups_of(small())), dtype=torch.float32).whole_groups == {0, 1}
    assert_equal(engine_weights(make, 12), plain_weights(make, 12))


class Matrices(nn.Module):
    """Nothing but matrices, wide, tall and transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.wide, self.tall = nn.Linear(131, 191, bias=False), nn.Linear(191, 67, bias=False)
        self.tall.weight = nn.Parameter(self.tall.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.tall(torch.tanh(self.wide(x)))
        return output.square().mean()


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("offload", ["none", "nvme"])
def test_torchs_muon_steps_as_it_does_by_itself(offload: str, tmp_path: Path) -> None:
    plain, ours = Matrices(), Matrices()
    expected = optim.Muon(plain.parameters(), lr=0.05)
    section = {"device": offload, "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 16384, "offload_optimizer": section}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with infinity.initialize(model=ours, config=config, optimizer=optim.Muon(ours.parameters(), lr=0.05))[0] as engine:
        for step in range(NUM_STEPS):
            x = torch.randn(3, 131, generator=torch.Generator().manual_seed(step))
            plain(x).backward()
            expected.step()  # type: ignore[no-untyped-call]
            expected.zero_grad()
            engine.backward(engine(x))
            engine.step()
        assert_equal(engine.full_state_dict(), dict(plain.state_dict()))
        momentum = infinity.utils.safe_get_full_optimizer_state(ours.tall.weight, "momentum_buffer")
        assert momentum is not None
        assert differing_bits(momentum, expected.state[plain.tall.weight]["momentum_buffer"]) == 0


MUON = {"type": "Muon", "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}}


def test_muon_on_two_ranks_steps_as_on_one(tmp_path: Path) -> None:
    """Both ranks have the same batches, so that their mean is each one's gradient."""
    code = f"""
    import json, torch
    from tests.infinity.update.test_rules import MUON, engine_weights
    nvme = {{"device": "nvme", "nvme_path": {str(tmp_path)!r}}}
    zero = {{"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": nvme, "offload_param": nvme}}
    weights = engine_weights(None, 10, optimizer=MUON, zero_optimization=zero, gradient_clipping=0.5)
    print(json.dumps({{name: value.flatten().tolist() for name, value in weights.items()}}))
    """
    alone = engine_weights(None, 10, optimizer=MUON, gradient_clipping=0.5)
    for rank in run_ranks(code, tmp_path, num_ranks=2):
        assert rank.answer == {name: value.flatten().tolist() for name, value in alone.items()}


def test_muon_of_the_configuration_leaves_embeddings_to_adam() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
            self.kept = nn.Parameter(torch.zeros(4, 4))
            vars(self.kept)["use_muon"] = False

    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": 0.3, "adam_lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    optimizer = infinity.initialize(model=model, config=config)[1]
    assert optimizer is not None
    matrices, rest = optimizer.param_groups
    assert (matrices["use_muon"], matrices["lr"]) == (True, 0.3)
    assert [id(param) for param in matrices["params"]] == [id(model.inner.weight)]
    assert (rest["use_muon"], rest["lr"], len(rest["params"])) == (False, 0.1, 5)


# What cannot be sharded


class Together(optim.SGD):
    """Scales all updates by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.div_(norm)
        super().step()


class Noisy(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(torch.randn_like(p))
        super().step()


class CountsInGroup(optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            group["lr"] = group["lr"] * 0.9
        super().step()


class CountsInItself(optim.SGD):
    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        super().step()


class Greedy(optim.Optimizer):
    """Keeps five states."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for i in range(5):
                    self.state[p][f"s{i}"] = p.grad.clone()
                p.sub_(p.grad)


REFUSED: list[tuple[Callable[..., optim.Optimizer], str]] = [
    (optim.LBFGS, "cannot step parts of parameters"),
    (optim.SparseAdam, "cannot step parts of parameters"),
    (lambda params: optim.Adafactor(params, lr=0.1), "row_var of shape|keeps other things"),
    (lambda params: Together(params, lr=0.1), "otherwise beside others"),
    (lambda params: Noisy(params, lr=0.1), "otherwise alone than within the whole"),
    (lambda params: CountsInGroup(params, lr=0.1), "keeps lr, num_steps for all parameters together"),
    (lambda params: CountsInItself(params, lr=0.1), "keeps num_steps for all parameters together"),
    (Greedy, "s0, s1, s2, s3, s4 for each element"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_what_is_not_element_wise_is_refused_by_name(make: Callable[..., optim.Optimizer], reason: str) -> None:
    optimizer = make([nn.Parameter(torch.zeros(4, 4))])
    before = torch.get_rng_state()
    with pytest.raises(ConfigError, match=reason) as refusal:
        rule_of(optimizer, dtype=torch.float32)
    assert refusal.value.value == type(optimizer).__name__
    assert torch.equal(before, torch.get_rng_state()), "the user's random numbers are not to be drawn"


def test_an_optimizer_that_has_taken_a_step_is_refused() -> None:
    for kind in (optim.AdamW, optim.Adagrad, optim.NAdam):
        param = nn.Parameter(torch.zeros(4))
        optimizer = kind([param])
        param.grad = torch.ones(4)
        optimizer.step()
        with pytest.raises(ConfigError, match="has state"):
            rule_of(optimizer, dtype=torch.float32)


def test_rates_that_are_looked_up_by_parameter_are_refused_without_printing_it() -> None:
    class ByParameter(optim.Optimizer):
        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params, {"lr": 0.1})
            self.rates = dict.fromkeys(params, 0.1)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data -= self.rates[param] * param.grad

    with pytest.raises(ConfigError, match=r"ByParameter'?: asks which parameter it steps") as refusal:
        rule_of(ByParameter([nn.Parameter(torch.zeros(4, 4))]), dtype=torch.float32)
    assert "tensor" not in str(refusal.value).lower()


def test_marks_that_a_constructor_leaves_on_some_parameters_are_refused_by_name() -> None:
    """As of Muon in one class with AdamW, which keeps in its state which parameter is whose."""
    first, second = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4))
    optimizer = optim.SGD([first, second])
    optimizer.state[first]["use_muon"], optimizer.state[second]["use_muon"] = True, False
    with pytest.raises(ConfigError, match=r"its constructor has made it, use_muon must be the same.*param groups"):
        rule_of(optimizer, dtype=torch.float32)


def test_states_and_history_are_found_by_a_dry_run() -> None:
    def of(optimizer: optim.Optimizer) -> list[str]:
        return list(rule_of(optimizer, dtype=torch.float32).states)

    params = [nn.Parameter(torch.zeros(3))]
    assert of(optim.SGD(params, lr=1)) == []
    assert of(optim.SGD(params, lr=1, momentum=0.5)) == ["momentum_buffer"]
    groups: list[dict[str, Any]] = [{"params": params, "momentum": 0.5}, {"params": []}]
    assert of(optim.SGD(groups, lr=1)) == ["momentum_buffer"]
    assert of(optim.AdamW(params, amsgrad=True)) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert of(optim.Adagrad(params)) == ["sum"]


def test_hooks_and_schedules_of_the_users_optimizer_are_run_once_a_step_not_for_every_piece() -> None:
    calls = []

    def make(groups: Iterable[Any]) -> optim.Optimizer:
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        optim.lr_scheduler.StepLR(optimizer, 10)  # puts a step of its own on the object
        return optimizer

    engine_weights(make, 3)
    assert calls == [1, 1, 1]


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"type": "Muon", "params": {"ns_method": "polar"}}, "'standard' or 'gram'"),
        ({"type": "Lamb"}, "pass a LAMB of your own"),
        ({"type": "OneBitAdam"}, "compresses what ranks exchange"),
        ({"type": "Adafactor"}, "rows and columns"),
        ({"type": "Yogi"}, "pass an object"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, "SGD takes no such parameter"),
        ({"type": "SGD", "params": {"nesterov": True}}, "Nesterov"),
    ],
)
def test_a_configuration_is_told_why_not(section: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_weights(None, 1, optimizer=section)


def test_a_group_may_not_have_an_option_that_its_optimizer_does_not_know() -> None:
    model = small()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Lion"}, "zero_optimization": {"stage": 3}}
    groups = [{"params": list(model.parameters()), "eps": 1e-3}]
    with pytest.raises(ConfigError, match=r"Lion takes no such option.*known here: betas, lr, weight_decay"):
        infinity.initialize(model=model, config=config, model_parameters=groups)


@pytest.mark.parametrize(
    ("make", "state", "heeded"),
    [
        (lambda groups: optim.AdamW(groups, lr=0.01), "exp_avg", True),
        (lambda groups: optim.SGD(groups, lr=0.01, momentum=0.9), "momentum_buffer", False),
        (lambda groups: optim.NAdam(groups, lr=0.01), "exp_avg", False),
    ],
)
def test_a_state_that_is_written_before_the_first_step_is_heeded_or_refused(
    make: Make, state: str, heeded: bool
) -> None:
    model = small()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    with infinity.initialize(model=model, optimizer=make(groups_of(model)), config=config)[0] as engine:
        bias = model.narrow.bias
        before = torch.full(bias.shape, 7.0)
        if heeded:
            infinity.utils.safe_set_full_optimizer_state(bias, before, state)
        else:
            with pytest.raises(EngineStateError, match="bias cannot be written yet"):
                infinity.utils.safe_set_full_optimizer_state(bias, before, state)
        x, gated = batch(0)
        engine.backward(engine(x, gated=gated))
        engine.step()
        after = infinity.utils.safe_get_full_optimizer_state(bias, state)
        assert after is not None
        assert bool((after > 5).all()) is heeded
        infinity.utils.safe_set_full_optimizer_state(bias, before, state)
        kept = infinity.utils.safe_get_full_optimizer_state(bias, state)
        assert kept is not None
        assert torch.equal(kept, before)


def test_lion_takes_no_closure() -> None:
    with pytest.raises(ValueError, match="closure"):
        Lion([torch.nn.Parameter(torch.ones(2))]).step(lambda: 1.0)

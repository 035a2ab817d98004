"""Uses of weights that a sharding engine easily gets wrong in silence: right, or refused by name."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from infinity.states import ShardedState
from infinity.update import stored_state
from infinity.weights import autocast, structure

WIDTH = 64


def config(**changes: Any) -> dict[str, Any]:
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        "stage3_max_live_parameters": 0,
    }
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer, **changes}


ADAM_WITHOUT_MEMORY = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1.0}}
"""Its steps follow the size of a gradient, not only its sign."""


class Net(nn.Module):
    """Two square matrices, combined as ``rule`` says."""

    def __init__(self, rule: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rule(self, x)


def engine_of(model: nn.Module, **changes: Any) -> Engine:
    return infinity.initialize(model=model, config=config(**changes))[0]


def assert_trains_like_torch(rule: Callable[[Net, torch.Tensor], torch.Tensor], num_steps: int = 3) -> None:
    x = torch.linspace(-1, 1, WIDTH).repeat(2, 1)
    reference = Net(rule)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    with engine_of(Net(rule)) as engine:
        for _ in range(num_steps):
            loss, expected = engine(x).square().mean(), reference(x).square().mean()
            assert torch.equal(loss, expected)
            engine.backward(loss)
            engine.step()
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = engine.full_state_dict()
    assert all(torch.equal(weights[name], value) for name, value in reference.state_dict().items())


@pytest.mark.parametrize("poison", [False, True])
def test_a_node_that_saves_weights_of_two_groups(poison: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As LoRA merges them: the first group stays until the node is done with both."""
    monkeypatch.setenv("INFINITY_DEBUG", "poison" if poison else "")
    assert_trains_like_torch(lambda net, x: x @ (net.b.weight @ net.a.weight))


def test_a_sparse_tensor_saved_for_backward() -> None:
    def rule(net: Net, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.sparse.mm(torch.eye(2).to_sparse(), net.b(net.a(x)))
        return product

    assert_trains_like_torch(rule)


def test_an_output_that_is_a_view_of_a_weight_is_copied() -> None:
    model = Net(lambda net, x: net.a.weight[0])
    row = model.a.weight[0].detach().clone()
    with engine_of(model) as engine:
        assert torch.equal(engine(torch.ones(1, WIDTH)), row)


def test_weights_changed_in_forward_are_refused() -> None:
    def clamped(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            net.a.weight.clamp_(-0.01, 0.01)
        return x

    with engine_of(Net(clamped)) as engine, pytest.raises(RuntimeError, match=r"a\.weight.*changed in place"):
        engine(torch.ones(1, WIDTH))


def test_weights_changed_outside_are_refused() -> None:
    model = Net(lambda net, x: net.a(x))
    with engine_of(model) as engine:
        before = engine.full_state_dict()["a.weight"]
        with pytest.raises(WeightsError, match=r"a\.weight.*changed in place"):
            nn.init.zeros_(model.a.weight)
        assert torch.equal(engine.full_state_dict()["a.weight"], before)


def test_weights_changed_between_init_and_initialize_are_taken_over() -> None:
    with infinity.Init(config_dict_or_path=config()):
        model = Net(lambda net, x: net.a(x))
    nn.init.eye_(model.a.weight)
    model.b.weight.data.mul_(0.0).add_(2.0)
    with engine_of(model) as engine:
        weights = engine.full_state_dict()
    assert torch.equal(weights["a.weight"], torch.eye(WIDTH))
    assert torch.equal(weights["b.weight"], torch.full((WIDTH, WIDTH), 2.0))


def test_a_backward_that_the_engine_does_not_see_is_refused() -> None:
    with engine_of(Net(lambda net, x: net.a(x))) as engine:
        loss = engine(torch.ones(1, WIDTH)).sum()
        with pytest.raises(RuntimeError, match=r"engine\.backward"):
            loss.backward()


def test_a_given_optimizer_goes_from_engine_to_engine_with_its_schedule() -> None:
    """Torch warns, which fails here, if a step that a schedule counts is not the optimizer's own."""
    settings = {key: value for key, value in config().items() if key != "optimizer"}
    model = Net(lambda net, x: net.b(net.a(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    counts = optimizer.step
    for number in range(2):
        engine, *_ = infinity.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
        with pytest.raises(EngineStateError, match=r"call engine\.step"):
            optimizer.step()
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (number + 1)
        engine.destroy()
        model = Net(lambda net, x: net.b(net.a(x)))
        optimizer.param_groups[0]["params"] = list(model.parameters())
    stored_state.take_back(optimizer)
    assert optimizer.step is counts


def test_a_schedule_on_the_given_optimizer_drives_the_engine() -> None:
    model = Net(lambda net, x: net.b(net.a(x)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    settings = {key: value for key, value in config().items() if key != "optimizer"}
    engine, *_ = infinity.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, WIDTH)).sum())
            engine.step()
        assert engine.get_lr() == [0.0025]


def test_an_export_between_micro_batches_reads_masters_not_weights_leased_ahead() -> None:
    settings = config(gradient_accumulation_steps=2, bf16={"enabled": True})
    settings["zero_optimization"] |= {
        "stage3_max_live_parameters": 10 * WIDTH * WIDTH,
        "stage3_max_reuse_distance": 0,
    }
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    engine = infinity.initialize(model=model, config=settings)[0]
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
    with engine:
        for _ in range(2):
            engine.backward(engine(x).square().mean())
            engine.step()
        masters = engine.full_master_state_dict()
        engine.backward(engine(x).square().mean())
        engine.step()
        assert any(group.state is ShardedState.UNSHARDING for group in engine._runtime.sharded.groups)
        between = engine.full_master_state_dict()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())
    assert all(torch.equal(between[name], value) for name, value in masters.items())


def test_a_schedule_on_another_optimizer_is_refused() -> None:
    model = Net(lambda net, x: net.a(x))
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), lambda step: 1.0)
    with pytest.raises(ConfigError, match="another optimizer"):
        infinity.initialize(model=model, lr_scheduler=schedule, config=config())


def test_an_option_that_another_optimizer_has_is_refused_in_a_group() -> None:
    model = Net(lambda net, x: net.a(x))
    groups = [{"params": list(model.parameters()), "momentum": 0.9}]
    with pytest.raises(ConfigError, match=r"model_parameters\[0\]\.momentum"):
        infinity.initialize(model=model, model_parameters=groups, config=config())


def twice(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = checkpoint(net.a, x, use_reentrant=True)
    return torch.as_tensor(checkpoint(net.a, net.b(x), use_reentrant=True))


def test_a_clipping_asked_for_goes_with_the_gradients_that_it_was_for() -> None:
    x = torch.ones(1, WIDTH)
    weights = []
    for clipped in (False, True):
        with engine_of(Net(lambda net, x: net.b(net.a(x))), optimizer=ADAM_WITHOUT_MEMORY) as engine:
            if clipped:
                engine.backward(engine(x).sum())
                engine.clip_grad_norm_(1e-6)
                engine.zero_grad()
            engine.backward(engine(x).sum())
            engine.step()
            weights.append(engine.full_state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_recomputing_in_backward_looks_at_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that checkpointing repeats is no call from outside: the model is not walked for it."""
    walks: list[str] = []
    monkeypatch.setattr(structure.Structure, "check", lambda _structure, **_: walks.append("model"))
    with engine_of(Net(lambda net, x: net.b(checkpoint(net.a, x, use_reentrant=True)))) as engine:
        loss = engine(torch.ones(1, WIDTH, requires_grad=True)).sum()
        assert walks == ["model"]
        engine.backward(loss)
        assert walks == ["model"]


def test_reentrant_checkpoints_within_accumulation_add_as_torch_adds() -> None:
    """Each weight has several gradients in each of three backwards: sums of six, rounded in torch's order."""
    reference, model = Net(twice), Net(twice)
    with engine_of(model, gradient_accumulation_steps=3, optimizer=ADAM_WITHOUT_MEMORY) as engine:
        for number in range(3):
            x = (torch.linspace(-1, 1, WIDTH) * 3**number).repeat(2, 1).requires_grad_()
            engine.backward(engine(x).square().mean())
            engine.step()
            (reference(x).square().mean() / 3).backward()
        weights = engine.full_state_dict()
    torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1.0, weight_decay=0.0, fused=True).step()
    assert all(torch.equal(weights[name], value) for name, value in reference.state_dict().items())


GROUPED = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**6}


def step_of(engine: Engine, batch: torch.Tensor) -> None:
    engine.backward(engine(batch).sum())
    engine.step()


@pytest.mark.parametrize("thresholds", [{}, GROUPED, {**GROUPED, "stage3_param_persistence_threshold": 10**6}])
def test_writes_that_no_method_of_the_weight_does_are_refused_and_undone(thresholds: dict[str, int]) -> None:
    """By ``out=``, by an embedding's ``max_norm``, and in a call that holds the weights while others use them."""

    def clamped(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.mul(net.a.weight, 0.5, out=net.a.weight)
        return torch.as_tensor(net.b(net.a(x)))

    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(WIDTH, WIDTH, max_norm=0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.table(x))

    settings = config()
    settings["zero_optimization"] |= thresholds
    x = torch.ones(1, WIDTH)
    for model, batch in ((Net(clamped), x), (Renormed(), torch.tensor([1, 2]))):
        with infinity.initialize(model=model, config=settings)[0] as engine:
            before = engine.full_state_dict()
            with pytest.raises(WeightsError, match="changed in place"):
                step_of(engine, batch)
            assert all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())


def test_weights_that_autograd_keeps_unseen_are_refused_in_the_call() -> None:
    """A thread has no hooks of ours: what it saves would read the placeholder in backward."""

    def threaded(net: Net, x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: results.append(x @ (net.a.weight @ net.b.weight)))
        thread.start()
        thread.join()
        return results[0]

    settings = config()
    settings["zero_optimization"] |= GROUPED
    engine = infinity.initialize(model=Net(threaded), config=settings)[0]
    with engine, pytest.raises(WeightsError, match=r"(a|b)\.weight.*in another thread"):
        engine(torch.ones(1, WIDTH, requires_grad=True))


def under_autocast(rule: Callable[[Net, torch.Tensor], torch.Tensor]) -> Callable[[Net, torch.Tensor], torch.Tensor]:
    def narrow(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return rule(net, x).float()

    return narrow


class Listing(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.weights = nn.ParameterList([net.a.weight])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weights[0])


class Listed(Net):
    """Its first matrix lies in a list that nobody calls, of a module that is called twice."""

    def __init__(self) -> None:
        super().__init__(lambda net, x: self.inner(torch.tanh(self.inner(net.b(x)))))
        self.inner = Listing(self)
        del self.a


def test_a_weight_cast_twice_by_autocast_is_refused_and_cast_once_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "KEPT_NUMEL", 0)
    assert_trains_like_torch(under_autocast(lambda net, x: net.b(net.a(x))))
    settings = config()
    settings["zero_optimization"]["stage3_max_live_parameters"] = WIDTH * WIDTH
    for model, name in ((Net(lambda net, x: net.a(net.a(x))), "a.weight"), (Listed(), "inner.weights.0")):
        with (
            infinity.initialize(model=model, config=settings)[0] as engine,
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(WeightsError, match=re.escape(name)),
        ):
            engine(torch.ones(1, WIDTH, requires_grad=True))


def test_a_small_model_may_use_a_weight_in_several_calls_under_autocast() -> None:
    """Its casts stay for the length of the call, as torch keeps them."""
    assert_trains_like_torch(under_autocast(lambda net, x: net.a(net.b(net.a(x)))))


def test_a_tied_embedding_is_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "KEPT_NUMEL", 0)
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model.get_submodule("2").weight = model.get_submodule("0").weight
    with engine_of(model) as engine, torch.autocast("cpu", torch.bfloat16):
        engine.backward(engine(torch.arange(3)).float().square().mean())


def test_what_old_weight_norm_keeps_of_a_recomputed_weight_is_no_view_of_it() -> None:
    """It leaves the weight it has computed, with its graph, in the module until the next call."""
    with pytest.warns(FutureWarning, match="deprecated"):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(checkpoint(self.inner, x, use_reentrant=False))

    with engine_of(Checkpointed()) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(1, WIDTH, requires_grad=True)).sum())
            engine.step()
        assert engine.global_steps == 2


def test_a_view_that_outlives_an_update_is_refused_before_it() -> None:
    model = Net(lambda net, x: net.b(net.a(x)))
    with engine_of(model) as engine:
        kept = model.a.weight[0]
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        with pytest.raises(WeightsError, match=r"a\.weight.*view"):
            engine.step()
        del kept
        engine.backward(engine(torch.ones(1, WIDTH)).sum())
        engine.step()
        assert engine.global_steps == 1


def test_an_engine_that_nobody_holds_ends() -> None:
    model = Net(lambda net, x: net.a(x))
    engine = engine_of(model)
    end = weakref.ref(engine)
    del engine
    assert end() is None
    with pytest.raises(WeightsError, match="ended"):
        model(torch.ones(1, WIDTH))


def test_a_frozen_model_has_an_engine_that_only_evaluates() -> None:
    model = Net(lambda net, x: net.b(net.a(x))).requires_grad_(False)
    x = torch.ones(1, WIDTH)
    expected = model(x)
    engine, optimizer, _, schedule = infinity.initialize(model=model, config=config())
    with engine:
        assert optimizer is None
        assert schedule is None
        assert torch.equal(engine(x), expected)
        with pytest.raises(WeightsError, match="nothing to train"):
            engine.step()

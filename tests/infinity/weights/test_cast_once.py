"""Under autocast torch casts a weight once and keeps that: a second use after it was let go of is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from infinity.errors import WeightsError
from infinity.weights.autocast import KEPT_NUMEL, CastOnce, _used_by
from infinity.weights.param import ShardedParam

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Its own weight, which a child has, too, and a child of its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.child, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.weight = self.child.weight
        self.to(dtype)

    def forward(self, *modules: nn.Module) -> None:
        for module in modules:
            module(torch.ones(1, 2))


def cast_once(model: nn.Module, dtype: torch.dtype = torch.float32) -> CastOnce:
    params = [
        ShardedParam(index, name, param, dtype, CPU) for index, (name, param) in enumerate(model.named_parameters())
    ]
    return CastOnce(model, params, CPU)


@pytest.fixture
def under_autocast() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def uses(cast: CastOnce, model: Tied, *steps: Any) -> None:
    """One call from outside; a number is given up, a module is called."""
    cast.begin_call(model, within_another=False)
    try:
        for step in steps:
            if isinstance(step, int):
                cast.release(step)
            else:
                step(torch.ones(1, 2).to(next(model.parameters()).dtype))
    finally:
        cast.end_call()


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def test_a_second_use_is_refused_once_casts_were_let_go_of() -> None:
    model = Tied()
    cast = cast_once(model)
    with autocast():
        uses(cast, model, model.other, model.other, model.child)
    with autocast():
        uses(cast, model, model.other, KEPT_NUMEL, model.other)  # as many may be kept
    with autocast(), pytest.raises(WeightsError, match=r"other\.weight is used in two calls"):
        uses(cast, model, model.other, KEPT_NUMEL, 1, model.other)
    with autocast():
        uses(cast, model, model.other, KEPT_NUMEL, model.other)  # counted anew in another context


def test_calls_from_outside_in_one_context_share_its_casts() -> None:
    """They were cast anew in each, and gradients were summed in another precision, in silence."""
    model = Tied()
    cast = cast_once(model)
    with autocast():
        uses(cast, model, model.other)
        with torch.autocast("cpu", enabled=False):
            uses(cast, model, model.other)
        with torch.no_grad():
            uses(cast, model, model.other, KEPT_NUMEL + 1, model.other)  # a second cast is as good as the first
        with pytest.raises(WeightsError, match="is used in two calls"):
            uses(cast, model, model.other)
    for _ in range(3):
        with autocast():
            uses(cast, model, model.other, KEPT_NUMEL)


def test_a_weight_that_was_written_has_another_cast() -> None:
    model = Tied()
    cast = cast_once(model)
    with autocast():
        uses(cast, model, model.other)
        for params in cast._own.values():
            for param in params:
                param.count_update()
        with pytest.raises(WeightsError, match="is used in two calls"):
            uses(cast, model, model.other)


def test_what_tells_contexts_apart_is_seen_by_nobody() -> None:
    model = Tied()
    cast = cast_once(model)
    packed: list[Any] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        packed.append(saved)
        return saved

    class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            packed.append(func)
            return func(*args, **(kwargs or {}))

    with autocast(), torch.autograd.graph.saved_tensors_hooks(pack, pack), Ops():  # type: ignore[no-untyped-call]
        uses(cast, model)
        uses(cast, model)
    assert packed == []


@pytest.mark.usefixtures("under_autocast")
def test_what_is_called_from_outside_uses_its_own_weights_from_the_beginning() -> None:
    model = Tied()
    cast = cast_once(model)
    with pytest.raises(WeightsError, match="two calls"):
        uses(cast, model, KEPT_NUMEL + 1, model.child)


@pytest.mark.usefixtures("under_autocast")
def test_modules_that_compute_in_fp32_cast_nothing() -> None:
    norm, attention = nn.LayerNorm(2), nn.MultiheadAttention(2, 1)
    assert _used_by(norm) == []
    assert {id(param) for param in _used_by(attention)} == {id(param) for param in attention.parameters()}


def test_weights_that_are_narrow_already_are_not_cast() -> None:
    model = Tied(torch.bfloat16)
    cast = cast_once(model, torch.bfloat16)
    uses(cast, model, model.other, KEPT_NUMEL + 1, model.other, model.child)


@pytest.mark.parametrize("why", ["off", "no cache"])
def test_nothing_is_watched_where_nothing_is_kept(why: str) -> None:
    model = Tied()
    cast = cast_once(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=why != "off", cache_enabled=why != "no cache"):
        assert cast.watch() is False
        uses(cast, model, model.other, KEPT_NUMEL + 1, model.other, model.child)
    with torch.autocast("cpu", torch.bfloat16):
        assert cast.watch() is True
        cast.end_call()


class Threaded(nn.Module):
    """Uses a weight twice under autocast, in a thread of its own, where each call is the first of the thread's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def call() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                found.append(self.linear(self.linear(x)))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0].float()


def test_a_weight_is_cast_once_in_a_thread_of_the_models_own() -> None:
    """Two gradients of one cast are summed in bf16: of two casts in fp32, which are other bits."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    plain = Threaded()
    plain(x).square().mean().backward()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
        },
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    model = Threaded()
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.backward(engine(x).square().mean())
        gradient = infinity.utils.safe_get_full_grad(model.linear.weight)
    assert plain.linear.weight.grad is not None
    assert gradient is not None
    assert torch.equal(gradient, plain.linear.weight.grad)

"""Weights that somebody uses while they are updated: gathered around ``step()``, or in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

import infinity
from infinity import Engine
from infinity.errors import ConfigError, EngineStateError, WeightsError
from tests.support.daemon import DEADLINE_S

WIDTH = 16
NUM_STEPS = 4


def engine_of(stage: int = 3, *, threshold: int = 0, nvme: Path | None = None, **io_daemon: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = threshold
    if nvme is not None:
        zero |= {key: {"device": "nvme", "nvme_path": str(nvme)} for key in ("offload_param", "offload_optimizer")}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "io_daemon": io_daemon,
    }
    return infinity.initialize(model=model, config=config)[0]


def loss_of(engine: Engine, step: int) -> Tensor:
    loss: Tensor = engine(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
    return loss


def backward(engine: Engine, step: int) -> float:
    loss = loss_of(engine, step)
    engine.backward(loss)
    return loss.item()


def trained(engine: Engine, steps: Sequence[int] = range(NUM_STEPS), step: Callable[[], None] | None = None) -> Any:
    """The losses and the weights."""
    losses = []
    for number in steps:
        losses.append(backward(engine, number))
        (step or engine.step)()
    return losses, engine.full_state_dict()


def assert_alike(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0]
    assert all(torch.equal(ours[1][name], value) for name, value in expected[1].items())


def test_an_update_of_gathered_weights_is_refused_and_may_be_repeated() -> None:
    """What was gathered stayed for the next forward, which saw the weights of before, in silence."""
    with engine_of() as engine, engine_of() as undisturbed:

        def step() -> None:
            some = engine.module.get_parameter("1.0.weight")
            with (
                infinity.zero.GatheredParameters(some),
                pytest.raises(EngineStateError, match="in use: change them, as step"),
            ):
                engine.step()
            engine.step()

        assert_alike(trained(engine, step=step), trained(undisturbed))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whole_weights_may_be_gathered_around_an_update(stage: int) -> None:
    with engine_of(stage, threshold=10**6) as engine, engine_of(stage, threshold=10**6) as undisturbed:

        def step() -> None:
            param = engine.module.get_parameter("1.0.weight")
            with infinity.zero.GatheredParameters(param):
                before = param.detach().clone()
                engine.step()
                assert not torch.equal(param, before)

        assert_alike(trained(engine, step=step), trained(undisturbed))


def test_an_update_inside_backward_of_gathered_weights_is_refused() -> None:
    with engine_of(update_in_backward=True) as engine:
        loss = loss_of(engine, 0)
        with (
            infinity.zero.GatheredParameters(engine.module.get_parameter("0.0.weight")),
            pytest.raises(EngineStateError, match="outside of GatheredParameters"),
        ):
            engine.backward(loss)


def test_an_update_while_another_thread_calls_the_model_is_refused_and_may_be_repeated() -> None:
    """It was an internal error of the one or the other."""
    with engine_of() as engine, engine_of() as undisturbed, ThreadPoolExecutor(1) as pool:
        is_inside, may_leave = threading.Event(), threading.Event()

        def stay(*_: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                is_inside.set()
                assert may_leave.wait(DEADLINE_S)

        engine.module.get_submodule("1.0").register_forward_hook(stay)

        @torch.no_grad()
        def evaluate() -> Tensor:
            result: Tensor = engine.module(torch.ones(2, WIDTH))
            return result

        def step() -> None:
            is_inside.clear()
            may_leave.clear()
            evaluation = pool.submit(evaluate)
            assert is_inside.wait(DEADLINE_S)
            with pytest.raises(EngineStateError, match="no other thread calls the model"):
                engine.step()
            may_leave.set()
            evaluation.result(DEADLINE_S)
            engine.step()

        assert_alike(trained(engine, step=step), trained(undisturbed))


@pytest.mark.parametrize("use", ["call", "read"])
def test_a_use_in_another_thread_while_weights_are_updated_is_refused(use: str) -> None:
    with engine_of() as engine, engine_of() as undisturbed, ThreadPoolExecutor(1) as pool:

        @torch.no_grad()
        def beside() -> Tensor:
            if use == "read":
                return engine.module.get_parameter("1.0.weight").sum()
            result: Tensor = engine.module(torch.ones(2, WIDTH))
            return result

        def stepped(*_: Any) -> None:
            with pytest.raises(EngineStateError, match=r"is in OPTIMIZER: .* threading\.Lock"):
                pool.submit(beside).result(DEADLINE_S)
            refused.append(True)

        refused: list[bool] = []
        hook = register_optimizer_step_post_hook(stepped)
        try:
            ours = trained(engine)
        finally:
            hook.remove()
        assert len(refused) == NUM_STEPS
        assert_alike(ours, trained(undisturbed))
        pool.submit(beside).result(DEADLINE_S)


@pytest.mark.parametrize("on_nvme", [False, True])
@pytest.mark.parametrize("locked", ["the whole step", "the update alone"])
def test_threads_that_take_turns_disturb_nothing(on_nvme: bool, locked: str, tmp_path: Path) -> None:
    where = tmp_path if on_nvme else None
    with engine_of(nvme=where) as engine, engine_of(nvme=where) as undisturbed, ThreadPoolExecutor(1) as pool:
        is_over, turn = threading.Event(), threading.Lock()

        def evaluate() -> int:
            count = 0
            while not is_over.is_set():
                with turn, torch.no_grad():
                    engine.module(torch.ones(2, WIDTH))
                count += 1
            return count

        evaluations, losses = pool.submit(evaluate), []
        try:
            for number in range(20):
                if locked == "the update alone":
                    losses.append(backward(engine, number))
                with turn:
                    if locked == "the whole step":
                        losses.append(backward(engine, number))
                    engine.step()
        finally:
            is_over.set()
        assert evaluations.result(DEADLINE_S) > 0
        assert_alike((losses, engine.full_state_dict()), trained(undisturbed, range(20)))


def test_a_call_that_is_refused_at_its_beginning_is_not_counted() -> None:
    """The calls after it were taken for inner ones: what they gathered stayed."""
    with engine_of() as engine, torch.no_grad():
        extra = nn.Parameter(torch.zeros(1))
        engine.module.register_parameter("extra", extra)
        with pytest.raises(WeightsError, match="extra"):
            engine.module(torch.ones(2, WIDTH))
        del engine.module.extra
        engine.module(torch.ones(2, WIDTH))
        assert engine._runtime.live_set.live_numel == 0
        assert not engine._runtime._calls


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("rank", [1, -1, "0", 0.0, True])
def test_a_modifier_rank_that_is_no_rank_is_refused(rank: Any, staged: bool) -> None:
    if staged:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with infinity.Init(config_dict_or_path=config):
            weight = nn.Linear(WIDTH, WIDTH).weight
        with pytest.raises(ConfigError, match="modifier_rank = "), infinity.zero.GatheredParameters(weight, rank):
            raise AssertionError("it was opened")
        return
    with engine_of() as engine:
        weight = engine.module.get_parameter("0.0.weight")
        with pytest.raises(ConfigError, match="modifier_rank = "), infinity.zero.GatheredParameters(weight, rank):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("use", [lambda model: model[0][0].weight.sum(), lambda model: model(torch.ones(WIDTH))])
def test_weights_on_disk_in_a_worker_of_a_loader_are_refused_by_name(
    use: Callable[[Any], Tensor], tmp_path: Path
) -> None:
    """A forked child has no part in its parent's I/O, and the error was the daemon's."""

    class UsesTheModel(Dataset[Tensor]):
        def __len__(self) -> int:
            return 1

        @torch.no_grad()
        def __getitem__(self, _index: int) -> Tensor:
            return use(model)

    with engine_of(nvme=tmp_path) as engine:
        model = engine.module
        with pytest.raises(RuntimeError, match=r"0\.0\.(weight|bias) .* is used in a forked process"):
            next(iter(DataLoader(UsesTheModel(), num_workers=1)))
        engine.backward(engine(torch.ones(2, WIDTH)).sum())
        engine.step()


def test_a_worker_of_a_loader_uses_weights_that_stay(tmp_path: Path) -> None:
    class UsesTheModel(Dataset[Tensor]):
        def __len__(self) -> int:
            return 1

        @torch.no_grad()
        def __getitem__(self, _index: int) -> Tensor:
            used: Tensor = model(torch.ones(WIDTH))
            return used

    with engine_of(threshold=10**6, nvme=tmp_path) as engine:
        model = engine.module
        (found,) = DataLoader(UsesTheModel(), num_workers=1, batch_size=None)
        with torch.no_grad():
            assert torch.equal(found, model(torch.ones(WIDTH)))

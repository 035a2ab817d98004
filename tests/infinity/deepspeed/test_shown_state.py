"""Masters and states that DeepSpeed's optimizers show are the store's, and a write to them is refused by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from infinity import deepspeed
from infinity.errors import EngineStateError, WeightsError
from infinity.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state


def train(engine: Any, steps: int) -> None:
    for step in range(steps):
        rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(rows).square().mean())
        engine.step()


@pytest.fixture(params=[0, 2, 3])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": request.param}}
    made = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
    yield made
    made.destroy()


def masters(engine: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = engine.optimizer.state.masters()
    return found


def test_before_the_first_step_there_is_none(engine: Any) -> None:
    state = engine.optimizer.state
    assert (len(state), bool(state), list(state), list(state.items())) == (0, False, [], [])
    weight = engine.module[0].weight
    assert weight not in state
    assert state.get(weight) is None
    assert list(state[weight]) == []
    with pytest.raises(EngineStateError):
        state[weight]["step"] = 1
    with pytest.raises(KeyError):
        state[torch.zeros(1)]


def test_it_is_the_stores(engine: Any) -> None:
    train(engine, 3)
    state = engine.optimizer.optimizer.state
    assert state is engine.optimizer.state
    params = list(engine.module.parameters())
    assert [id(param) for param in state] == [id(param) for param in params]
    for param, shown in state.items():
        assert float(shown["step"]) == 3
        for label in ("exp_avg", "exp_avg_sq"):
            part = safe_get_local_optimizer_state(param, label)
            assert part is not None
            assert torch.equal(shown[label].flatten(), part)
            assert shown[label].shape == (param.shape if engine.zero_optimization_stage() == 0 else part.shape)
    flat = masters(engine)
    expected: Any = [[safe_get_local_fp32_param(param) for param in group] for group in (params[:2], params[2:])]
    assert all(torch.equal(part, torch.cat(own)) for part, own in zip(flat, expected, strict=True))
    assert torch.equal(
        state[flat[1]]["exp_avg"], torch.cat([state[param]["exp_avg"].flatten() for param in params[2:]])
    )


WRITES: dict[str, Callable[[Any], Any]] = {
    "masters": lambda engine: masters(engine)[1].zero_(),
    "a_state": lambda engine: engine.optimizer.state[engine.module[2].weight]["exp_avg"].zero_(),
    "a_count": lambda engine: engine.optimizer.state[engine.module[2].weight]["step"].fill_(7),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused(write: str, engine: Any) -> None:
    train(engine, 2)
    before = engine.full_state_dict()
    WRITES[write](engine)
    with pytest.raises(WeightsError, match=r"2\.weight .*which is a copy.*safe_set_full_optimizer_state"):
        train(engine, 1)
    after = engine.full_state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_gradients_are_shown_from_backward_to_step(engine: Any) -> None:
    if engine.zero_optimization_stage() == 0:
        assert not hasattr(engine.optimizer, "averaged_gradients")
        return
    assert engine.optimizer.averaged_gradients == {}
    rows = torch.ones(2, 6)
    for _ in range(2):
        engine.backward(engine.module[2](engine.module[0](rows)).sum())
        engine.allreduce_gradients()
    shown = engine.optimizer.averaged_gradients
    params = list(engine.module.parameters())
    expected: Any = [[safe_get_local_grad(param) for param in group] for group in (params[:2], params[2:])]
    assert [list(map(torch.equal, shown[i], expected[i])) for i in shown] == [[True, True], [True, True]]
    assert float(shown[1][1][0]) == 4.0, "the sum of two backwards over two rows"
    engine.step()
    assert engine.optimizer.averaged_gradients == {}


def test_of_a_layer_that_is_not_used_zeros_are_shown(engine: Any) -> None:
    if engine.zero_optimization_stage():
        engine.backward(engine.module[2](torch.ones(2, 5)).sum())
        shown = engine.optimizer.averaged_gradients
        assert [part.numel() for part in shown[0]] == [30, 5]
        assert not any(part.any() for part in shown[0])
        assert all(part.any() for part in shown[1])


def test_a_write_to_a_shown_gradient_is_refused(engine: Any) -> None:
    if engine.zero_optimization_stage():
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.optimizer.averaged_gradients[0][0].zero_()
        with pytest.raises(WeightsError, match=r"0\.weight .*averaged_gradients.*safe_set_full_grad"):
            engine.step()


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "put": lambda state, key: state.__setitem__(key, {}),
    "taken": lambda state, key: state.__delitem__(key),
    "cleared": lambda state, _: state.clear(),
    "updated": lambda state, key: state.update({key: {}}),
    "popped": lambda state, key: state.pop(key),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_cannot_be_changed(change: str, engine: Any) -> None:
    train(engine, 1)
    with pytest.raises(EngineStateError, match="safe_set_full_optimizer_state"):
        CHANGES[change](engine.optimizer.state, engine.module[0].weight)


@pytest.mark.parametrize("change", CHANGES)
def test_nor_can_the_states_of_a_parameter(change: str, engine: Any) -> None:
    """They were dicts of their own, and what was done to one was done to nothing, without a word."""
    train(engine, 1)
    with pytest.raises(EngineStateError, match="safe_set_full_optimizer_state"):
        CHANGES[change](engine.optimizer.state[engine.module[0].weight], "exp_avg")


def test_another_state_in_its_place_is_refused(engine: Any) -> None:
    train(engine, 1)
    engine.optimizer.state = defaultdict(dict)
    with pytest.raises(EngineStateError, match=r"\.state of the engine's optimizer was replaced.*load_state_dict"):
        train(engine, 1)


def test_the_states_begin_anew_as_the_refusal_says(engine: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    train(engine, 2)
    model.load_state_dict(engine.full_state_dict())
    optimizer = engine.optimizer
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert len(optimizer.state) == 0
    train(engine, 2)
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.1}]
    plain = torch.optim.AdamW(groups)
    for step in range(2):
        rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in engine.full_state_dict().items())


def test_the_optimizer_may_serve_another_engine(engine: Any) -> None:
    train(engine, 1)
    optimizer = engine.basic_optimizer
    engine.destroy()
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    other = deepspeed.initialize(model=engine.module, optimizer=optimizer, config=settings)[0]
    assert len(optimizer.state) == 0
    train(other, 1)
    assert len(optimizer.state) == 4
    other.destroy()


def test_a_state_dict_of_it_is_torchs(engine: Any) -> None:
    train(engine, 1)
    given = engine.optimizer.state_dict()
    assert given["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert engine.optimizer.optimizer.state_dict()["state"].keys() == given["state"].keys()
    engine.optimizer.load_state_dict(given)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_without_a_count_are_shown_too(momentum: float) -> None:
    model = nn.Linear(4, 3)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    made: Any = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), config=settings
    )[0]
    assert len(made.optimizer.state) == 0
    made.backward(made(torch.ones(2, 4)).sum())
    made.step()
    assert [sorted(shown) for shown in made.optimizer.state.values()] == 2 * [["momentum_buffer"] if momentum else []]
    made.destroy()


def test_inside_backward_it_is_refused(engine: Any) -> None:
    train(engine, 1)
    found: list[str] = []

    def look(_param: Any) -> None:
        with pytest.raises(EngineStateError, match="BACKWARD") as raised:
            len(engine.optimizer.state)
        found.append(str(raised.value))

    engine.module[2].weight.register_post_accumulate_grad_hook(look)
    train(engine, 1)
    assert len(found) == 1


def test_a_group_whose_parameters_were_stepped_by_turns_is_read_one_by_one() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, rows: torch.Tensor, further: bool) -> torch.Tensor:
            found: torch.Tensor = self.both(rows)
            return self.second(found) if further else found

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    made: Any = deepspeed.initialize(model=Turns(), config=settings)[0]
    for further in (True, False):
        made.backward(made(torch.ones(2, 4), further).sum())
        made.step()
    state, (flat,) = made.optimizer.state, made.optimizer.single_partition_of_fp32_groups
    assert [float(shown["step"]) for shown in state.values()] == [2, 1]
    with pytest.raises(EngineStateError, match="different numbers of times"):
        state[flat]
    made.destroy()

"""``state_dict()`` and ``load_state_dict()`` of an engine's optimizer: torch's form, and training goes on as it did."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine.state_access import StateAccess
from infinity.errors import EngineStateError, WeightsError
from infinity.update.algorithms import Lion
from tests.support.ranks import run_ranks

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "Lion": lambda params: Lion(params, lr=1e-3),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "stage0": {"zero_optimization": {"stage": 0}},
    "stage1-cpu": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "fp16": {"zero_optimization": {"stage": 2}, "fp16": {"enabled": True, "initial_scale_power": 8}},
    "split": {
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"},
        },
        "bf16": {"enabled": True}, "io_daemon": {"master_weights": "split"},
    },
}  # fmt: skip


class Net(nn.Module):
    """With a parameter that lies otherwise than in order, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.last = nn.Linear(8, 5)
        self.seldom = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, rarely: bool = False) -> torch.Tensor:
        x = self.last(self.first(x).mean(dim=(2, 3)))
        return (self.seldom(x) if rarely else x).square().mean()


def images(first: int, last: int) -> list[torch.Tensor]:
    return [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(number)) for number in range(first, last)]


def start(make: Make, setting: dict[str, Any], directory: Path, model: nn.Module | None = None) -> Any:
    model = model or Net()
    zero = {
        name: {**value, "nvme_path": str(directory)} if isinstance(value, dict) and value["device"] == "nvme" else value
        for name, value in setting["zero_optimization"].items()
    }
    config = {"train_micro_batch_size_per_gpu": 2, **setting, "zero_optimization": zero}
    return infinity.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]


def train(engine: Any, batches: list[torch.Tensor], *, rarely: bool = False) -> list[float]:
    losses = []
    for batch in batches:
        loss = engine(batch.to(next(iter(engine.module.parameters())).dtype), rarely)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def through_a_file(given: Any) -> Any:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def masters(engine: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine.full_master_state_dict()
    return found


def same_bits(mine: Any, others: Any) -> bool:
    return all(torch.equal(mine[name], others[name]) for name in mine) and list(mine) == list(others)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_training_goes_on_where_it_stood(name: str, setting: dict[str, Any], tmp_path: Path) -> None:
    if name == "momentum" and "io_daemon" in setting:
        pytest.skip("SGD has no sign to spare, and says so")
    make = OPTIMIZERS[name]
    engine = start(make, setting, tmp_path)
    train(engine, images(0, 3))
    saved = through_a_file({"model": engine.full_state_dict(), "optimizer": engine.optimizer.state_dict()})
    expected = train(engine, images(3, 6), rarely=True), masters(engine)
    engine.destroy()

    model = Net()
    model.load_state_dict(saved["model"])
    other = start(make, setting, tmp_path, model)
    train(other, images(7, 9), rarely=True)
    infinity.load_pretrained(other, _written(saved["model"], tmp_path))
    other.optimizer.load_state_dict(saved["optimizer"])
    assert train(other, images(3, 6), rarely=True) == expected[0]
    assert same_bits(masters(other), expected[1])
    other.destroy()


def _written(weights: dict[str, torch.Tensor], directory: Path) -> Path:
    file = directory / "weights.pt"
    torch.save(weights, file)
    return file


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_torchs_own_both_ways(make: Make, tmp_path: Path) -> None:
    """On one rank in fp32: what torch's optimizer would say after the same steps, and what it takes and gives."""
    plain = Net()
    optimizer = make(plain.parameters())

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        plain(batch, rarely=True).backward()
        optimizer.step()

    engine = start(make, SETTINGS["fp32"], tmp_path)
    train(engine, images(0, 3), rarely=True)
    for batch in images(0, 3):
        step(batch)
    mine, torchs = engine.optimizer.state_dict(), optimizer.state_dict()
    assert list(mine) == list(torchs)
    assert mine["param_groups"] == torchs["param_groups"]
    assert mine["state"].keys() == torchs["state"].keys()
    for number, entry in torchs["state"].items():
        assert mine["state"][number].keys() == entry.keys()
        for label, value in entry.items():
            found = mine["state"][number][label]
            assert type(found) is type(value)
            if isinstance(value, torch.Tensor):
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
                assert torch.equal(found, value), label

    begun = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(plain.state_dict())
    train(engine, images(3, 5), rarely=True)
    optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    plain.load_state_dict(engine.full_state_dict())
    train(engine, images(5, 7), rarely=True)
    for batch in images(5, 7):
        step(batch)
    assert same_bits(engine.full_state_dict(), plain.state_dict()), "torch went on from ours"
    engine.destroy()

    model = Net()
    model.load_state_dict(begun[1])
    resumed = start(make, SETTINGS["fp32"], tmp_path, model)
    resumed.optimizer.load_state_dict(begun[0])
    train(resumed, images(3, 7), rarely=True)
    assert same_bits(resumed.full_state_dict(), plain.state_dict()), "we went on from torch's"
    resumed.destroy()


def test_the_optimizer_that_was_passed_has_it_too_and_calls_its_hooks(tmp_path: Path) -> None:
    model, called = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_state_dict_pre_hook(lambda _: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, found: {**found, "mine": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, given: called.append(given.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda _: called.append("after"))
    engine = start(lambda _: optimizer, SETTINGS["fp32"], tmp_path, model)
    train(engine, images(0, 2))
    given = through_a_file(optimizer.state_dict())
    expected = train(engine, images(2, 3)), train(engine, images(3, 4))
    optimizer.load_state_dict(given)
    assert called == ["before", 1, "after"]
    assert same_bits(optimizer.state_dict()["state"][0], given["state"][0])
    assert len(expected) == 2
    engine.destroy()


class Own(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "own": 1}


def test_one_whose_class_has_its_own_state_dict_is_refused(tmp_path: Path) -> None:
    """What it adds would be lost."""
    model = Net()
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.5)
    engine = start(lambda _: optimizer, SETTINGS["fp32"], tmp_path, model)
    with pytest.raises(EngineStateError, match="save_checkpoint"):
        optimizer.state_dict()
    engine.destroy()


def test_what_has_no_entry_begins_anew(tmp_path: Path) -> None:
    engine = start(OPTIMIZERS["AdamW"], SETTINGS["fp32"], tmp_path)
    train(engine, images(0, 2))
    early = engine.optimizer.state_dict()
    assert early["state"].keys() == {0, 1, 2, 3}, "the last layer was not used"
    weights = _written(engine.full_state_dict(), tmp_path)
    expected = train(engine, images(2, 5), rarely=True), engine.full_state_dict()
    engine.optimizer.load_state_dict(early)
    assert engine.optimizer.state_dict()["state"].keys() == {0, 1, 2, 3}
    infinity.load_pretrained(engine, weights)
    assert train(engine, images(2, 5), rarely=True) == expected[0]
    assert same_bits(engine.full_state_dict(), expected[1])
    engine.destroy()


def test_the_loss_scale_goes_with_it(tmp_path: Path) -> None:
    engine = start(OPTIMIZERS["AdamW"], SETTINGS["fp16"], tmp_path)
    given = engine.optimizer.state_dict()
    engine.optimizer.scale.value = 4.0
    engine.optimizer.load_state_dict(given)
    assert engine.optimizer.loss_scale == 256.0
    engine.destroy()


def _without(given: Any, number: int, label: str) -> None:
    del given["state"][number][label]


def _of_other_shape(given: Any) -> None:
    given["state"][2]["exp_avg"] = torch.zeros(8, 5)


def _too_far(given: Any) -> None:
    given["state"][6] = given["state"].pop(0)


def _no_tensor(given: Any) -> None:
    given["state"][1]["exp_avg"] = [0.0] * 8


def _fewer(given: Any) -> None:
    given["param_groups"][0]["params"].pop()


def _masters(given: Any) -> None:
    given["fp32_weights"] = {3: torch.zeros(5)}


REFUSED = {
    "first.bias.*holds step, exp_avg": lambda given: _without(given, 1, "exp_avg_sq"),
    "last.weight.*has shape .8, 5., needed is .5, 8.": _of_other_shape,
    "parameter 6, and the optimizer has 6": _too_far,
    "first.bias.*a list as exp_avg": _no_tensor,
    r"groups of \[5\] parameters, and the optimizer has groups of \[6\]": _fewer,
    "last.bias.*beside which it has no others": _masters,
}


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(pattern: str, tmp_path: Path) -> None:
    engine = start(OPTIMIZERS["AdamW"], SETTINGS["fp32"], tmp_path)
    train(engine, images(0, 2))
    given = through_a_file(engine.optimizer.state_dict())
    train(engine, images(2, 3))
    before = through_a_file(engine.optimizer.state_dict())
    given["param_groups"][0]["lr"] = 7.0
    REFUSED[pattern](given)
    with pytest.raises((EngineStateError, WeightsError), match=pattern):
        engine.optimizer.load_state_dict(given)
    after = engine.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert all(same_bits(after["state"][number], entry) for number, entry in before["state"].items())
    engine.destroy()


@pytest.mark.parametrize("when", ["in forward", "states are away"])
def test_at_a_time_when_states_cannot_be_written_nothing_changes(when: str, tmp_path: Path) -> None:
    engine = start(OPTIMIZERS["AdamW"], SETTINGS["fp32"], tmp_path)
    train(engine, images(0, 2))
    given = through_a_file(engine.optimizer.state_dict())
    train(engine, images(2, 3))
    before = through_a_file(engine.optimizer.state_dict())
    heard: list[str] = []

    def load(*_: object) -> None:
        with pytest.raises(EngineStateError) as refused:
            engine.optimizer.load_state_dict(given)
        heard.append(str(refused.value))

    if when == "in forward":
        hook = engine.module.last.register_forward_hook(load)
        engine(images(3, 4)[0])
        hook.remove()
        engine.zero_grad()
    else:
        engine.offload_states()
        load()
        engine.reload_states()
    assert len(heard) == 1
    assert ("FORWARD" if when == "in forward" else "reload_states") in heard[0]
    after = engine.optimizer.state_dict()
    assert all(same_bits(after["state"][number], entry) for number, entry in before["state"].items())
    engine.destroy()


def test_a_write_to_what_it_gave_is_refused(tmp_path: Path) -> None:
    engine = start(OPTIMIZERS["AdamW"], SETTINGS["fp32"], tmp_path)
    train(engine, images(0, 1))
    engine.optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    with pytest.raises(WeightsError, match=r"first.weight.*state_dict\(\) of the optimizer"):
        train(engine, images(1, 2))
    engine.destroy()


def test_states_on_nvme_are_named_with_the_remedy(tmp_path: Path) -> None:
    setting = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    engine = start(OPTIMIZERS["AdamW"], setting, tmp_path)
    train(engine, images(0, 1))
    given = engine.optimizer.state_dict()
    with pytest.raises(EngineStateError, match="save_checkpoint"):
        torch.save(given, io.BytesIO())
    with pytest.raises(EngineStateError, match="load_checkpoint"):
        engine.optimizer.load_state_dict({"state": {}, "param_groups": given["param_groups"]})
    engine.destroy()


ON_RANKS = """
import io, json, os
import torch
import infinity
from tests.infinity.test_optimizer_state_dict import OPTIMIZERS, images, masters, start, through_a_file, train
from infinity.errors import EngineStateError

rank = int(os.environ["RANK"])
answers = {}
for stage in (0, 2, 3):
    setting = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine = start(OPTIMIZERS["AdamW"], setting, ".")
    train(engine, images(10 * rank, 10 * rank + 2))
    given = through_a_file(engine.optimizer.state_dict())
    expected = train(engine, images(10 * rank + 2, 10 * rank + 5)), masters(engine)
    train(engine, images(10 * rank + 2, 10 * rank + 3))
    engine.optimizer.load_state_dict(given)
    again = train(engine, images(10 * rank + 2, 10 * rank + 5)), masters(engine)
    same = again[0] == expected[0] and all(torch.equal(expected[1][name], again[1][name]) for name in expected[1])
    said = None
    if stage:
        if rank == 1:
            given["rank_of_ranks"] = (0, 2)
        try:
            engine.optimizer.load_state_dict(given)
        except Exception as error:
            said = str(error)
    answers[stage] = [same, given.get("rank_of_ranks"), said]
    engine.destroy()
print(json.dumps(answers))
"""


def test_ranks_keep_their_own_parts(tmp_path: Path) -> None:
    first, second = (rank.answer for rank in run_ranks(ON_RANKS, tmp_path, num_ranks=2))
    for stage in ("0", "2", "3"):
        assert first[stage][0] is True
        assert second[stage][0] is True
    assert first["0"][1:] == second["0"][1:] == [None, None], "every rank has all of it"
    for stage in ("2", "3"):
        assert first[stage][1] == [0, 2]
        assert "part of rank 0 of 2 on rank 1 of 2" in second[stage][2]
        assert "part of rank 0 of 2 on rank 1 of 2" in first[stage][2], "the other rank is told"


DIFFERING = """
import json, os
import torch
import infinity
from tests.infinity.test_optimizer_state_dict import OPTIMIZERS, images, masters, start, train

rank = int(os.environ["RANK"])
answers = []
for stage in (0, 3):
    setting = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine = start(OPTIMIZERS["AdamW"], setting, ".")
    train(engine, images(0, 2))
    saved = engine.optimizer.state_dict()
    train(engine, images(2, 3))
    now = engine.optimizer.state_dict()
    kept = masters(engine)

    def said(given):
        try:
            engine.optimizer.load_state_dict(given)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    slower = {**now, "param_groups": [{**group, "lr": 0.5 / (1 + rank)} for group in now["param_groups"]]}
    answers += [said(saved if rank else now), said(slower)]
    if stage == 0:
        states = {number: {**state, "exp_avg": state["exp_avg"] + rank} for number, state in now["state"].items()}
        answers.append(said({**now, "state": states}))
        counts = {number: {**state, "step": torch.tensor(2e6 + rank)} for number, state in now["state"].items()}
        answers.append(said({**now, "state": counts}))
    same = all(torch.equal(kept[name], value) for name, value in masters(engine).items())
    answers += [same, said(now)]
    engine.destroy()
print(json.dumps(answers))
"""


def test_ranks_that_load_different_states_are_told_and_nothing_changes(tmp_path: Path) -> None:
    first, second = (rank.answer for rank in run_ranks(DIFFERING, tmp_path, num_ranks=2))
    assert first == second
    steps, options, values, late, *rest = first[:6]
    assert re.search(r"WeightsError: .* has step 3, .* on rank 0 and step 2, .* on rank 1", steps)
    assert re.search(r"EngineStateError: .* with lr 0\.5 .* on rank 0 and with lr 0\.25 .* on rank 1", options)
    assert re.search(r"WeightsError: .* has step 3, values with checksum \w+ on rank 0 and step 3, values", values)
    assert re.search(r"WeightsError: .* has step 2000000, .* on rank 0 and step 2000001, .* on rank 1", late)
    assert rest == [True, None]
    assert "has step 3 on rank 0 and step 2 on rank 1" in first[6]
    assert first[8:] == [True, None]


def test_what_was_given_stays_as_it_is(tmp_path: Path) -> None:
    """Schedulers of torch write to a rate that is a tensor."""

    def make(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=torch.tensor(1e-2))

    with start(make, SETTINGS["stage1-cpu"], tmp_path) as engine:
        given = through_a_file(engine.optimizer.state_dict())
        engine.optimizer.load_state_dict(given)
        engine.optimizer.param_groups[0]["lr"].fill_(1.0)
        assert given["param_groups"][0]["lr"] == torch.tensor(1e-2)


def test_a_load_that_is_interrupted_leaves_no_engine_with_half_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(OPTIMIZERS["AdamW"], SETTINGS["stage1-cpu"], tmp_path) as engine:
        train(engine, images(0, 1))
        given = engine.optimizer.state_dict()
        replace, calls = StateAccess.replace, itertools.count()

        def interrupted(*what: Any) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt
            replace(*what)

        monkeypatch.setattr(StateAccess, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.optimizer.load_state_dict(given)
        with pytest.raises(EngineStateError, match="has failed"):
            train(engine, images(1, 2))

"""What a checkpoint says of a model's tensors, and what that costs of many."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.deepspeed.fp32_weights import get_fp32_state_dict_from_zero_checkpoint
from infinity.engine import saving
from infinity.engine.described import described_buffers, described_params
from infinity.tiers.collectives import Collectives
from tests.support.work import lines_run


class WithBuffers(nn.Module):
    def __init__(self, num_buffers: int) -> None:
        super().__init__()
        for number in range(num_buffers):
            self.register_buffer(f"buffer{number}", torch.full((2,), float(number)))
        self.register_buffer("shared", self.get_buffer("buffer0"))


def test_a_shared_buffer_stands_once() -> None:
    found = described_buffers(WithBuffers(2))
    assert [(name, entry.aliases) for name, (entry, _) in found.items()] == [("buffer0", ("shared",)), ("buffer1", ())]


class Sharing(nn.Module):
    """A buffer of two names, which come in either order; a state dict may lack one of them, which is none then."""

    def __init__(self, names: Sequence[str], *, hidden: str = "", shares: bool = True) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        table = torch.ones(3)
        for name in names:
            self.register_buffer(name, table if shares else table.clone(), persistent=name != hidden)


def test_a_shared_buffer_is_exported_and_loaded_under_each_of_its_names(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
    }

    def engine_of(*names: str, **more: Any) -> Any:
        return infinity.initialize(model=Sharing(names, **more), config=config)[0]

    for hidden in ("", "a"):
        engine = engine_of("a", "b", hidden=hidden)
        engine.module.b.fill_(7.0)
        engine.save_checkpoint(tmp_path)
        found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
        assert found.keys() == Sharing("ab", hidden=hidden).state_dict().keys()
        engine.destroy()
        for shares in (True, False):
            engine = engine_of("b", "a", hidden=hidden, shares=shares)
            engine.load_checkpoint(tmp_path)
            assert engine.module.b.tolist() == [7.0] * 3
            assert hidden or engine.module.a.tolist() == [7.0] * 3
            engine.destroy()


class HidesAll(nn.Module):
    """To whoever asks the class; a state dict has all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithBuffers(2)

    def named_modules(self, *_: Any, **__: Any) -> Iterator[Any]:
        return iter(())


def test_buffers_that_a_class_hides_are_kept() -> None:
    model = HidesAll()
    assert list(described_buffers(model)) == ["inner.buffer0", "inner.buffer1"]
    assert set(described_buffers(model)) < set(model.state_dict())


def test_a_buffer_costs_as_much_among_many() -> None:
    """In lines run: a model of 10,000 batch norms has 30,000, and each was compared with all before it."""

    def work(num_buffers: int) -> int:
        model = WithBuffers(num_buffers)
        return lines_run(lambda: described_buffers(model), "infinity/engine")

    few, many = work(50), work(400)
    assert many <= 9 * few, f"{few} lines for 50 buffers, {many} for 400"


class Name(str):
    """One that counts what it is compared with."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.num_compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class Frozen(nn.Module):
    def __init__(self, num_params: int) -> None:
        super().__init__()
        self.frozen = nn.ParameterList(nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(num_params))
        self.trained = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.trained * x).sum()


def test_frozen_weights_are_left_out_without_comparing_all_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter's name was looked for in the list of all that are left out."""
    num_frozen = 200
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_optimization": {"stage": 3},
    }
    engine, *_ = infinity.initialize(model=Frozen(num_frozen), config=config)
    monkeypatch.setattr(
        saving, "described_params", lambda runtime: {Name(k): entry for k, entry in described_params(runtime).items()}
    )
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    engine.destroy()
    assert 0 < Name.num_compared <= 8 * num_frozen


def test_what_all_parameters_have_alike_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were counted of each: of 100,000 parameters every rank had them of all, from every other."""

    def sent(num_layers: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
        optimizer = {"type": "AdamW", "params": {}}
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": {"stage": 3}}
        engine, *_ = infinity.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        objects: list[object] = []
        gather = Collectives.gather_objects

        def noted(collectives: Collectives, each: Any, what: str) -> Any:
            objects.append(each)
            return gather(collectives, each, what)

        with monkeypatch.context() as patch:
            patch.setattr(Collectives, "gather_objects", noted)
            engine.save_checkpoint(tmp_path / str(num_layers))
        engine.destroy()
        return max(len(pickle.dumps(each)) for each in objects)

    assert 0 < sent(100) <= 1.1 * sent(2)

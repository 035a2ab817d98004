"""Where a loader goes on: at the first batch that no step has taken, whoever iterates and whenever it was saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import infinity
from infinity.deepspeed.loaders import RepeatingLoader
from tests.support.resumed import config_of

ROWS, BATCHES = 39, 10
DATA = TensorDataset(torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(5)))


class Net(nn.Module):
    """Its dropout draws from the generator that shuffles."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 96), nn.Linear(96, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.dropout(torch.tanh(self.first(x)), 0.1, self.training))
        return out


class Noisy(Dataset[Any]):
    """Samples are drawn as they are asked for, by two generators."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (DATA[index][0] + torch.rand(16) + random.random(),)


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        return (Noisy()[index] for index in range(ROWS))


def engine_of(data: Any, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    random.seed(seed)
    config = config_of(**changes)
    del config["scheduler"]
    return infinity.initialize(model=Net(), config=config, training_data=data)[0]


def loss_of(engine: Any, batch: Any) -> float:
    """Of a micro-batch that is trained."""
    loss = engine(batch[0]).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def trained(engine: Any, epochs: int, *, save_before: int = -1, save_after: int = -1, to: Path | None = None) -> Any:
    """Losses; the checkpoint is saved as soon as a batch is there, or behind its step."""
    losses: list[float] = []
    for _ in range(epochs):
        for batch in engine.training_dataloader:
            if len(losses) == save_before:
                engine.save_checkpoint(to)
            losses.append(loss_of(engine, batch))
            if len(losses) == save_after:
                engine.save_checkpoint(to)
    return losses


@pytest.mark.parametrize("at", [0, 3, BATCHES, BATCHES + 3])
def test_a_batch_that_was_given_and_not_trained_is_given_again(at: int, tmp_path: Path) -> None:
    engine = engine_of(DATA)
    losses = trained(engine, 3, save_before=at, to=tmp_path)
    engine.destroy()
    engine = engine_of(DATA, seed=9)
    engine.load_checkpoint(tmp_path)
    assert trained(engine, 3 - at // BATCHES) == losses[at:]
    engine.destroy()


@pytest.mark.parametrize("made_first", [True, False])
@pytest.mark.parametrize("at", [4, BATCHES, BATCHES + 4])
def test_an_iterator_that_was_made_before_the_load_goes_on_there_too(at: int, made_first: bool, tmp_path: Path) -> None:
    engine = engine_of(DATA)
    batches = RepeatingLoader(engine.training_dataloader)
    losses = []
    for number in range(3 * BATCHES):
        if number == at:
            engine.save_checkpoint(tmp_path)
        losses.append(loss_of(engine, next(batches)))
    engine.destroy()
    engine = engine_of(DATA, seed=9)
    if made_first:
        batches = RepeatingLoader(engine.training_dataloader)
        next(batches)
    engine.load_checkpoint(tmp_path)
    if not made_first:
        batches = RepeatingLoader(engine.training_dataloader)
    assert [loss_of(engine, next(batches)) for _ in range(3 * BATCHES - at)] == losses[at:]
    engine.destroy()


def test_a_loop_that_goes_back_goes_on_from_there(tmp_path: Path) -> None:
    engine = engine_of(DATA)
    losses: list[float] = []
    for batch in engine.training_dataloader:
        losses.append(loss_of(engine, batch))
        if len(losses) == 3:
            engine.save_checkpoint(tmp_path)
        if len(losses) == 6:
            engine.load_checkpoint(tmp_path)
    assert losses[3:6] == losses[6:9]
    assert len(losses) == BATCHES + 3
    assert len(list(engine.training_dataloader)) == BATCHES, "the next epoch is whole"
    engine.destroy()


@pytest.mark.parametrize("data", [DATA, Noisy(), NoisyStream()], ids=["samples", "drawn samples", "a drawn stream"])
def test_what_is_saved_right_behind_a_load_has_the_same_place(data: Any, tmp_path: Path) -> None:
    engine = engine_of(data)
    losses = trained(engine, 2, save_after=4, to=tmp_path)
    engine.destroy()
    for seed in (7, 8):
        engine = engine_of(data, seed=seed)
        engine.load_checkpoint(tmp_path)
        engine.save_checkpoint(tmp_path)
        if seed == 8:
            assert trained(engine, 2) == losses[4:]
        engine.destroy()


def test_batches_of_a_step_that_is_not_over_are_given_again(tmp_path: Path) -> None:
    """Their gradients are in no checkpoint."""
    engine = engine_of(DATA, gradient_accumulation_steps=2)
    batches = []
    for batch in engine.training_dataloader:
        batches.append(batch[0])
        loss_of(engine, batch)
        if len(batches) == 5:
            engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_of(DATA, seed=9, gradient_accumulation_steps=2)
    engine.load_checkpoint(tmp_path)
    again = [batch[0] for batch in engine.training_dataloader]
    assert all(torch.equal(one, other) for one, other in zip(batches[4:], again, strict=True))
    engine.destroy()

"""Loaders of micro-batches: each rank gets its share of a dataset, and a loader knows which batch comes next."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from infinity.checkpoint.random_numbers import random_states, restore_random_states
from infinity.errors import ConfigError
from infinity.tiers.collectives import Collectives

_log = logging.getLogger(__name__)
_CPU: Final = torch.device("cpu")

ROUTES = {"train": True, "eval": False, "predict": False}
"""Whether samples are shuffled."""


def is_training(route: str) -> bool:
    """Whether the route shuffles. Raises ConfigError if there is no such route."""
    if route not in ROUTES:
        raise ConfigError("route", route, f"one of {', '.join(ROUTES)}")
    return ROUTES[route]


class _Placed(Sampler[Any]):
    """A sampler whose next epoch may begin in the middle of its order."""

    num_passed = 0
    """Samples that the next epoch passes over."""

    def __iter__(self) -> Iterator[Any]:
        num_passed, self.num_passed = self.num_passed, 0
        return islice(super().__iter__(), num_passed, None)


class _InOrder(_Placed, SequentialSampler):
    """All samples in their order."""


class _Dealt(_Placed, DistributedSampler[Any]):
    """This rank's share; with ``set_epoch`` each epoch has an order of its own."""


class _Shuffled(RandomSampler):
    """Torch's own order, number for number, whose seed is known: it is drawn from torch's generator."""

    num_passed = 0
    seed: int | None = None
    """The seed of the running epoch, which is drawn with its first sample; given before it begins, none is drawn."""

    def __iter__(self) -> Iterator[int]:
        if self.seed is None:
            self.seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        num_passed, self.num_passed = self.num_passed, 0
        generator = torch.Generator()
        generator.manual_seed(self.seed)
        yield from torch.randperm(self.num_samples, generator=generator, device="cpu").tolist()[num_passed:]


class PlacedLoader(DataLoader[Any]):
    """A loader whose ``state_dict`` says which batch comes next: the first that no step has taken, since what was given
    after the last one is in no checkpoint's weights. ``load_state_dict`` has the next epoch begin there, and one that
    runs go on there.

    Of a dataset without a length, or with a sampler of the user's, the batches before that are loaded and dropped.
    """

    def __init__(self, dataset: Dataset[Any], **arguments: Any) -> None:
        super().__init__(dataset, **arguments)
        self.is_placed = False
        """Whether ``load_state_dict`` was called, and no epoch has begun since."""
        self._is_running = False
        """Whether an epoch has begun that has not ended."""
        self._num_given = 0
        self._num_taken = 0
        """Batches of the running epoch that were given before the last step."""

    def __iter__(self) -> Any:
        return _Counted(self)

    def begin(self) -> Iterator[Any]:
        """The batches of an epoch, or those that are left of the one that was loaded."""
        goes_on, self.is_placed = self.is_placed and self._is_running, False
        self._is_running, sampler = True, self.sampler
        if not goes_on:
            self._num_taken = 0
        self._num_given = self._num_taken
        if isinstance(sampler, _Placed | _Shuffled):
            sampler.num_passed = self._num_taken * (self.batch_size or 1)
        if not goes_on:
            if isinstance(sampler, _Shuffled):
                sampler.seed = None
            return super().__iter__()
        drawn = random_states(_CPU)
        batches: Iterator[Any] = super().__iter__()
        if not isinstance(sampler, _Placed | _Shuffled):
            deque(islice(batches, self._num_taken), maxlen=0)
        restore_random_states(drawn, _CPU)  # the epoch has begun before, and drawn then what it draws
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The number of batches of the running epoch that steps have taken, and what makes it the same epoch."""
        return {
            "num_given": self._num_taken,
            "is_running": self._is_running,
            "batch_size": self.batch_size,
            "num_samples": self._num_samples,
            "seed": getattr(self.sampler, "seed", None) if self._is_running else None,
            "epoch": getattr(self.sampler, "epoch", None),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: in the epoch that ran then, after the samples that steps had taken. Of another dataset, or where
        a batch of this size would not begin there, the epoch begins anew, and a warning says so."""
        passed = self._passed(state)
        self.is_placed, self._is_running = True, passed is not None and bool(state.get("is_running", passed))
        self._num_given = self._num_taken = passed or 0
        if isinstance(self.sampler, _Shuffled):
            self.sampler.seed = state["seed"] if self._is_running else None
        if isinstance(self.sampler, _Dealt) and state["epoch"] is not None:
            self.sampler.set_epoch(state["epoch"])

    @property
    def _num_samples(self) -> int | None:
        """The dataset's length; None where it has none."""
        length = getattr(self.dataset, "__len__", None)
        return None if length is None else int(length())

    def _passed(self, state: Mapping[str, Any]) -> int | None:
        """The number of batches of this loader that the epoch had given then; None: it cannot go on there."""
        size = self.batch_size or 1
        given = int(state["num_given"]) * int(state.get("batch_size") or size)
        there = state.get("num_samples", self._num_samples)
        if there != self._num_samples:
            _log.warning("the epoch begins anew: the dataset had %s samples, and has %s", there, self._num_samples)
            return None
        if given % size:
            _log.warning("the epoch begins anew: it had given %d samples, no multiple of a batch of %d", given, size)
            return None
        return given // size

    def count(self) -> None:
        """A batch of the running epoch was given."""
        self._num_given += 1

    def note_step(self) -> None:
        """What was given until now is in the weights."""
        self._num_taken = self._num_given

    def end_epoch(self) -> None:
        """It has no more."""
        self._num_given = self._num_taken = 0
        self._is_running = False


class _Counted(Iterator[Any]):
    """An epoch's batches, counted as they are taken, not as workers load them."""

    def __init__(self, loader: PlacedLoader) -> None:
        self._loader, self._batches = loader, loader.begin()

    def __next__(self) -> Any:
        if self._loader.is_placed:
            self._batches = self._loader.begin()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._loader.end_epoch()
            raise
        self._loader.count()
        return batch

    def __len__(self) -> int:
        return len(self._loader)


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    collectives: Collectives,
    sampler: Sampler[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    deals_to_one: bool = False,
) -> PlacedLoader:
    """A loader over this rank's share; of a dataset without a length, over what it yields here.

    ``deals_to_one``: a rank that is alone is dealt its samples, too, in the order of ``DistributedSampler`` and not in
    one that torch's generator says.
    """
    if sampler is None and not isinstance(dataset, IterableDataset):
        sized: Any = dataset
        if collectives.world_size > 1 or deals_to_one:
            sampler = _Dealt(
                dataset,
                num_replicas=collectives.world_size,
                rank=collectives.rank,
                shuffle=shuffle,
                drop_last=drop_last,
            )
        else:
            sampler = _Shuffled(sized) if shuffle else _InOrder(sized)
    return PlacedLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )

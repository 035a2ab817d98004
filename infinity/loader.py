"""Loaders of micro-batches: each rank gets its share of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from infinity.errors import ConfigError
from infinity.tiers.collectives import Collectives

ROUTES = {"train": True, "eval": False, "predict": False}
"""Whether samples are shuffled."""


def is_training(route: str) -> bool:
    """Whether the route shuffles. Raises ConfigError if there is no such route."""
    if route not in ROUTES:
        raise ConfigError("route", route, f"one of {', '.join(ROUTES)}")
    return ROUTES[route]


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
) -> DataLoader[Any]:
    """A loader over this rank's share; of a dataset without a length, over what it yields here."""
    if sampler is None and collectives.world_size > 1 and not isinstance(dataset, IterableDataset):
        sampler = DistributedSampler(
            dataset,
            num_replicas=collectives.world_size,
            rank=collectives.rank,
            shuffle=shuffle,
            drop_last=drop_last,
        )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        shuffle=shuffle if sampler is None and not isinstance(dataset, IterableDataset) else None,
        drop_last=drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )

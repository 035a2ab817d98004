"""A loader that never ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class RepeatingLoader:
    """Iterates over ``loader`` again and again; a sampler with ``set_epoch`` hears of each new round."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = 0
        self._rest = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._rest)
        except StopIteration:
            self._epoch += 1
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
            self._rest = iter(self.loader)
            return next(self._rest)

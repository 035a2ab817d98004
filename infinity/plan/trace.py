"""Recording the order in which a pass touches things: once is enough, a training step repeats itself.

Pure. Two traces are taken in the first step: the live set's (which param group is used when) drives gathering ahead on
the device, the store's (which chunk is leased for what) is uploaded to the daemon, which prefetches and evicts by it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from io_daemon.shared.protocol import Access

GROUPS_AHEAD_MAX: Final = 128
"""Groups that are looked at ahead of each use. Each takes Python a millisecond when its turn comes, in which a drive
reads what one can hold that is so small; with no limit a bucket of thousands of them was gone through at every use."""


class AccessRecorder:
    """Collects the store accesses of one pass. What a lease leaves dead is known only at its release."""

    def __init__(self) -> None:
        self._accesses: list[Access] = []

    def acquired(self, chunk: int, read_mask: int, write_mask: int) -> int:
        """Position of the new access, to be named when its lease is released."""
        self._accesses.append(Access(chunk, read_mask, write_mask, 0))
        return len(self._accesses) - 1

    def released(self, position: int, dead_mask: int) -> None:
        self._accesses[position] = self._accesses[position]._replace(dead_mask=dead_mask)

    @property
    def accesses(self) -> Sequence[Access]:
        return self._accesses


class GroupTrace:
    """Uses of param groups in a pass, with a cursor that finds its place again after a deviation."""

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._recorded: list[int] = []
        self._order: list[int] = []
        self._positions: list[list[int]] = [[] for _ in numels]
        self._before: list[int] = [0]
        self._cursor = 0
        self.epoch = 0
        """It grows whenever next uses of groups that were not used are others than before."""

    def begin(self) -> None:
        """A pass begins; the one that ended becomes the prediction."""
        if self._recorded and self._recorded != self._order:
            positions: list[list[int]] = [[] for _ in self._numels]
            before = [0]
            for position, group in enumerate(self._recorded):
                positions[group].append(position)
                before.append(before[-1] + self._numels[group])
            self._order, self._positions, self._before = self._recorded, positions, before  # whole, if interrupted
        self._recorded, self._cursor = [], 0
        self.epoch += 1

    def use(self, group: int) -> None:
        """``group`` is used now; repeated uses in a row count once."""
        if self._recorded and self._recorded[-1] == group:
            return
        self._recorded.append(group)
        positions = self._positions[group]
        index = bisect_right(positions, self._cursor - 1)
        if index < len(positions):
            self.epoch += positions[index] > self._cursor  # others were left out
            self._cursor = positions[index] + 1

    def next_use(self, group: int) -> int | None:
        """The place in the pass at which ``group`` is needed again; None: not in this pass."""
        positions = self._positions[group]
        index = bisect_right(positions, self._cursor - 1)
        return positions[index] if index < len(positions) else None

    def reuse_distance(self, group: int) -> int | None:
        """Elements of other groups used before ``group`` is needed again in this pass; None: not in this pass."""
        place = self.next_use(group)
        return None if place is None else self._before[place] - self._before[self._cursor]

    def upcoming(self, numel_max: int) -> Sequence[int]:
        """The next groups in order, ``GROUPS_AHEAD_MAX`` at most, as long as together they hold at most ``numel_max``
        elements."""
        stop = bisect_right(self._before, self._before[self._cursor] + numel_max) - 1
        return self._order[self._cursor : min(stop, self._cursor + GROUPS_AHEAD_MAX)]

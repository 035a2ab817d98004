"""Which cell of the sweep next: pure. Rounds measured so far in, the next cell out.

It looks at a few starting points with every engine, climbs from the best to better neighbours until there is none, and
then measures the finalists again in turns, so that a drift of the machine meets all of them alike. Of those whose
median lies within the spread of the best one's rounds the one nearest to the default wins: bandwidth is a plateau, and
what a plateau leaves open, training's own order of requests decides (where 1 MiB at depth 4 was as fast as at depth 32
here, a replayed training step took 15 to 25 % longer with it).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from io_daemon.bench.result import SweepCell
from io_daemon.tuning import BLOCK_BYTES, QUEUE_DEPTH

BLOCK_SIZES: Final = tuple(1 << shift for shift in range(16, 23))
DEPTHS: Final = tuple(1 << shift for shift in range(7))
STARTS: Final = ((1 << 18, 4), (1 << 18, 32), (1 << 20, 4), (1 << 20, 32))
CLIMBS_MAX: Final = 10
FAST_FINALISTS, NEAR_FINALISTS = 3, 3
FINALIST_SHARE: Final = 0.90
"""Of the best score so far: what lies below is not measured again. One round is easily this far off."""
FINAL_ROUNDS: Final = 5
GRID_ROUNDS: Final = 3
"""Of every cell, where the whole grid is measured."""
EQUAL_SHARE, GOOD_SHARE = 0.98, 0.96
"""Of the best final score: from the first on nobody would notice, below the second it is worth leaving the default."""


class Cell(NamedTuple):
    engine: str
    bs: int
    iodepth: int


class SweepPlan:
    def __init__(self, engines: Sequence[str], block_sizes: Sequence[int], depths: Sequence[int]) -> None:
        """``engines``: the preferred first. ``block_sizes`` and ``depths`` ascend."""
        self._engines, self._block_sizes, self._depths = list(engines), list(block_sizes), list(depths)
        self._rounds: dict[Cell, list[float]] = {}

    @property
    def num_grid_cells(self) -> int:
        return len(self._engines) * len(self._block_sizes) * len(self._depths)

    def record(self, cell: Cell, score: float) -> None:
        """One round: bytes a second."""
        self._rounds.setdefault(cell, []).append(score)

    def next_cell(self) -> Cell | None:
        """None: enough is known."""
        starts = self._starts()
        for cell in starts:
            if cell not in self._rounds:
                return cell
        if len(self._rounds) < len(starts) + CLIMBS_MAX:
            for cell in self._neighbours(self._best()):
                if cell not in self._rounds:
                    return cell
        finalists = [cell for cell in self._finalists() if len(self._rounds[cell]) < FINAL_ROUNDS]
        return min(finalists, key=lambda cell: len(self._rounds[cell]), default=None)

    def every_cell(self) -> Iterator[Cell]:
        """The whole grid, ``GRID_ROUNDS`` times over."""
        grid = [Cell(*place) for place in itertools.product(self._engines, self._block_sizes, self._depths)]
        for _ in range(GRID_ROUNDS):
            yield from grid

    def chosen(self) -> Cell:
        """Nearest to the default of those within the spread of the best one's rounds, and not far from its median."""
        best = self._best()
        lowest = min(self._rounds[best])
        threshold = min(max(lowest, GOOD_SHARE * self._score(best)), EQUAL_SHARE * self._score(best))
        return min((cell for cell in self._finalists() if self._score(cell) >= threshold), key=self._distance)

    def cells(self) -> list[SweepCell]:
        """All that were measured, the best first."""
        cells = [
            SweepCell(
                engine=cell.engine, bs=cell.bs, iodepth=cell.iodepth, score_bw_bytes=self._score(cell), rounds=rounds
            )
            for cell, rounds in self._rounds.items()
        ]
        return sorted(cells, key=lambda cell: -cell.score_bw_bytes)

    def _score(self, cell: Cell) -> float:
        return statistics.median(self._rounds[cell])

    def _best(self) -> Cell:
        return max(self._rounds, key=self._score)

    def _starts(self) -> list[Cell]:
        """The same few points for every engine, moved to the nearest that the grid has."""
        points = [(_nearest(self._block_sizes, bs), _nearest(self._depths, depth)) for bs, depth in STARTS]
        return [Cell(engine, bs, depth) for engine in self._engines for bs, depth in dict.fromkeys(points)]

    def _neighbours(self, cell: Cell) -> list[Cell]:
        """One step in each direction of the same engine's grid."""
        row, column = self._block_sizes.index(cell.bs), self._depths.index(cell.iodepth)
        steps = [(row, column + 1), (row + 1, column), (row, column - 1), (row - 1, column)]
        return [
            Cell(cell.engine, self._block_sizes[row], self._depths[column])
            for row, column in steps
            if 0 <= row < len(self._block_sizes) and 0 <= column < len(self._depths)
        ]

    def _finalists(self) -> list[Cell]:
        """The fastest, and those nearest to the default that are almost as fast."""
        best_score = self._score(self._best())
        good = [cell for cell in self._rounds if self._score(cell) >= FINALIST_SHARE * best_score]
        fastest = sorted(good, key=self._score, reverse=True)[:FAST_FINALISTS]
        return list(dict.fromkeys([*fastest, *sorted(good, key=self._distance)[:NEAR_FINALISTS]]))

    def _distance(self, cell: Cell) -> tuple[float, int]:
        """Steps in the grid from the default, then the preferred engine."""
        steps = abs(math.log2(cell.bs / BLOCK_BYTES)) + abs(math.log2(cell.iodepth / QUEUE_DEPTH))
        return steps, self._engines.index(cell.engine)


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value.bit_length() - wanted.bit_length()), value))

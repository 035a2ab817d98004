"""Which cell of the sweep next, and which of them at last: pure. Rounds measured so far in, the next cell out.

It looks at a few starting points with every engine, climbs from the best to better neighbours until there is none, and
then measures the candidates again in turns, so that a drift of the machine meets all of them alike. Bandwidth is a
plateau, and what a plateau leaves open, training's own order of requests decides: those within the spread of the best
one's rounds, and the one nearest to the default if its rounds overlap with them, are the finalists, which take a
training step in turns (``steps.step_race``). The nearest to the default wins of those that the one with the shortest
step does not beat.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from io_daemon.bench.result import SweepCell
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH

BLOCK_SIZES: Final = tuple(1 << shift for shift in range(16, 23))
DEPTHS: Final = tuple(1 << shift for shift in range(7))
STARTS: Final = ((1 << 17, 4), (1 << 17, 32), (1 << 19, 4), (1 << 19, 32))
CLIMBS_MAX: Final = 10
FAST_CANDIDATES, NEAR_CANDIDATES = 3, 3
CANDIDATE_SHARE: Final = 0.90
"""A cell below this part of the best score so far is not measured again. One round is easily this far off."""
FINAL_ROUNDS: Final = 5
GRID_ROUNDS: Final = 3
"""Every cell has so many, where the whole grid is measured."""
EQUAL_SHARE: Final = 0.98
"""Nobody would notice from this part of the best final score on."""
FINALISTS_MAX: Final = 4
BEATEN_SHARE: Final = 0.75
"""A finalist is beaten if another one's step was shorter in more of the turns. Six of seven coins seldom fall alike."""
BEATEN_RATIO: Final = 1.03
"""A smaller ratio of a turn's steps, in the median, is not worth leaving the default."""


class Cell(NamedTuple):
    engine: str
    bs: int
    iodepth: int


class SweepPlan:
    def __init__(self, engines: Sequence[str], block_sizes: Sequence[int], depths: Sequence[int]) -> None:
        """``engines``: the preferred first. ``block_sizes`` and ``depths`` ascend."""
        self.engines, self._block_sizes, self._depths = list(engines), list(block_sizes), list(depths)
        self._rounds: dict[Cell, list[float]] = {}

    @property
    def num_grid_cells(self) -> int:
        return len(self.engines) * len(self._block_sizes) * len(self._depths)

    @property
    def best_score(self) -> float:
        return self._score(self._best())

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
        candidates = [cell for cell in self._candidates() if len(self._rounds[cell]) < FINAL_ROUNDS]
        return min(candidates, key=lambda cell: len(self._rounds[cell]), default=None)

    def every_cell(self) -> Iterator[Cell]:
        """The whole grid, ``GRID_ROUNDS`` times over."""
        grid = [Cell(*place) for place in itertools.product(self.engines, self._block_sizes, self._depths)]
        for _ in range(GRID_ROUNDS):
            yield from grid

    def finalists(self) -> list[Cell]:
        """Those whose median lies within the spread of the best one's rounds, and not far from its own; the candidate
        nearest to the default also if but one of its rounds does. ``FINALISTS_MAX`` together, the fastest and the
        nearest to the default first."""
        best = self._best()
        lowest = min(self._rounds[best])
        threshold = min(max(lowest, CANDIDATE_SHARE * self._score(best)), EQUAL_SHARE * self._score(best))
        candidates = self._candidates()
        nearest = min(candidates, key=self._distance)
        reached = {cell: max(self._rounds[cell]) if cell == nearest else self._score(cell) for cell in candidates}
        good = [cell for cell in candidates if reached[cell] >= threshold]
        pairs = zip(sorted(good, key=self._distance), sorted(good, key=self._score, reverse=True), strict=True)
        return list(dict.fromkeys(itertools.chain.from_iterable(pairs)))[:FINALISTS_MAX]

    def chosen(self, steps_s: Mapping[Cell, Sequence[float]]) -> Cell:
        """``steps_s``: of every finalist, one step a turn; empty if none was taken, then the nearest to the default.
        Each is compared with the one that has the shortest median step, and with no other."""
        finalists = sorted(steps_s or self.finalists(), key=self._distance)
        if not steps_s:
            return finalists[0]
        shortest = min(finalists, key=lambda cell: statistics.median(steps_s[cell]))
        return next(cell for cell in finalists if not is_beaten(steps_s[cell], steps_s[shortest]))

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
        return [Cell(engine, bs, depth) for engine in self.engines for bs, depth in dict.fromkeys(points)]

    def _neighbours(self, cell: Cell) -> list[Cell]:
        """One step in each direction of the same engine's grid."""
        row, column = self._block_sizes.index(cell.bs), self._depths.index(cell.iodepth)
        steps = [(row, column + 1), (row + 1, column), (row, column - 1), (row - 1, column)]
        return [
            Cell(cell.engine, self._block_sizes[row], self._depths[column])
            for row, column in steps
            if 0 <= row < len(self._block_sizes) and 0 <= column < len(self._depths)
        ]

    def _candidates(self) -> list[Cell]:
        """The fastest, and those nearest to the default that are almost as fast."""
        best_score = self._score(self._best())
        good = [cell for cell in self._rounds if self._score(cell) >= CANDIDATE_SHARE * best_score]
        fastest = sorted(good, key=self._score, reverse=True)[:FAST_CANDIDATES]
        return list(dict.fromkeys([*fastest, *sorted(good, key=self._distance)[:NEAR_CANDIDATES]]))

    def _distance(self, cell: Cell) -> tuple[float, int]:
        """Steps in the grid from the default, then the preferred engine."""
        steps = abs(math.log2(cell.bs / BLOCK_BYTES)) + abs(math.log2(cell.iodepth / QUEUE_DEPTH))
        return steps, self.engines.index(cell.engine)


def is_beaten(steps_s: Sequence[float], other_s: Sequence[float]) -> bool:
    """Whether the other one's step is shorter by more than turns differ. Only steps of one turn are compared: a drift
    of the machine, or a spell in which the disk is slow, meets both."""
    ratios = [own / other for own, other in zip(steps_s, other_s, strict=True)]
    num_lost = sum(ratio > 1 for ratio in ratios)
    return num_lost > BEATEN_SHARE * len(ratios) and statistics.median(ratios) > BEATEN_RATIO


def _nearest(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda value: (abs(value.bit_length() - wanted.bit_length()), value))

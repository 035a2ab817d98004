"""The parity matrix: which cells exist, and a pairwise selection of them. Pure.

A cell is one combination of tiers, dtype, accumulation, clipping, budget, ranks, optimizer and thresholds. Pairwise:
any two values of any two factors meet in at least one chosen cell (Kuhn, Wallace & Gallo 2004: most faults need no more
than two). Thresholds other than "grouped" meet only AdamW: an optimizer sees chunks, whatever they were gathered for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

TIERS = ("none", "cpu", "nvme")
PAIRWISE_SEED = 20


@dataclass(frozen=True, order=True)
class Cell:
    param_tier: str
    optimizer_tier: str
    dtype: str
    accumulation: int
    clipping: bool
    budget: str
    """"least": the smallest host budget that the engine accepts; "roomy": three times that."""
    num_ranks: int
    optimizer: str = "AdamW"
    """One of ``tests.support.optimizers``."""
    thresholds: str = "grouped"
    """"each": every module of its own and resharded at once; "grouped": several modules a group; "default"."""

    @property
    def in_memory(self) -> bool:
        return self.param_tier == self.optimizer_tier == "none"

    def __str__(self) -> str:
        clip = "clip" if self.clipping else "free"
        return (
            f"{self.param_tier}-{self.optimizer_tier}-{self.dtype}-acc{self.accumulation}-{clip}-{self.budget}"
            f"-{self.num_ranks}rank-{self.optimizer}-{self.thresholds}"
        )


LEVELS: dict[str, Sequence[Any]] = {
    "param_tier": TIERS,
    "optimizer_tier": TIERS,
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 4),
    "clipping": (False, True),
    "budget": ("least", "roomy"),
    "num_ranks": (1, 2),
    "optimizer": ("AdamW", "amsgrad", "SGD"),
    "thresholds": ("grouped", "each", "default"),
}


def full_matrix() -> list[Cell]:
    """Every cell. Without an arena the budget means nothing, so those cells exist once."""
    cells = (Cell(*values) for values in itertools.product(*(LEVELS[f.name] for f in fields(Cell))))
    return [
        cell
        for cell in cells
        if not (cell.in_memory and cell.budget == "roomy")
        and (cell.optimizer == "AdamW" or cell.thresholds == "grouped")
    ]


def pairs_of(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """All pairs of factor values that the cell covers, as (factor, value, factor, value)."""
    return {(i, x, j, y) for (i, x), (j, y) in itertools.combinations(enumerate(astuple(cell)), 2)}


def pairwise(cells: Sequence[Cell], *, seed: int = PAIRWISE_SEED) -> list[Cell]:
    """A small subset of ``cells`` that covers every pair which any of them covers: greedy, ties broken by ``seed``."""
    shuffled = list(cells)
    random.Random(seed).shuffle(shuffled)
    uncovered = set().union(*(pairs_of(cell) for cell in cells))
    chosen: list[Cell] = []
    while uncovered:
        best = max(shuffled, key=lambda cell: len(pairs_of(cell) & uncovered))
        uncovered -= pairs_of(best)
        chosen.append(best)
    return sorted(chosen)

"""The parity matrix: which cells exist, and two selections of them. Pure.

A cell is one combination of stage, tiers, dtype, accumulation, clipping, ranks, budget, optimizer, thresholds, time of
the update and form of the masters.

``pairwise``: any two values of any two factors meet in at least one chosen cell (Kuhn, Wallace & Gallo 2004: most
faults need no more than two). ``crossed``: every combination of the factors that decide together what is kept where,
what is summed first and what travels (stage to ranks); the others (``LATER``), which only cut the same work otherwise,
vary along with them, so that each of their values meets every value of every other factor.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

TIERS = ("none", "cpu", "nvme")
PAIRWISE_SEED = 20


@dataclass(frozen=True, order=True)
class Cell:
    stage: int
    param_tier: str
    optimizer_tier: str
    dtype: str
    accumulation: int
    no_sync: bool
    """All backwards of a step but the last one are inside ``no_sync()``; the configuration knows of no accumulation."""
    clipping: bool
    num_ranks: int
    budget: str = "least"
    """"least": the smallest host budget that the engine accepts; "roomy": three times that."""
    optimizer: str = "AdamW"
    """One of ``tests.support.optimizers``."""
    thresholds: str = "grouped"
    """"each": every module of its own and resharded at once; "grouped": several modules a group; "default"."""
    update: str = "on_use"
    """When chunks are updated: "on_use", "in_step", or "in_backward"."""

    masters: str = "fp32"
    """How the store has fp32 masters: "fp32" or "split"."""

    @property
    def in_memory(self) -> bool:
        return self.param_tier == self.optimizer_tier == "none"

    @property
    def sums(self) -> str:
        """How the gradients of several micro-batches and ranks are added up, see ``reference.Recipe``."""
        if self.no_sync:
            return "no_sync"
        return "once" if self.stage < 2 and self.accumulation > 1 and self.num_ranks > 1 else "every"

    @property
    def is_one(self) -> bool:
        """Whether the engine has such a cell, and it is not another one by another name."""
        if self.stage < 3 and (self.param_tier != "none" or self.thresholds != "grouped"):
            return False  # weights that are whole have no tier and no thresholds
        if self.no_sync and (self.stage > 1 or self.accumulation == 1):
            return False
        if self.in_memory and self.budget == "roomy":
            return False
        if self.update == "in_backward" and (self.stage < 3 or self.clipping or self.dtype == "fp16"):
            return False
        if self.masters == "split" and (self.stage < 3 or self.dtype != "bf16" or self.optimizer == "SGD"):
            return False
        # an optimizer sees chunks, whatever they were gathered for
        return self.optimizer == "AdamW" or self.thresholds == "grouped"

    def __str__(self) -> str:
        micro = f"acc{self.accumulation}{'-no_sync' if self.no_sync else ''}"
        clip = "clip" if self.clipping else "free"
        return (
            f"{self.stage}-{self.param_tier}-{self.optimizer_tier}-{self.dtype}-{micro}-{clip}-{self.num_ranks}rank-"
            f"{self.budget}-{self.optimizer}-{self.thresholds}-{self.update}-{self.masters}"
        )


LEVELS: dict[str, Sequence[Any]] = {
    "stage": (0, 1, 2, 3),
    "param_tier": TIERS,
    "optimizer_tier": TIERS,
    "dtype": ("fp32", "bf16", "fp16"),
    "accumulation": (1, 4),
    "no_sync": (False, True),
    "clipping": (False, True),
    "num_ranks": (1, 2, 4),
}
LATER: dict[str, Sequence[Any]] = {
    "budget": ("least", "roomy"),
    "optimizer": ("AdamW", "amsgrad", "SGD"),
    "thresholds": ("grouped", "each", "default"),
    "update": ("on_use", "in_step", "in_backward"),
    "masters": ("fp32", "split"),
}


def full_matrix(*, ranks: Sequence[int] = (1, 2)) -> list[Cell]:
    """Every cell on so many ranks."""
    levels = {**LEVELS, **LATER, "num_ranks": ranks}
    cells = (Cell(*values) for values in itertools.product(*(levels[f.name] for f in fields(Cell))))
    return [cell for cell in cells if cell.is_one]


def crossed(*, together: Sequence[str] = ()) -> list[Cell]:
    """See above; the factors named in ``together`` are combined too, instead of varying along. On four ranks everything
    is in memory or on the disk: a rank's store knows nothing of how many there are beyond its own."""
    levels = LEVELS | {name: LATER[name] for name in together}
    varying = [name for name in LATER if name not in together]
    cores = (Cell(**dict(zip(levels, values, strict=True))) for values in itertools.product(*levels.values()))
    uncovered = {pair for cell in full_matrix(ranks=LEVELS["num_ranks"]) for pair in pairs_of(cell)}
    later = list(itertools.product(*(LATER[name] for name in varying)))
    chosen = []
    for number, core in enumerate(core for core in cores if core.is_one and _is_crossed(core)):
        rotated = later[number % len(later) :] + later[: number % len(later)]
        named = (replace(core, **dict(zip(varying, values, strict=True))) for values in rotated)
        best = max((cell for cell in named if cell.is_one), key=lambda cell: len(pairs_of(cell) & uncovered))
        uncovered -= pairs_of(best)
        chosen.append(best)
    return chosen


def _is_crossed(core: Cell) -> bool:
    if core.num_ranks < 4:
        return True
    weights = "none" if core.stage < 3 or core.optimizer_tier == "none" else "nvme"
    return core.optimizer_tier != "cpu" and core.param_tier == weights


def pairs_of(cell: Cell) -> set[tuple[int, Any, int, Any]]:
    """All pairs of factor values that the cell covers, as (factor, value, factor, value)."""
    return {(i, x, j, y) for (i, x), (j, y) in itertools.combinations(enumerate(_values_of(cell)), 2)}


_values_of = attrgetter(*(field.name for field in fields(Cell)))


def pairwise(cells: Sequence[Cell], *, seed: int = PAIRWISE_SEED) -> list[Cell]:
    """A small subset of ``cells`` that covers every pair which any of them covers: greedy, ties broken by ``seed``."""
    shuffled = list(cells)
    random.Random(seed).shuffle(shuffled)
    numbers: dict[tuple[int, Any, int, Any], int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(cell)) for cell in shuffled]
    uncovered = (1 << len(numbers)) - 1
    chosen: list[Cell] = []
    while uncovered:
        best = max(range(len(masks)), key=lambda number: (masks[number] & uncovered).bit_count())
        uncovered &= ~masks[best]
        chosen.append(shuffled[best])
    return sorted(chosen)

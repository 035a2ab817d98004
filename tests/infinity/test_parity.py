"""Offload changes no bit: cells of the parity matrix, judged in processes of their own under INFINITY_DEBUG=poison.

The full matrix is ``python -m tests.parity_full`` (``make parity-full``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.parity_full import selection
from tests.support.matrix import LATER, Cell, crossed, full_matrix, pairs_of, pairwise
from tests.support.parity import launch

NUM_STEPS = 4
CELLS = sorted({*selection("pairwise"), *selection("short")})


def test_pairwise_selection_covers_every_pair_of_the_full_matrix() -> None:
    cells = full_matrix()
    chosen = pairwise(cells)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cells))
    assert len(chosen) < len(cells) / 10
    assert chosen == pairwise(cells), "the selection must be the same in every run"


def test_what_a_person_runs_covers_every_pair_on_every_number_of_ranks() -> None:
    cells, ranks = crossed(), list(Cell.__dataclass_fields__).index("num_ranks")
    missing = set().union(*map(pairs_of, full_matrix(ranks=(1, 2, 4)))) - set().union(*map(pairs_of, cells))
    assert missing == {(tier, "cpu", ranks, 4) for tier in (1, 2)}, "on four ranks: in memory, or on the disk"
    assert len(cells) == len(set(cells)) < 700


def test_updates_combines_every_time_of_the_update_and_form_of_the_masters_with_each_cell() -> None:
    def kinds(cells: Iterable[Cell]) -> set[Cell]:
        others = {name: values[0] for name, values in LATER.items() if name not in {"update", "masters"}}
        return {replace(cell, **others) for cell in cells}

    levels = kinds(replace(cell, update="on_use", masters="fp32") for cell in selection("full"))
    possible = {
        cell for cell in kinds(full_matrix(ranks=(1, 2, 4))) if replace(cell, update="on_use", masters="fp32") in levels
    }
    cells = selection("updates")
    assert kinds(cells) == possible
    assert len(cells) == len(possible)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cells(num_ranks: int, tmp_path: Path) -> None:
    """In one launch: its cells share the runs that they are held against."""
    cells = [cell for cell in CELLS if cell.num_ranks == num_ranks]
    verdicts = list(launch(cells, num_steps=NUM_STEPS, num_ranks=num_ranks, directory=tmp_path))
    assert sorted(verdict.cell for verdict in verdicts) == cells
    for verdict in verdicts:
        assert not verdict.failure, f"{verdict.cell}: {verdict.failure}"
    assert [verdict for verdict in verdicts if not verdict.passed or verdict.num_steps != NUM_STEPS] == []


def test_parity_holds_when_python_drops_assert_statements(tmp_path: Path) -> None:
    """Work inside ``assert`` vanishes under ``python -O``; bits would differ or hang. Ruff's S101 finds each."""
    cells = [cell for cell in selection("short") if cell.num_ranks == 2][:1]
    (verdict,) = launch(cells, num_steps=NUM_STEPS, num_ranks=2, directory=tmp_path, python_flags=["-O"])
    assert verdict.passed, verdict.failure

"""Offload changes no bit: cells of the parity matrix, judged in processes of their own under INFINITY_DEBUG=poison.

The full matrix is ``python -m tests.parity_full`` (``make parity-full``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity_full import selection
from tests.support.matrix import Cell, crossed, full_matrix, pairs_of, pairwise
from tests.support.parity import Verdict, launch

NUM_STEPS = 4
CELLS = sorted({*selection("pairwise"), *selection("short")})


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Verdicts:
    return Verdicts(tmp_path_factory)


class Verdicts:
    """Every cell's verdict: one launch of processes for each world size, when its first cell is asked for."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._found: dict[Cell, Verdict] = {}

    def __getitem__(self, cell: Cell) -> Verdict:
        if cell not in self._found:
            directory = self._directories.mktemp(f"ranks{cell.num_ranks}")
            cells = [other for other in CELLS if other.num_ranks == cell.num_ranks]
            for verdict in launch(cells, num_steps=NUM_STEPS, num_ranks=cell.num_ranks, directory=directory):
                self._found[verdict.cell] = verdict
        return self._found[cell]


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


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, verdicts: Verdicts) -> None:
    verdict = verdicts[cell]
    assert not verdict.failure, verdict.failure
    assert verdict.num_steps == NUM_STEPS
    assert (verdict.oracle_loss_bits, verdict.oracle_weight_bits) == (0, 0)
    assert verdict.files_left == []
    assert (verdict.plain_loss_bits, verdict.plain_weight_bits) == (0, 0)


def test_parity_holds_when_python_drops_assert_statements(tmp_path: Path) -> None:
    """Work inside ``assert`` vanishes under ``python -O``; bits would differ or hang. Ruff's S101 finds each."""
    cells = [cell for cell in selection("short") if cell.num_ranks == 2][:1]
    (verdict,) = launch(cells, num_steps=NUM_STEPS, num_ranks=2, directory=tmp_path, python_flags=["-O"])
    assert verdict.passed, verdict.failure

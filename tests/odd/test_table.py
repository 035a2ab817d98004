"""The committed table of odd uses speaks of the cases that there are."""

from __future__ import annotations

from pathlib import Path

from tests.odd import table
from tests.support.cases import cases_of
from tests.support.forkserver import REPOSITORY

COMMITTED: Path = REPOSITORY / "docs" / "odd-uses.md"


def test_the_committed_table_names_the_cases_of_the_files() -> None:
    expected = {
        table.title(module): [table.row_name(case) for case in cases_of(module).by_name.values()]
        for module in table.modules()
    }
    assert table.rows_in(COMMITTED.read_text()) == expected, "run: python -m tests.odd.table >docs/odd-uses.md"

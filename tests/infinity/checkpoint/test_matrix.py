"""What one world size, stage, tier and budget saved, another goes on with: a selection; ``tests.checkpoints_full`` has
the whole matrix."""

from __future__ import annotations

from pathlib import Path

from tests.support.checkpoint_cells import judge_all, selection


def test_any_engine_goes_on_with_what_any_other_saved(tmp_path: Path) -> None:
    cells = selection()
    verdicts = list(judge_all(cells, tmp_path))
    assert len(verdicts) == sum(len(cell.after) for cell in cells)
    assert [verdict for verdict in verdicts if not verdict.passed] == []

"""Copies that come later than they are asked for change no bit, and nobody reads what they have not brought yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import parity
from tests.support.daemon import ServedDaemon
from tests.support.matrix import Cell
from tests.support.second_timeline import LateCopies, second_timeline

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 3
CELLS = (
    Cell(3, "cpu", "cpu", "fp32", 1, False, True, 1, "least", "AdamW", "grouped", "on_use"),
    Cell(3, "nvme", "nvme", "fp32", 4, False, True, 1, "least", "AdamW", "each", "in_step"),
    Cell(3, "nvme", "nvme", "fp32", 1, False, False, 1, "least", "AdamW", "each", "in_backward"),
    Cell(2, "none", "nvme", "fp32", 4, False, True, 1, "least", "AdamW", "grouped", "on_use"),
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedDaemon]:
    daemon = ServedDaemon([tmp_path_factory.mktemp("swap")], *parity.DAEMON_OPTIONS)
    yield daemon
    daemon.close()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_late_copies_change_no_bit(cell: Cell, daemon: ServedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFINITY_IO_SOCKET", daemon.socket)
    monkeypatch.setenv("INFINITY_DEBUG", "poison")
    LateCopies.num_late = 0
    with second_timeline():
        verdict = parity.judge(cell, NUM_STEPS, rank=0, swap_dir=Path(daemon.swap_dirs[0]))
    assert verdict.passed, verdict
    assert LateCopies.num_late > 100

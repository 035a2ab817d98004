"""What a sweep writes is counted from its race to its confirmation, and what it chose is verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from io_daemon.bench import sweep
from io_daemon.bench.run import Silent
from io_daemon.bench.settings import IoSettings
from io_daemon.bench.sweep import SweepSettings, run_sweep
from io_daemon.bench.sweep_plan import Cell


def test_what_the_race_wrote_the_confirmation_may_not_write_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []

    def race(_settings: object, _plan: object, left_bytes: int, *_: object) -> tuple[None, int]:
        left.append(left_bytes)
        return None, 1000

    def confirm(_settings: object, _chosen: object, left_bytes: int, *_: object) -> None:
        left.append(left_bytes)

    monkeypatch.setattr(sweep, "_race", race)
    monkeypatch.setattr(sweep, "_confirm", confirm)
    monkeypatch.setattr(sweep, "_measure", lambda *_: (1e9, 0))
    run_sweep(SweepSettings(directories=(tmp_path,), size=64 << 20, engines=("posix",), cell_s=0.1, remember=False))
    assert left[0] - left[1] == 1000


def test_the_choice_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[IoSettings] = []
    monkeypatch.setattr(sweep, "run_io", lambda settings, _observer: given.append(settings))
    settings = SweepSettings(directories=(tmp_path,), size=64 << 20)
    sweep._confirm(settings, Cell("posix", 1 << 20, 4), 1 << 40, Silent(), [])
    assert given[0].verify

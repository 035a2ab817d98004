"""Work in amounts: none is lost, and several threads are not handed crumbs."""

from __future__ import annotations

from collections import defaultdict

import pytest

from io_daemon.machine.cpu_load import UNIT_FLOPS, UNITS_MIN, CpuLoad

PIECES = [0.3, 0.3, 0.5, 7.0, 0.0, 12.5, 0.2, 30.0, 0.1]
"""Of the work of all threads at a time, in units a thread."""


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_arithmetic_is_owed_until_it_is_worth_handing_out(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    least = 1 if num_threads == 1 else UNITS_MIN
    handed: defaultdict[int, list[int]] = defaultdict(list)
    with CpuLoad(num_threads) as load:
        monkeypatch.setattr(load, "_multiply", lambda thread, num_units: handed[thread].append(num_units))
        total = 0.0
        for piece in PIECES:
            total += piece
            load.compute(piece * UNIT_FLOPS * num_threads)
            done = sum(handed[0])
            assert total - least < done <= total + 1e-6, "no more than what was asked for, and all that is worth it"
    assert all(units >= least for units in handed[0])
    assert [handed[thread] for thread in range(num_threads)] == [handed[0]] * num_threads


def test_rates_are_of_pieces_that_a_replay_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """In smaller ones two threads had a third of the rate at which the replay then worked."""
    handed: list[int] = []
    with CpuLoad(2) as load:
        multiply = load._multiply

        def counted(thread: int, num_units: int) -> None:
            handed.append(num_units)
            multiply(thread, num_units)

        monkeypatch.setattr(load, "_multiply", counted)
        rates = load.calibrate()
    assert rates.num_threads == 2
    assert rates.flops > 0
    assert set(handed) == {UNITS_MIN}

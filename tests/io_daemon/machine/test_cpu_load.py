"""Work in amounts: none is lost, and several threads are given it in pieces, not in crumbs and not all at once."""

from __future__ import annotations

import pytest

from io_daemon.machine.cpu_load import PIECE_UNITS, UNIT_FLOPS, CpuLoad

AMOUNTS = [0.3, 0.3, 0.5, 7.0, 0.0, 12.5, 0.2, 30.0, 0.1]
"""Of work, in units a thread."""


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_arithmetic_is_owed_until_it_makes_a_piece(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 1 if num_threads == 1 else PIECE_UNITS
    given: list[int] = []
    with CpuLoad(num_threads) as load:
        monkeypatch.setattr(load, "_multiply", given.append)
        total = 0.0
        for amount in AMOUNTS:
            total += amount
            load.compute(amount * UNIT_FLOPS * num_threads)
            done = piece * len(given) / num_threads
            assert total - piece < done <= total + 1e-6
    assert sorted(given) == sorted(list(range(num_threads)) * (len(given) // num_threads))


def test_a_rate_counts_all_that_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several threads, in the pieces in which a replay is given its work."""
    given: list[int] = []
    with CpuLoad(2) as load:
        monkeypatch.setattr(load, "_multiply", given.append)
        monkeypatch.setattr("io_daemon.machine.cpu_load._rate", lambda work, amount: (work(), amount)[1])
        rates = load.calibrate()
    assert sorted(given) == [0, 1]
    assert rates.flops == 2 * PIECE_UNITS * UNIT_FLOPS

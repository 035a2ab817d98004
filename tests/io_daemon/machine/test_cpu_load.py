"""Work in amounts: none is lost, and several threads are given it in pieces, not in crumbs and not all at once."""

from __future__ import annotations

import threading

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


def test_no_interrupt_leaves_a_lock_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the threads takes none of Python's: raised within a future's, an interrupt left the thread that
    ended the work waiting for ever, and a replay behind the plan that was killed."""
    with CpuLoad(2) as load:
        load.compute(2 * PIECE_UNITS * UNIT_FLOPS)  # the threads run
        main, entered = threading.get_ident(), threading.Condition.__enter__

        def refused(condition: threading.Condition) -> bool:
            assert threading.get_ident() != main
            return entered(condition)

        monkeypatch.setattr(threading.Condition, "__enter__", refused)
        load.compute(4 * PIECE_UNITS * UNIT_FLOPS)


def test_what_a_thread_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: int) -> None:
        raise MemoryError(thread)

    with CpuLoad(2) as load:
        monkeypatch.setattr(load, "_multiply", fail)
        with pytest.raises(MemoryError):
            load.compute(2 * PIECE_UNITS * UNIT_FLOPS)

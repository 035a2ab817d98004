from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon.bench.steps.drive_life import DriveWear, drive_life

TB = 1e12


@pytest.mark.parametrize(
    ("tbw_bytes", "drives", "days"),
    [
        (700 * TB, [], 700),
        (700 * TB, [DriveWear()], 700),
        (700 * TB, [DriveWear(write_share=0.5), DriveWear(write_share=0.5)], 1400),
        (700 * TB, [DriveWear(), DriveWear()], 700),
        (700 * TB, [DriveWear(percent_used=25)], 525),
        (700 * TB, [DriveWear(percent_used=130)], 0),
        (700 * TB, [DriveWear(written_bytes=100 * 10**12)], 600),
        (700 * TB, [DriveWear(), DriveWear(percent_used=50)], 350),
        (700 * TB, [DriveWear(write_share=0.5), DriveWear(percent_used=50, write_share=0.5)], 700),
        (None, [DriveWear(percent_used=10, written_bytes=70 * 10**12)], 630),
    ],
)
def test_days_until_the_rating_is_written(tbw_bytes: float | None, drives: list[DriveWear], days: float) -> None:
    assert drive_life(TB, tbw_bytes=tbw_bytes, drives=drives).days == pytest.approx(days)


@pytest.mark.parametrize("drives", [[], [DriveWear()], [DriveWear(percent_used=1, written_bytes=10**12)]])
def test_what_is_not_known_is_asked_for(drives: list[DriveWear]) -> None:
    life = drive_life(TB, tbw_bytes=None, drives=drives)
    assert life.days is None
    assert "--tbw" in life.note


def test_one_unknown_drive_makes_all_unknown() -> None:
    known = DriveWear(percent_used=10, written_bytes=70 * 10**12)
    assert drive_life(TB, tbw_bytes=None, drives=[known, DriveWear()]).days is None


def test_an_unknown_share_of_the_writes_is_no_life() -> None:
    life = drive_life(TB, tbw_bytes=700 * TB, drives=[DriveWear(write_share=None)])
    assert life.days is None
    assert "RAID" in life.note


def test_no_writes_no_wear() -> None:
    assert drive_life(0, tbw_bytes=TB, drives=[]).days is None


@given(st.floats(1e9, 1e15), st.floats(1e12, 1e17), st.integers(0, 100))
def test_twice_the_writes_half_the_life(day_bytes: float, tbw_bytes: float, percent_used: int) -> None:
    wear = [DriveWear(percent_used=percent_used)]
    once = drive_life(day_bytes, tbw_bytes=tbw_bytes, drives=wear).days
    twice = drive_life(2 * day_bytes, tbw_bytes=tbw_bytes, drives=wear).days
    assert once is not None
    assert twice == pytest.approx(once / 2)

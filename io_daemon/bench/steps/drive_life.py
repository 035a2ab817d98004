"""How long a drive lives at a rate of writing. Pure arithmetic over given figures.

TBW is what a data sheet promises: terabytes (10^12) written by the host before the flash is worn. Where it is not
known, a drive that says how much was written and how much of its life that took tells it, if coarsely.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PERCENT_USED_MIN: Final = 5
"""Below this a percentage, which is a whole number, says little about the whole."""


class DriveWear(NamedTuple):
    """One drive's past, and its part in what comes. None: not known."""

    percent_used: int | None = None
    written_bytes: int | None = None
    write_share: float | None = 1.0
    """Bytes written to it for every one that the host writes to all directories together."""


class DriveLife(NamedTuple):
    days: float | None
    note: str
    """One sentence: where the figure comes from, or what it would take."""


def drive_life(day_bytes: float, *, tbw_bytes: float | None, drives: list[DriveWear]) -> DriveLife:
    """The life of the drive that goes first.

    Args:
        day_bytes: written a day by the host, to all directories together; at least one drive is assumed.
        tbw_bytes: the rating of each drive, if the user gave it.
    """
    if day_bytes <= 0:
        return DriveLife(None, "nothing is written: the drive does not wear")
    drives = drives or [DriveWear()]
    lives = [_one_life(day_bytes, tbw_bytes, wear) for wear in drives]
    known = [life for life in lives if life.days is not None]
    if len(known) < len(lives):
        return next(life for life in lives if life.days is None)
    return min(known, key=lambda life: life.days or 0.0)


def _one_life(day_bytes: float, tbw_bytes: float | None, wear: DriveWear) -> DriveLife:
    if wear.write_share is None:
        return DriveLife(
            None,
            "unknown: how much each drive is written for what the host writes depends on what lies above them (a RAID "
            "with parity or copies, LVM): measure it on the drives",
        )
    day_bytes *= wear.write_share
    source = "the rating given"
    if tbw_bytes is None:
        if wear.percent_used is None or wear.written_bytes is None:
            return DriveLife(None, "unknown: give the drive's rating in TB written, from its data sheet, with --tbw")
        if wear.percent_used < PERCENT_USED_MIN:
            return DriveLife(
                None,
                f"unknown: the drive says {wear.percent_used}% used, too little to tell its rating: give it with --tbw",
            )
        tbw_bytes = wear.written_bytes * 100 / wear.percent_used
        source = (
            f"{tbw_bytes / 1e12:.0f} TB, as {wear.percent_used}% used after {wear.written_bytes / 1e12:.0f} TB tell"
        )
    if wear.percent_used is not None:
        left_bytes = tbw_bytes * max(0.0, 1 - wear.percent_used / 100)
        past = f"{wear.percent_used}% of it used"
    elif wear.written_bytes is not None:
        left_bytes = max(0.0, tbw_bytes - wear.written_bytes)
        past = f"{wear.written_bytes / 1e12:.1f} TB of it written"
    else:
        left_bytes, past = tbw_bytes, "counted as new"
    return DriveLife(left_bytes / day_bytes, f"by {source}, {past}")

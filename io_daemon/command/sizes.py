"""Sizes and times as people write them on a command line."""

from __future__ import annotations

import argparse
import math
from typing import Final

DIGITS_MAX: Final = 30
SHOWN_MAX: Final = 60


def shortened(text: str) -> str:
    """What was typed, as a message shows it."""
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def parse_bytes(text: str) -> int:
    """``4096``, ``512K``, ``1M``, ``2G``: bytes, in powers of 1024; ``64e9`` is what it says."""
    suffixes = {"K": 10, "M": 20, "G": 30, "T": 40}
    digits, shift = (text[:-1], suffixes[text[-1].upper()]) if text[-1:].upper() in suffixes else (text, 0)
    if digits.isdecimal() and len(digits) <= DIGITS_MAX:
        return int(digits) << shift
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is no number of bytes: write 4096, 512K, 2G or 64e9")
    return int(value)


def parse_seconds(text: str) -> float:
    """``10``, ``10s``, ``5m``, ``1h``: seconds."""
    factors = {"s": 1.0, "m": 60.0, "h": 3600.0}
    digits, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1.0)
    try:
        return float(digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 10, 10s, 5m or 1h") from None


def parse_timeout(text: str) -> float:
    """The seconds of a wait: above 0, and it ends within a day."""
    from io_daemon.config import TIMEOUT_S_MAX  # who asks for sizes alone is spared its models

    seconds = parse_seconds(text)
    if not 0 < seconds <= TIMEOUT_S_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait: write 10, 10s, 5m or 1h, and no more than 24h")
    return seconds

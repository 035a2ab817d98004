"""Figures as people read them: three digits and a unit. Pure."""

from __future__ import annotations

import math

UNKNOWN = "–"


def rate_text(bytes_per_s: float) -> str:
    return f"{decimal_bytes_text(bytes_per_s)}/s"


def decimal_bytes_text(num_bytes: float) -> str:
    """Powers of 1000, as drives are sold and rates are given."""
    return _scaled(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def binary_bytes_text(num_bytes: float) -> str:
    """Powers of 1024, as memory comes."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def block_text(num_bytes: int) -> str:
    """The size as ``--bs`` takes it: 4K, 1M."""
    for shift, suffix in ((30, "G"), (20, "M"), (10, "K")):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{suffix}"
    return str(num_bytes)


def latency_text(nanoseconds: float) -> str:
    return _scaled(nanoseconds, 1000, ("ns", "µs", "ms", "s"))


def seconds_text(seconds: float) -> str:
    return latency_text(seconds * 1e9) if 0 < seconds < 100 else f"{seconds:,.0f} s"


def share_text(share: float) -> str:
    return f"{100 * share:.1f} %"


def count_text(count: float) -> str:
    return f"{count:,.0f}"


def number_text(value: float) -> str:
    """The text of a figure without a unit, where ``count_text`` would show too few digits or too many."""
    return count_text(value) if value >= 100 else _three_digits(value)


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 0.9995 * base and power < len(units) - 1:  # what three digits round up to the base, too
        value /= base
        power += 1
    return f"{_three_digits(value)} {units[power]}"


def _three_digits(value: float) -> str:
    if value == int(value) and abs(value) < 10_000:
        return str(int(value))
    rounded = float(f"{value:.3g}")
    decimals = 2 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:.{max(0, min(decimals, 3))}f}"

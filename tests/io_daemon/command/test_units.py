"""Figures as people read them."""

from __future__ import annotations

import pytest

from io_daemon.command.units import (
    binary_bytes_text,
    block_text,
    decimal_bytes_text,
    latency_text,
    number_text,
    rate_text,
    seconds_text,
)
from io_daemon.policy.step_trace import world_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rate_text(1.9e9), "1.90 GB/s"),
        (rate_text(0), "0 B/s"),
        (decimal_bytes_text(999.7e6), "1.00 GB"),  # three digits never say 1000 MB
        (decimal_bytes_text(12.34e9), "12.3 GB"),
        (decimal_bytes_text(5e18), "5000 PB"),
        (binary_bytes_text(16 << 30), "16 GiB"),
        (block_text(1 << 20), "1M"),
        (block_text(1536 << 10), "1536K"),
        (block_text(1000), "1000"),
        (latency_text(999), "999 ns"),
        (latency_text(1_800_000), "1.80 ms"),
        (latency_text(0.5), "0.500 ns"),
        (seconds_text(0.0123), "12.3 ms"),
        (seconds_text(0.0), "0 s"),
        (seconds_text(4321), "4,321 s"),
        (number_text(27.04), "27.0"),
        (number_text(12345.6), "12,346"),
        (world_text(1, 1), "one rank"),
        (world_text(1, 8), "8 ranks on one node"),
        (world_text(4, 8), "32 ranks, 8 on each of 4 nodes"),
    ],
)
def test_three_digits_and_a_unit(text: str, expected: str) -> None:
    assert text == expected

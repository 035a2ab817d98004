"""The sentence at the end holds together: what it says of seconds follows from the rate that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from io_daemon.bench.advice import advise_io, mixed_step_s
from io_daemon.bench.settings import IoSettings
from tests.support.bench_reports import io_result


def settings(**changes: Any) -> IoSettings:
    return IoSettings.model_validate({"directories": (Path("/nvme0"),), "rw": "rw", **changes})


def test_seconds_of_a_step_are_those_of_the_steady_rate() -> None:
    """After a burst the mean of the whole run is nothing that training would see."""
    result = io_result()
    if result.steady.bw_bytes is None or result.steady.burst_bw_bytes is None:
        raise AssertionError(result.steady)
    said = advise_io(settings(), result)
    assert f"{result.steady.bw_bytes / 1e9:.2f} GB/s once steady" in said
    [seconds] = re.findall(r"spends (\d+) s on I/O", said)
    assert int(seconds) == round(mixed_step_s(result.steady.bw_bytes))


def test_without_a_burst_both_are_of_the_whole_run() -> None:
    result = io_result()
    steady = result.steady.model_copy(update={"burst_bw_bytes": None})
    if result.read is None or result.write is None:
        raise AssertionError(result)
    rate = result.read.bw_bytes + result.write.bw_bytes
    said = advise_io(settings(), result.model_copy(update={"steady": steady}))
    assert f"{rate / 1e9:.2f} GB/s of training's mix" in said
    assert f"spends {mixed_step_s(rate):.0f} s" in said


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"rw": "read"}, "Reads with"),
        ({"rw": "randwrite"}, "Writes with"),
        ({"rwmixread": 80}, "Mixed I/O with"),
        ({"rwmixread": 0}, "Writes with"),
    ],
)
def test_the_kind_of_load_is_the_one_asked_for(changes: dict[str, Any], begins: str) -> None:
    """Not the one of which something happened to end in the measured time."""
    assert advise_io(settings(**changes), io_result(write=None)).startswith(begins)

"""Is a report worse than an earlier one?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from io_daemon.bench.report.baseline import compare_with_baseline, no_longer_steady, parse_percent
from io_daemon.bench.result import CompareResult, Direction, Report, SteadyState
from io_daemon.errors import ConfigError
from tests.support.bench_reports import RESULTS, io_result, machine_facts, nvme, report


def slower(factor: float) -> Direction:
    read = io_result().read
    assert read is not None
    return read.model_copy(update={"bw_bytes": read.bw_bytes / factor})


@pytest.mark.parametrize("kind", RESULTS)
def test_a_report_is_no_worse_than_itself(kind: str) -> None:
    assert compare_with_baseline(report(kind), report(kind), 0.0) == []


def test_a_rate_that_fell() -> None:
    (regression,) = compare_with_baseline(report("io", read=slower(1.25)), report("io"), 0.10)
    assert regression.figure == "read bw"
    assert regression.worse == pytest.approx(0.20)
    assert "20.0 % worse" in str(regression)
    assert compare_with_baseline(report("io", read=slower(1.25)), report("io"), 0.21) == []


def test_a_rate_that_rose_is_no_regression() -> None:
    assert compare_with_baseline(report("io", read=slower(0.5)), report("io"), 0.0) == []


def test_a_p99_that_rose() -> None:
    write = io_result().write
    assert write is not None
    clat = write.clat.model_copy(update={"p99_ns": write.clat.p99_ns * 3})
    now = report("io", write=write.model_copy(update={"clat": clat}))
    (regression,) = compare_with_baseline(now, report("io"), 0.5)
    assert regression.figure == "write clat p99"
    assert regression.worse == pytest.approx(2.0)


def test_the_worst_comes_first() -> None:
    steady = io_result().steady.model_copy(update={"bw_bytes": 1e9})
    found = compare_with_baseline(report("io", read=slower(1.25), steady=steady), report("io"), 0.1)
    assert [regression.figure for regression in found] == ["steady bw", "read bw"]


def test_a_figure_that_is_there_no_more() -> None:
    """However much worse the others may be."""
    found = compare_with_baseline(report("io", write=None), report("io"), 5.0)
    assert [regression.figure for regression in found] == ["write bw", "write clat p99"]
    assert str(found[0]).startswith("write bw: not measured, was ")


def test_a_figure_that_the_baseline_lacks_is_no_regression() -> None:
    assert compare_with_baseline(report("io"), report("io", write=None), 0.0) == []


def test_a_state_that_is_not_steady_is_said_and_no_regression() -> None:
    steady = SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)
    restless = report("io", steady=steady)
    assert compare_with_baseline(restless, report("io"), 0.0) == []
    assert "not reached" in (no_longer_steady(restless, report("io")) or "")
    assert no_longer_steady(report("io"), report("io")) is None
    assert no_longer_steady(report("io"), restless) is None
    assert no_longer_steady(report("step"), report("step")) is None


def test_a_baseline_without_figures_is_refused() -> None:
    steady = SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)
    with pytest.raises(ConfigError, match="no figure"):
        compare_with_baseline(report("io"), report("io", read=None, write=None, steady=steady), 0.1)


def test_seconds_per_step() -> None:
    (regression,) = compare_with_baseline(report("step", step_s=120.0), report("step"), 0.1)
    assert (regression.before, regression.now) == ("96 s", "120 s")
    assert compare_with_baseline(report("step", step_s=90.0), report("step"), 0.0) == []


def test_the_rate_that_a_sweep_chose() -> None:
    chosen = report("sweep").result.chosen  # type: ignore[union-attr]
    now = report("sweep", chosen=chosen.model_copy(update={"score_bw_bytes": chosen.score_bw_bytes / 2}))
    (regression,) = compare_with_baseline(now, report("sweep"), 0.1)
    assert regression.worse == pytest.approx(0.5)


def test_ratios_to_fio_have_their_own_directions() -> None:
    result = report("compare").result
    assert isinstance(result, CompareResult)
    doubled = [line.model_copy(update={"ratio": line.ratio * 2}) for line in result.lines[:4]]
    now = report("compare", lines=[*doubled, *result.lines[4:]])
    found = compare_with_baseline(now, report("compare"), 0.1)
    assert len(found) == 3
    assert not any(regression.figure.startswith("bw ") for regression in found)


def with_setting(made: Report, key: str, value: Any) -> Report:
    return made.model_copy(update={"settings": {**made.settings, key: value}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: with_setting(made, "bs", 4096), ["bs 4096", "now 1048576"]),
        (lambda made: with_setting(made, "iodepth", 1), ["iodepth 1", "now 32"]),
        (lambda made: with_setting(made, "engine", "posix"), ["engine posix", "now io_uring"]),
        (lambda made: with_setting(with_setting(made, "rw", "read"), "bs", 512), ["rw read", "bs 512"]),
        (lambda made: report("io", direct=False), ["direct I/O False"]),
        (lambda made: report("sweep"), ["kind sweep", "now io"]),
    ],
)
def test_what_was_measured_otherwise_is_refused(change: Callable[[Report], Report], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        compare_with_baseline(report("io"), change(report("io")), 0.1)
    assert all(word in str(caught.value) for word in words)


def test_another_drive_is_refused_and_another_directory_on_it_is_not() -> None:
    other = machine_facts()
    place = other.directories[0].model_copy(
        update={"device": nvme("nvme0n1").model_copy(update={"model": "Other 990"})}
    )
    baseline = report("io", machine=other.model_copy(update={"directories": [place]}))
    with pytest.raises(ConfigError, match="Other 990"):
        compare_with_baseline(report("io"), baseline, 0.1)
    assert compare_with_baseline(report("io", directory="/nvme0/elsewhere"), report("io"), 0.1) == []


def test_machine_facts_of_another_version_are_refused() -> None:
    baseline = report("io").model_copy(update={"machine": {}})
    with pytest.raises(ConfigError, match="measure it anew"):
        compare_with_baseline(report("io"), baseline, 0.1)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("2.5 %", 0.025), ("0", 0.0), ("150%", 1.5)])
def test_percent(text: str, share: float) -> None:
    assert parse_percent(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-1%", "nan", "inf%", "ten"])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="10%"):
        parse_percent(text)

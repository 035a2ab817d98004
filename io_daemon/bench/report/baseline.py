"""Is a report worse than an earlier one? Pure: what to compare is read from the two reports alone.

Rates and 99th percentiles of ``io``, the chosen rate of ``sweep``, the ratios to fio of ``compare``, the seconds of
``step``. CPU and medians are left out of ``io``: one depends on the machine's other load, the other
follows the rate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from io_daemon.bench.report.sheet import METRIC_NAMES, load_text
from io_daemon.bench.result import CompareResult, IoResult, Report, StepResult, SweepResult
from io_daemon.command.units import latency_text, rate_text, seconds_text
from io_daemon.errors import ConfigError
from io_daemon.machine.facts import MachineFacts

DECISIVE: Final = {
    "io": ("rw", "rwmixread", "bs", "iodepth", "numjobs", "engine", "direct", "size"),
    "sweep": ("rwmixread", "engines", "size"),
    "compare": ("rws", "rwmixread", "engines", "block_sizes", "iodepths", "direct", "size"),
    "step": ("trace", "engine", "bs", "iodepth", "verify", "size", "host_budget_bytes", "compute_tflops", "threads"),
}
"""Settings that two comparable reports of one kind share."""
STEADY: Final = "steady bw"


@dataclass(frozen=True)
class Regression:
    """``worse`` is a share: 0.25 for a rate that fell, or a time that rose, by a quarter; infinite where the figure is
    there no more."""

    figure: str
    before: str
    now: str
    worse: float

    def __str__(self) -> str:
        by = f": {100 * self.worse:.1f} % worse" if math.isfinite(self.worse) else ""
        return f"{self.figure}: {self.now}, was {self.before}{by}"


@dataclass(frozen=True)
class _Figure:
    value: float
    text: str
    more_is_better: bool

    def worse_than(self, before: _Figure) -> float:
        """The share by which it is worse; negative if better."""
        if before.value <= 0:
            return 0.0
        change = self.value / before.value - 1
        return -change if self.more_is_better else change


def compare_with_baseline(report: Report, baseline: Report, max_regression: float) -> list[Regression]:
    """Figures that are worse by more than the share ``max_regression``, or are there no more, worst first.

    Raises ConfigError if the two measured different things, naming what differs, or the earlier one nothing."""
    refuse_other(baseline, report.kind, report.settings, report.machine)
    # what was asked for is not what was had where a filesystem refuses direct I/O
    direct_before, direct_now = getattr(baseline.result, "direct", None), getattr(report.result, "direct", None)
    if direct_before != direct_now:
        _refuse(baseline, [f"direct I/O {_word(direct_before)}, now {_word(direct_now)}"])
    before, now = _figures(baseline), _figures(report)
    if not before:
        raise ConfigError("baseline", baseline.started, "has no figure in it: measure it anew, for longer")
    regressions = [
        Regression(name, figure.text, now[name].text, worse)
        for name, figure in before.items()
        if name in now and (worse := now[name].worse_than(figure)) > max_regression
    ]
    regressions += [
        Regression(name, figure.text, "not measured", math.inf)
        for name, figure in before.items()
        if name not in now and name != STEADY
    ]
    return sorted(regressions, key=lambda regression: -regression.worse)


def no_longer_steady(report: Report, baseline: Report) -> str | None:
    """What to say of a steady state that only the earlier run reached. It is no regression: whether the rate settles
    is a matter of the measured time and of the machine's other load, too, and the means of both runs are compared."""
    before = _figures(baseline).get(STEADY)
    if before is None or STEADY in _figures(report):
        return None
    return f"{STEADY}: not reached, was {before.text}: not compared; measure longer (--runtime)"


def refuse_other(baseline: Report, kind: str, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Raises ConfigError if what is to be measured is something else: known before it is."""
    differences = list(_differences(baseline, kind, settings, machine))
    if differences:
        _refuse(baseline, differences)


def _refuse(baseline: Report, differences: Sequence[str]) -> NoReturn:
    raise ConfigError(
        "baseline", baseline.started, f"measured something else: {'; '.join(differences)}; measure it anew"
    )


def parse_percent(text: str) -> float:
    """``10%`` or ``10``: 0.1."""
    try:
        percent = float(text.strip().removesuffix("%"))
    except ValueError:
        percent = math.nan
    if not (math.isfinite(percent) and percent >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no percentage: write 10% or 2.5%")
    return percent / 100


def _differences(baseline: Report, kind: str, settings: Mapping[str, Any], machine: Mapping[str, Any]) -> Iterator[str]:
    if kind != baseline.kind:
        yield f"kind {baseline.kind}, now {kind}"
        return
    for key in DECISIVE[baseline.kind]:
        before, now = baseline.settings.get(key), settings.get(key)
        if before != now:
            yield f"{key} {_word(before)}, now {_word(now)}"
    drives_before, drives_now = _drives(baseline.machine, baseline), _drives(machine, baseline)
    if drives_before != drives_now:
        yield f"drives {_word(drives_before)}, now {_word(drives_now)}"


def _word(value: object) -> str:
    return ", ".join(map(_word, value)) or "none" if isinstance(value, list) else str(value)


def _drives(machine: Mapping[str, Any], baseline: Report) -> list[str]:
    """Models of all drives, or names where there is no model, in the order of the directories."""
    if (facts := MachineFacts.of_report(machine)) is None:
        problem = f"its machine facts are another version's ({baseline.version}): measure it anew"
        raise ConfigError("baseline", baseline.started, problem)
    found: list[str] = []
    for directory in facts.directories:
        if directory.device is None:
            found.append(directory.filesystem or "unknown")
        else:
            found += sorted(disk.model or disk.name for disk in directory.device.disks())
    return found


def _figures(report: Report) -> dict[str, _Figure]:
    """Those that count, by name."""
    match report.result:
        case IoResult():
            return dict(_io_figures(report.result))
        case SweepResult():
            rate = report.result.chosen.score_bw_bytes
            return {"bw of the chosen setting": _rate(rate)}
        case CompareResult():
            return dict(_compare_figures(report.result))
        case StepResult():
            step_s = report.result.step_s
            return {"seconds per step": _Figure(step_s, seconds_text(step_s), more_is_better=False)}


def _io_figures(result: IoResult) -> Iterator[tuple[str, _Figure]]:
    for name, way in (("read", result.read), ("write", result.write)):
        if way is not None:
            yield f"{name} bw", _rate(way.bw_bytes)
            p99_ns = way.clat.p99_ns
            yield f"{name} clat p99", _Figure(p99_ns, latency_text(p99_ns), more_is_better=False)
    if result.steady.bw_bytes is not None:
        yield STEADY, _rate(result.steady.bw_bytes)


def _compare_figures(result: CompareResult) -> Iterator[tuple[str, _Figure]]:
    for line in result.lines:
        name = f"{METRIC_NAMES[line.metric]} of {load_text(line)}, ratio to fio's"
        yield name, _Figure(line.ratio, f"{line.ratio:.3f}", more_is_better=line.metric == "bw_bytes")


def _rate(bytes_per_s: float) -> _Figure:
    return _Figure(bytes_per_s, rate_text(bytes_per_s), more_is_better=True)

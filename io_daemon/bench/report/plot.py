"""A report as pictures. matplotlib (the ``plot`` extra) is loaded on first use, and no global state of it is touched.

Every picture is a ``Figure`` of its own with no window behind it. Colours are Okabe and Ito's, which the colour-blind
tell apart, and viridis; what is drawn in ``INK`` takes the page's own text colour, so that it is legible on light and
dark. No text that a user chose is drawn: matplotlib would read dollar signs as formulas.
"""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from io_daemon.bench.report.sheet import METRIC_NAMES, load_text, setting_of
from io_daemon.bench.result import (
    CompareLine,
    CompareResult,
    Direction,
    IoResult,
    Report,
    StepResult,
    SweepCell,
    SweepReplay,
    SweepResult,
    TimeSeries,
)
from io_daemon.command.units import block_text, latency_text, rate_text, seconds_text
from io_daemon.config import ENGINES_BY_RANK
from io_daemon.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#1f2328"
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
WAY_COLOURS: Final = {"read": BLUE, "write": ORANGE}
WIDTH_INCHES: Final = 8.0
PNG_DPI: Final = 120
GB: Final = 1e9
NEAR_TICKS: Final = (0.5, 0.8, 1.0, 1.25, 2.0)
FAR_TICKS: Final = (0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0, 100.0)
RATIO_MIN: Final = 1e-3
"""A logarithmic scale has no 0."""


def report_figures(report: Report) -> list[tuple[str, Figure]]:
    """(caption, picture) of everything worth seeing in it. Raises ConfigError without matplotlib."""
    match report.result:
        case IoResult():
            return _io_figures(report.result)
        case SweepResult():
            return _sweep_figures(report.result)
        case CompareResult():
            return [("ratio to fio against fio's own spread; CPU has a bound of its own", plot_compare(report.result))]
        case StepResult():
            return [("where a step's time goes", plot_step(report.result))]


def _sweep_figures(result: SweepResult) -> list[tuple[str, Figure]]:
    figures = [("bandwidth by engine, block size and depth", plot_heat_map(result))]
    if result.replay is not None:
        figures.append(("a training step with each finalist, in turns", plot_replay(result, result.replay)))
    return figures + (_io_figures(result.confirmation) if result.confirmation is not None else [])


def _io_figures(result: IoResult) -> list[tuple[str, Figure]]:
    figures = [("latency percentiles", plot_latency(result))]
    if result.series.at_s:
        figures.insert(0, ("rate and latency over time", plot_series(result)))
    return figures


def write_heat_map(result: SweepResult, path: Path) -> None:
    """The picture is a PNG. Raises ConfigError without matplotlib, OSError."""
    path.write_bytes(png_bytes(plot_heat_map(result)))


def png_bytes(figure: Figure) -> bytes:
    """On white: a PNG cannot take its viewer's colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor="white")
    return buffer.getvalue()


def svg_text(figure: Figure, name: str) -> str:
    """One ``<svg>`` element to put into a page: text stays text, INK is the page's colour, the ground transparent.
    ``name``: ASCII, of its own on the page; ids inside the picture begin with it."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # no XML declaration and no DTD inside HTML
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    return svg.replace(INK, "currentColor").strip()


def plot_heat_map(result: SweepResult) -> Figure:
    """GB/s by block size and depth, one panel an engine; cells that the search left out are empty."""
    engines = sorted({cell.engine for cell in result.cells}, key=_engine_rank)
    sizes = sorted({cell.bs for cell in result.cells})
    depths = sorted({cell.iodepth for cell in result.cells})
    figure = _figure(1.6 + 0.42 * len(sizes))
    panels = figure.subplots(1, len(engines), sharey=True, squeeze=False)[0]
    best = max((cell.score_bw_bytes for cell in result.cells), default=1.0) or 1.0
    for engine, axes in zip(engines, panels, strict=True):
        _style(axes, grid=False)
        axes.set_title(engine, color=INK, fontsize=10)
        axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
        axes.set_yticks(range(len(sizes)), [block_text(bs) for bs in sizes])
        axes.set_xlim(-0.5, len(depths) - 0.5)
        axes.set_ylim(-0.5, len(sizes) - 0.5)
        axes.set_xlabel("iodepth")
        for cell in result.cells:
            if cell.engine == engine:
                place = depths.index(cell.iodepth), sizes.index(cell.bs)
                _draw_cell(axes, cell, place, cell.score_bw_bytes / best, chosen=cell == result.chosen)
    panels[0].set_ylabel("bs")
    figure.suptitle("GB/s, reads and writes together; the frame marks the choice", color=INK, fontsize=10)
    return figure


def _draw_cell(axes: Axes, cell: SweepCell, place: tuple[int, int], share: float, *, chosen: bool) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    x, y = place
    colour = colormaps["viridis"](share)
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="none"))
    if chosen:
        frame = Rectangle((x - 0.44, y - 0.44), 0.88, 0.88, fill=False, edgecolor=VERMILION, linewidth=2.5)
        axes.add_patch(frame)
    text_colour = "white" if share < 0.6 else "black"
    rate = f"{cell.score_bw_bytes / GB:.2f}"
    axes.text(x, y, rate, ha="center", va="center", fontsize=7, color=text_colour)


def plot_replay(result: SweepResult, replay: SweepReplay) -> Figure:
    """Seconds of every step as a dot, one row a finalist, its median as a bar; the choice in the heat-map's colour."""
    figure = _figure(1.1 + 0.35 * len(replay.finalists))
    axes = figure.subplots()
    _style(axes)
    for row, finalist in enumerate(replay.finalists):
        colour = VERMILION if setting_of(finalist) == setting_of(result.chosen) else BLUE
        axes.barh(row, finalist.step_s, height=0.6, color=colour, alpha=0.35)
        axes.plot(finalist.steps_s, [row] * len(finalist.steps_s), "o", color=colour, markersize=4)
    names = [f"{finalist.engine} {block_text(finalist.bs)}×{finalist.iodepth}" for finalist in replay.finalists]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds per replayed step")
    return figure


def plot_series(result: IoResult) -> Figure:
    """Rates over time with ramp and steady state marked, and below them the 99th percentile of clat."""
    series, steady = result.series, result.steady
    figure = _figure(4.4)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    for axes in (above, below):
        _style(axes)
        _mark_times(axes, result)
    for name, way, rates in (
        ("read", result.read, series.read_bw_bytes),
        ("write", result.write, series.write_bw_bytes),
    ):
        if way is not None:
            above.plot(series.at_s, [rate / GB for rate in rates], color=WAY_COLOURS[name], label=name, linewidth=1.8)
    if steady.reached and steady.bw_bytes is not None:
        label = f"steady: {rate_text(steady.bw_bytes)}" + (" together" if result.read and result.write else "")
        above.axvspan(0, 0, color=GREEN, alpha=0.15, label=label)
    above.set_ylim(bottom=0)
    above.set_ylabel("GB/s")
    _legend(above)
    # an interval in which no I/O ended has no latency: a gap, not a zero
    p99_ms = [latency_ns / 1e6 if latency_ns else math.nan for latency_ns in series.clat_p99_ns]
    below.plot(series.at_s, p99_ms, color=PURPLE, linewidth=1.5)
    below.set_ylim(bottom=0)
    below.set_ylabel("clat p99, ms")
    below.set_xlabel("seconds; before 0: ramp")
    below.set_xlim(*_span(series))
    return figure


def _mark_times(axes: Axes, result: IoResult) -> None:
    begin_s, end_s = _span(result.series)
    if begin_s < 0:
        axes.axvspan(begin_s, 0, color=INK, alpha=0.08, linewidth=0)
    if result.steady.reached and result.steady.begin_s is not None:
        axes.axvspan(result.steady.begin_s, end_s, color=GREEN, alpha=0.15, linewidth=0)


def _span(series: TimeSeries) -> tuple[float, float]:
    half_s = series.interval_s / 2
    return series.at_s[0] - half_s, series.at_s[-1] + half_s


def plot_latency(result: IoResult) -> Figure:
    """p50 to max of slat and clat on a logarithmic scale."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = _figure(3.2)
    axes = figure.subplots()
    _style(axes)
    for name, way in (("read", result.read), ("write", result.write)):
        if way is not None:
            _plot_percentiles(axes, name, way)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda nanoseconds, _: latency_text(nanoseconds)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xticks(range(5), ["min", "p50", "p99", "p99.9", "max"])
    _legend(axes)
    return figure


def _plot_percentiles(axes: Axes, name: str, way: Direction) -> None:
    places = [place + (0.05 if name == "write" else -0.05) for place in range(5)]  # equal ones stay apart
    for part, summary, marker, line in (("clat", way.clat, "o", "-"), ("slat", way.slat, "s", ":")):
        points = (summary.min_ns, summary.p50_ns, summary.p99_ns, summary.p999_ns, summary.max_ns)
        # a logarithmic scale has no 0, and an engine may hand I/Os over within the clock's tick
        heights = [max(1, point) for point in points]
        axes.plot(places, heights, color=WAY_COLOURS[name], marker=marker, linestyle=line, label=f"{name} {part}")


def plot_compare(result: CompareResult) -> Figure:
    """One panel a figure: each load's ratio to fio's as a dot, fio's own spread as a bar."""
    metrics = [metric for metric in METRIC_NAMES if any(line.metric == metric for line in result.lines)]
    loads = list(dict.fromkeys(load_text(line) for line in result.lines))
    figure = _figure(1.5 + 0.3 * len(loads))
    panels = figure.subplots(1, max(1, len(metrics)), sharey=True, squeeze=False)[0]
    for metric, axes in zip(metrics, panels, strict=False):
        _style(axes)
        axes.axvline(1.0, color=INK, linewidth=0.8)
        axes.set_title(METRIC_NAMES[metric], color=INK, fontsize=10)
        lines = [line for line in result.lines if line.metric == metric]
        most = _scale_ratios(axes, lines)
        for line in lines:
            _draw_ratio(axes, line, loads.index(load_text(line)), most)
    panels[0].set_yticks(range(len(loads)), loads)
    panels[0].set_ylim(len(loads) - 0.4, -0.6)
    figure.suptitle("ours / fio (dot; diamond: outside) and fio / fio (bar)", color=INK, fontsize=10)
    return figure


def _scale_ratios(axes: Axes, lines: list[CompareLine]) -> float:
    """A half and a double lie equally far from 1. The scale follows the dots; one stray run of fio must not crush it.
    Returns its upper end."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    most = 1.2 * max(1.25, *(max(line.ratio, 1 / max(line.ratio, RATIO_MIN)) for line in lines))
    ticks = [tick for tick in (NEAR_TICKS if most < 2.5 else FAR_TICKS) if 1 / most < tick < most]
    axes.set_xscale("log")
    axes.set_xlim(1 / most, most)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    return most


def _draw_ratio(axes: Axes, line: CompareLine, row: int, most: float) -> None:
    low, high = (min(max(bound, 1 / most), most) for bound in line.fio_spread)
    axes.barh(row, high - low, left=low, height=0.5, color=SKY, alpha=0.5)
    marker, colour = ("o", BLUE) if line.inside else ("D", VERMILION)
    axes.plot(max(line.ratio, RATIO_MIN), row, marker=marker, color=colour)


def plot_step(result: StepResult) -> Figure:
    """Seconds of one predicted step by what is done in them, beside the same step with cpu offload."""
    figure = _figure(2.4)
    axes = figure.subplots()
    _style(axes)
    begin_s = 0.0
    for name, seconds, colour, hatch in (
        ("forward and backward", result.compute_s, BLUE, ""),
        ("their stalls", result.stall_s - result.update_stall_s, SKY, "///"),
        ("update", result.update_s, GREEN, ""),
        ("its stalls", result.update_stall_s, ORANGE, "///"),
    ):
        axes.barh(0, seconds, left=begin_s, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5,
                  label=f"{name} {seconds_text(seconds)}")  # fmt: skip
        begin_s += seconds
    axes.barh(1, result.cpu_offload_step_s, height=0.6, color=INK, alpha=0.4)
    axes.set_yticks([0, 1], [f"NVMe {seconds_text(result.step_s)}", f"cpu {seconds_text(result.cpu_offload_step_s)}"])
    axes.set_ylim(1.5, -0.5)
    axes.set_xlabel("seconds per step")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def _engine_rank(engine: str) -> tuple[int, str]:
    known = ENGINES_BY_RANK
    return (known.index(engine) if engine in known else len(known), engine)


def _figure(height_inches: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plot", str(error), "pictures need matplotlib and Jinja2: pip install 'infinity[plot]'"
        ) from error
    return Figure(figsize=(WIDTH_INCHES, min(height_inches, 20.0)), layout="constrained")


def _style(axes: Axes, *, grid: bool = True) -> None:
    axes.patch.set_visible(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(colors=INK, labelsize=8, length=0)
    axes.xaxis.label.set(color=INK, fontsize=9)
    axes.yaxis.label.set(color=INK, fontsize=9)
    if grid:
        axes.grid(color=INK, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)

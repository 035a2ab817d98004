"""Pictures of reports: there, of the expected size, and drawn without touching matplotlib's global state."""

from __future__ import annotations

import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from io_daemon.bench.report.plot import PNG_DPI, WIDTH_INCHES, png_bytes, report_figures, svg_text, write_heat_map
from io_daemon.bench.result import SteadyState, TimeSeries
from tests.support.bench_reports import RESULTS, compare_line, io_result, report, sweep_result

pytest.importorskip("matplotlib")

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def png_size(data: bytes) -> tuple[int, int]:
    assert data.startswith(PNG_MAGIC)
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_has_pictures_of_the_expected_size(kind: str) -> None:
    figures = report_figures(report(kind))
    assert figures
    for caption, figure in figures:
        assert caption
        width, height = png_size(png_bytes(figure))
        assert width == WIDTH_INCHES * PNG_DPI
        assert height == int(figure.get_size_inches()[1] * PNG_DPI)


@pytest.mark.parametrize("kind", RESULTS)
def test_svg_is_one_well_formed_element(kind: str) -> None:
    for _, figure in report_figures(report(kind)):
        root = ElementTree.fromstring(svg_text(figure, "p"))
        assert root.tag.endswith("svg")
        assert root.get("viewBox")
        assert len(list(root.iter())) > 30


def test_pictures_are_the_same_in_every_run() -> None:
    first, second = (svg_text(report_figures(report("sweep"))[0][1], "p") for _ in range(2))
    assert first == second


def test_the_heat_map_shows_every_cell(tmp_path: Path) -> None:
    result = sweep_result()
    figure = report_figures(report("sweep"))[0][1]
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sorted(texts) == sorted(f"{cell.score_bw_bytes / 1e9:.2f}" for cell in result.cells)
    assert [axes.get_title() for axes in figure.axes] == ["io_uring", "libaio", "posix"]
    write_heat_map(result, tmp_path / "map.png")
    assert min(png_size((tmp_path / "map.png").read_bytes())) > 100


def test_a_stray_run_of_fio_does_not_crush_the_scale_of_the_comparison() -> None:
    lines = [
        compare_line("read", "io_uring", "bw_bytes", 1e9, ratio=0.9, spread=(0.01, 89.0)),
        compare_line("write", "io_uring", "bw_bytes", 1e9, ratio=1.1, spread=(0.9, 1.1)),
        compare_line("write", "io_uring", "cpu_s_per_gb", 0.0, ratio=0.0, spread=(0.0, 0.0)),
    ]
    ((_, figure),) = report_figures(report("compare", lines=lines))
    low, high = figure.axes[0].get_xlim()
    assert 0.5 < low < 0.9
    assert 1.1 < high < 2
    assert png_bytes(figure)


def test_a_sweep_of_one_cell_without_confirmation() -> None:
    cell = sweep_result().chosen.model_copy(update={"score_bw_bytes": 0.0})
    (_, figure), *others = report_figures(report("sweep", cells=[cell], chosen=cell, replay=None, confirmation=None))
    assert not others
    assert png_bytes(figure)


def test_a_measurement_too_short_for_a_series() -> None:
    empty = TimeSeries(interval_s=0.5, at_s=[], read_bw_bytes=[], write_bw_bytes=[], clat_p99_ns=[])
    unsteady = SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)
    captions = [caption for caption, _ in report_figures(report("io", series=empty, steady=unsteady))]
    assert captions == ["latency percentiles"]


def test_latencies_of_zero_can_be_drawn() -> None:
    read = io_result().read
    assert read is not None
    nothing = read.slat.model_copy(update=dict.fromkeys(("min_ns", "p50_ns", "p99_ns", "p999_ns", "max_ns"), 0))
    figures = report_figures(report("io", read=read.model_copy(update={"slat": nothing})))
    assert all(png_bytes(figure) for _, figure in figures)


def test_matplotlib_is_loaded_late_and_pyplot_never() -> None:
    code = (
        "import sys, io_daemon.bench.report.plot as plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "from tests.support.bench_reports import report\n"
        "plot.png_bytes(plot.report_figures(report('step'))[0][1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=True)

"""A report on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from io_daemon.bench.report.table import print_report
from io_daemon.bench.result import Report, SteadyState, Verification
from tests.support.bench_reports import RESULTS, WARNING, compare_line, io_result, report, sweep_result


def printed(made: Report, width: int = 80) -> str:
    buffer = io.StringIO()
    print_report(made, Console(file=buffer, width=width, color_system=None))
    return buffer.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("kind", RESULTS)
def test_fits_80_columns_and_ends_in_the_advice(kind: str) -> None:
    made = report(kind, warnings=[WARNING])
    text = printed(made)
    assert max(map(len, text.splitlines())) <= 80
    assert words(text).endswith(made.advice)
    assert WARNING in words(text)
    assert "…" not in text  # nothing is cut off


@pytest.mark.parametrize("kind", RESULTS)
def test_without_warnings_there_is_no_such_block(kind: str) -> None:
    assert "warnings" not in printed(report(kind))


def test_a_narrow_terminal_loses_no_figure() -> None:
    assert "7.20 ms" in printed(report("io"), width=60)


def test_io_tells_burst_from_steady_and_what_was_verified() -> None:
    text = printed(report("io"))
    assert "3.57 GB/s from 6 s on" in text
    assert "6.02 GB/s" in text
    assert "all well of 2,048 blocks" in text
    assert "0.050 s/GB" in text


def test_a_rate_that_was_steady_from_the_start() -> None:
    steady = SteadyState(reached=True, begin_s=0.0, bw_bytes=1.75e9, burst_bw_bytes=None)
    text = printed(report("io", steady=steady))
    assert "1.75 GB/s throughout" in text
    assert "burst" not in text


def test_bad_blocks_are_named() -> None:
    bad = Verification(num_blocks=10, num_bad_blocks=2, seconds=0.1, bad=["file 0, offset 4096: a bit is wrong"])
    text = printed(report("io", verification=bad))
    assert "2 BAD of 10 blocks" in text
    assert "offset 4096: a bit is wrong" in text


def test_io_of_one_direction_without_steady_state_or_verification() -> None:
    unsteady = SteadyState(reached=False, begin_s=None, bw_bytes=None, burst_bw_bytes=None)
    text = printed(report("io", write=None, steady=unsteady, verification=None))
    assert "write" not in text
    assert "both" not in text
    assert "not reached" in text
    assert "switched off" in text


def test_sweep_shows_the_best_first_and_marks_the_choice() -> None:
    made = sweep_result()
    text = printed(report("sweep"))
    lines = [line for line in text.splitlines() if line.rstrip().endswith("chosen")]
    assert len(lines) == 2, "among the cells and among the finalists"
    for line in lines:
        assert made.chosen.engine in line
        assert str(made.chosen.iodepth) in line
    assert f'"block_size": {made.chosen.bs}' in words(text)


def test_sweep_repeats_the_warnings_of_its_confirmation() -> None:
    confirmation = io_result(warnings=["a second one"])
    text = printed(report("sweep", warnings=[WARNING], confirmation=confirmation))
    assert words(text).count(WARNING) == 1
    assert "a second one" in text


def test_compare_says_which_figures_lie_outside() -> None:
    line = compare_line("write", "io_uring", "clat_p99_ns", 1.8e6, ratio=1.25, spread=(0.04, 28.33))
    text = printed(report("compare", lines=[line.model_copy(update={"inside": False})]))
    (row,) = [row for row in text.splitlines() if "OUT" in row]  # also the widest row stays one
    assert row.split()[:3] == ["write", "io_uring", "1M×32"]
    assert "1.250" in row


def test_a_step_tells_the_job_from_the_node() -> None:
    text = words(printed(report("step", num_nodes=4, ranks_per_node=8, node_tokens_per_step=65_536)))
    assert "trained by 32 ranks, 8 on each of 4 nodes" in text
    assert "tokens 262,144 a step, 2,731 a second" in text
    assert "on this node 65,536 a step, 683 a second" in text
    alone = words(printed(report("step", node_tokens_per_step=262_144)))
    assert "trained by one rank" in alone
    assert "on this node" not in alone
    assert (
        "tokens"
        not in words(printed(report("step", tokens_per_step=None, node_tokens_per_step=None))).split("break")[0]
    )


def test_markup_from_outside_is_printed_as_it_is() -> None:
    directory = "/nvme0/[bold red]x[/]\\[y]"
    text = printed(report("io", directory=directory, warnings=["[link=http://example.com]w[/link]"]), width=200)
    assert directory in text
    assert "[link=http://example.com]w[/link]" in text


def test_machine_facts_of_another_version_are_left_out() -> None:
    made = report("io").model_copy(update={"machine": {"unknown": 1}})
    assert made.advice in words(printed(made))


def test_control_sequences_are_shown_not_sent() -> None:
    text = printed(report("io", directory="/nvme0/\x1b[31m\udcff", warnings=["a\x07bell"]), width=200)
    assert "\x1b" not in text
    assert r"/nvme0/\x1b[31m\udcff" in text
    assert r"a\x07bell" in text

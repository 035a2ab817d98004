"""What fio is asked for, how its answer is read, and how turns become a verdict."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from io_daemon.bench import run
from io_daemon.bench.compare import METRICS, CompareSettings, check_writes, compare_turns, figures_of, run_compare
from io_daemon.bench.fio import Figures, fio_command, parse_fio
from io_daemon.bench.fio import buffer_bytes as fio_buffer_bytes
from io_daemon.bench.job import buffer_bytes as job_buffer_bytes
from io_daemon.bench.run import check_memory
from io_daemon.bench.sweep import SweepSettings
from io_daemon.errors import ConfigError
from tests.support.bench_reports import direction, io_result, latency


def comparison(**changes: Any) -> CompareSettings:
    return CompareSettings.model_validate({"directory": Path("/"), "size": 64 << 20, "iodepths": (4,), **changes})


def figures(bw: float = 1e9, p50: float = 1e6, p99: float = 2e6, cpu: float = 0.05) -> Figures:
    return Figures(bw_bytes=bw, clat_p50_ns=p50, clat_p99_ns=p99, cpu_s_per_gb=cpu)


def test_fio_is_given_the_same_load() -> None:
    settings = next(comparison(rws=("randrw",), engines=("io_uring",), runtime_s=1.5, ramp_time_s=0.25).combinations())
    words = dict(
        word.lstrip("-").partition("=")[::2]
        for word in fio_command(settings, Path("/x/target"), Path("/x/buffers"))[1:]
    )
    assert (words["rw"], words["rwmixread"], words["bs"], words["iodepth"]) == ("randrw", "50", "1048576", "4")
    assert (words["runtime"], words["ramp_time"]) == ("1500ms", "250ms")  # fractions of a second would be cut off
    assert (words["offset"], words["size"]) == (str(1 << 20), str(64 << 20))
    assert words["mem"] == "mmapshared:/x/buffers"
    assert (words["ioengine"], words["direct"], words["fixedbufs"]) == ("io_uring", "1", "1")


def fio_report(**job: Any) -> dict[str, Any]:
    def way(num_ios: int) -> dict[str, Any]:
        percentiles = {"50.000000": 100 * num_ios, "99.000000": 200 * num_ios}
        return {
            "total_ios": num_ios,
            "io_bytes": num_ios << 20,
            "bw_bytes": num_ios << 19,
            "clat_ns": {"percentile": percentiles},
        }

    values = {"read": way(10), "write": way(30), "usr_cpu": 5.0, "sys_cpu": 15.0, "job_runtime": 2000, **job}
    return {"jobs": [values]}


def test_fio_is_read_right() -> None:
    settings = next(comparison(rws=("randrw",)).combinations())
    found = parse_fio(json.loads(json.dumps(fio_report())), settings)
    assert found.bw_bytes == 40 << 19
    assert (found.clat_p50_ns, found.clat_p99_ns) == (1000, 2000)  # of reads, although there are more writes
    assert found.cpu_s_per_gb == pytest.approx(0.2 * 2 / ((40 << 20) / 1e9))


def test_our_latencies_are_of_reads_as_fio_s_are() -> None:
    slower = direction(2e9).model_copy(update={"clat": latency(9_000_000)})
    result = io_result(read=direction(1e9), write=slower)
    assert result.read is not None
    assert figures_of(result).clat_p50_ns == result.read.clat.p50_ns


def test_a_ratio_is_judged_by_what_fio_differs_from_itself() -> None:
    turns = [(figures(bw=1e9), figures(bw=1.1e9), figures(bw=1.0e9), figures(bw=1.1e9)) for _ in range(3)]
    lines = {line.metric: line for line in compare_turns(next(comparison().combinations()), turns)}
    assert set(lines) == set(METRICS)
    assert lines["bw_bytes"].ratio == pytest.approx(1.0)
    assert lines["bw_bytes"].fio_spread == pytest.approx((1 / 1.1, 1.1))
    assert all(line.inside for line in lines.values())
    slow = [(first, figures(bw=0.8e9, cpu=0.07), figures(bw=0.8e9, cpu=0.07), last) for first, _, _, last in turns]
    lines = {line.metric: line for line in compare_turns(next(comparison().combinations()), slow)}
    assert not lines["bw_bytes"].inside
    assert not lines["cpu_s_per_gb"].inside


def test_blocks_of_every_size_fit_the_one_file() -> None:
    settings = comparison(block_sizes=(3 << 20, 1 << 20), size=100 << 20)
    sizes = {each.num_blocks * each.bs for each in settings.combinations()}
    assert sizes == {99 << 20}
    with pytest.raises(ValueError, match="raise it to 6291456"):
        comparison(block_sizes=(3 << 20, 1 << 20), size=1 << 20)


def test_what_is_named_twice_is_measured_once_and_in_order() -> None:
    engines = ("libaio", "io_uring")
    lists = {"rws": ("write", "read"), "engines": engines, "block_sizes": (8192, 4096), "iodepths": (2, 1)}
    twice = comparison(**{name: values * 2 for name, values in lists.items()})
    assert {name: getattr(twice, name) for name in lists} == lists
    assert len(list(twice.combinations())) == 16
    sweep = SweepSettings.model_validate({"directories": ("/",), "engines": ("posix", "io_uring", "posix")})
    assert sweep.engines == ("posix", "io_uring")


def test_writes_beyond_the_limit_are_refused_before_they_are_done() -> None:
    settings = comparison(rws=("read", "write", "randrw"), engines=("libaio",), pairs=10, write_limit_bytes=100 << 30)
    combinations = list(settings.combinations())
    check_writes(settings, combinations, 1e9)  # 40 runs of 1.3 s, one and a half times
    with pytest.raises(ConfigError, match="--yes"):
        check_writes(settings, combinations, 2e9)


def test_what_was_typed_is_judged_before_fio_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--write-limit"):
        run_compare(comparison(directory=tmp_path, write_limit_bytes=1))
    with pytest.raises(ConfigError, match="is not installed"):
        run_compare(comparison(directory=tmp_path, size=1 << 27))


def test_buffers_of_fio_count_and_the_option_that_was_typed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = comparison(directory=tmp_path, block_sizes=(1 << 22,), size=1 << 28)
    (combination, *_) = settings.combinations()
    ours_bytes = job_buffer_bytes(combination)
    monkeypatch.setattr(run, "available_bytes", lambda: ours_bytes + fio_buffer_bytes(combination) - 1)
    check_memory(combination)
    with pytest.raises(ConfigError, match="with those of fio") as caught:
        run_compare(settings)
    assert (caught.value.key, caught.value.value) == ("bs", 1 << 22)
    deep = combination.model_copy(update={"bs": 1 << 20, "iodepth": 256})
    monkeypatch.setattr(run, "available_bytes", lambda: 0)
    with pytest.raises(ConfigError) as caught:
        check_memory(deep)
    assert (caught.value.key, caught.value.value) == ("iodepth", 256)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_both_run_on_one_file(tmp_path: Path) -> None:
    settings = comparison(
        directory=tmp_path, rws=("read", "randrw"), engines=("libaio",), pairs=1, runtime_s=0.5, ramp_time_s=0.1
    )
    result = run_compare(settings)
    assert len(result.lines) == 2 * len(METRICS)
    assert all(pair.ours > 0 and pair.fio > 0 for line in result.lines for pair in line.pairs)
    assert result.fio_version.startswith("fio-")
    assert list(tmp_path.iterdir()) == []

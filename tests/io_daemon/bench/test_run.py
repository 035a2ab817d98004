"""Whole measurements on a real filesystem: rates, verification under injected faults, and nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from io_daemon.bench import run
from io_daemon.bench.engines.factory import engine_problem
from io_daemon.bench.result import IoResult, SteadyState, Verification
from io_daemon.bench.run import NothingMeasured, Silent, open_bench, open_targets, run_io
from io_daemon.bench.sample import Sample
from io_daemon.bench.settings import RW, IoSettings
from io_daemon.bench.steady import find_steady_state
from io_daemon.bench.target import DATA_OFFSET
from io_daemon.disk.swap_dir import check_swap_dir
from io_daemon.errors import ConfigError, DeviceIOError, SwapSpaceError
from tests.conftest import MountTmpfs

BS = 64 << 10
SIZE = 4 << 20
NUM_BLOCKS = SIZE // BS


@pytest.fixture(params=["io_uring", "libaio", "posix"])
def engine(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if (problem := engine_problem(name)) is not None:
        pytest.skip(problem)
    return name


def settings(*directories: Path, **changes: Any) -> IoSettings:
    return IoSettings.model_validate(
        {
            "directories": directories,
            "bs": BS,
            "size": SIZE,
            "iodepth": 4,
            "runtime_s": 0.3,
            "ramp_time_s": 0.1,
            "engine": "posix",
            **changes,
        }
    )


def measure(*directories: Path, **changes: Any) -> IoResult:
    """Once more, and for longer, if the machine was busy elsewhere in all of the measured time."""
    try:
        result = run_io(settings(*directories, **changes))
    except NothingMeasured:
        result = run_io(settings(*directories, **{**changes, "runtime_s": 3.0}))
    for directory in directories:
        assert list(directory.iterdir()) == []
    return result


def test_a_round_of_a_few_blocks_is_measured(tmp_path: Path) -> None:
    """As the sweep of a very fast drive has them."""
    result = measure(tmp_path, rw="rw", runtime_s=0.01, ramp_time_s=0.0)
    assert result.read is not None
    assert result.write is not None
    assert result.read.bw_bytes > 0


@pytest.mark.parametrize("rw", RW)
def test_every_kind_of_load_is_measured_and_verified(rw: str, engine: str, tmp_path: Path) -> None:
    result = measure(tmp_path, rw=rw, engine=engine, rwmixread=50)
    reads, writes = "read" in rw or rw.endswith("rw"), "write" in rw or rw.endswith("rw")
    assert (result.read is not None, result.write is not None) == (reads, writes)
    for way in (result.read, result.write):
        if way is not None:
            assert way.num_ios > 0
            assert way.io_bytes == way.num_ios * BS
            assert way.bw_bytes == pytest.approx(way.io_bytes / result.measured_s)
            for latency in (way.slat, way.clat, way.lat):
                assert 0 < latency.min_ns <= latency.p50_ns <= latency.p99_ns <= latency.p999_ns <= latency.max_ns
            assert way.lat.mean_ns == pytest.approx(way.slat.mean_ns + way.clat.mean_ns, rel=1e-3)
    assert result.verification is not None
    assert (result.verification.num_blocks, result.verification.num_bad_blocks) == (NUM_BLOCKS, 0)
    assert (result.engine, result.num_short_ios) == (engine, 0)


def test_the_mix_is_what_was_asked_for(tmp_path: Path) -> None:
    result = measure(tmp_path, rw="rw", rwmixread=75)
    if result.read is None or result.write is None:
        raise AssertionError(result)
    in_flight = 2 * NUM_BLOCKS  # at most, at the ends of the measured time
    total = result.read.num_ios + result.write.num_ios
    assert abs(result.read.num_ios - 0.75 * total) <= in_flight


def test_several_directories_and_jobs_are_loaded_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    seen: list[set[Path]] = []

    class Watch(Silent):
        def phase(self, name: str, total: float) -> None:
            seen.append({path.parent for path in tmp_path.rglob("*.swap")})
            assert len(list(tmp_path.rglob("*.swap"))) == 4

    result = run_io(settings(first, second, numjobs=2, rw="rw"), Watch())
    assert set(map(frozenset, seen)) == {frozenset({first, second})}
    assert result.verification is not None
    assert result.verification.num_blocks == 4 * NUM_BLOCKS
    assert list(tmp_path.rglob("*.swap")) == []


def test_the_time_series_covers_ramp_and_measured_time(tmp_path: Path) -> None:
    result = measure(tmp_path, rw="write", runtime_s=0.6, ramp_time_s=0.3)
    series = result.series
    assert min(series.at_s) < 0 < max(series.at_s)
    assert len(series.at_s) == len(series.read_bw_bytes) == len(series.write_bw_bytes) == len(series.clat_p99_ns)
    assert not any(series.read_bw_bytes)
    assert sum(series.write_bw_bytes) > 0
    assert result.cpu.user_s + result.cpu.system_s > 0


def test_only_the_measured_time_is_looked_at_for_a_steady_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looked_at: list[int] = []

    def seen(rates: Sequence[float], interval_s: float) -> SteadyState | None:
        num_looked_at.append(len(rates))
        return find_steady_state(rates, interval_s)

    monkeypatch.setattr(run, "find_steady_state", seen)
    series = run_io(settings(tmp_path, ramp_time_s=0.5, runtime_s=0.5)).series
    assert num_looked_at == [sum(at_s > 0 for at_s in series.at_s)]
    assert num_looked_at[0] < len(series.at_s)


def test_latencies_of_the_ramp_do_not_count(tmp_path: Path) -> None:
    result = run_io(settings(tmp_path, rw="read", ramp_time_s=1.2, verify=False))
    assert result.read is not None
    assert result.read.clat.num_ios < 2 * result.read.num_ios  # five times as many with those of the ramp


def test_what_is_laid_out_is_on_the_drive_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(tmp_path)
    with open_targets(wanted) as targets, open_bench(wanted, targets) as bench:
        engine = bench.jobs[0].engine
        synced_bytes: list[int] = []
        sync = engine.sync

        def seen() -> None:
            synced_bytes.append(engine.counters().write_bytes)
            sync()

        monkeypatch.setattr(engine, "sync", seen)
        bench.lay_out(Silent())
        assert synced_bytes == [wanted.layout_bytes]


def test_bit_flips_on_the_way_to_the_disk_are_found(engine: str, tmp_path: Path) -> None:
    """The 3rd and the 10th write of laying out; reading alone rewrites nothing."""
    faults = [("flip_write", 3, 5000), ("flip_write", 10, 0)]
    result = measure(tmp_path, rw="read", engine=engine, faults=faults)
    if result.verification is None:
        raise AssertionError(result)
    assert result.verification.num_bad_blocks == 2
    assert any("1 words of 8 bytes differ, the first at byte 5000" in line for line in result.verification.bad)
    assert all(str(tmp_path) in line for line in result.verification.bad)


def test_every_bit_flip_while_verifying_is_found(engine: str, tmp_path: Path) -> None:
    """Writes only, so the first reads are those of the verification."""
    faults = [("flip_read", nth, 100 + nth) for nth in range(NUM_BLOCKS)]
    result = measure(tmp_path, rw="write", engine=engine, faults=faults)
    if result.verification is None:
        raise AssertionError(result)
    assert result.verification.num_bad_blocks == NUM_BLOCKS


def test_short_transfers_go_on_and_are_counted(engine: str, tmp_path: Path) -> None:
    faults = [("short_write", 100_000, 4096), *(("short_read", nth, 4096) for nth in range(400))]
    result = measure(tmp_path, rw="read", engine=engine, ramp_time_s=0, faults=faults)
    if result.verification is None:
        raise AssertionError(result)
    assert result.verification.num_bad_blocks == 0
    assert result.num_short_ios > 0


def test_short_transfers_before_it_is_measured_do_not_count(tmp_path: Path) -> None:
    assert run_io(settings(tmp_path, rw="read", faults=[("short_write", 3, 4096)])).num_short_ios == 0


@pytest.mark.parametrize(("rw", "fault"), [("write", "errno_write"), ("read", "errno_read"), ("write", "errno_read")])
def test_a_failed_io_ends_it_with_errno_path_and_offset(rw: str, fault: str, engine: str, tmp_path: Path) -> None:
    nth = 7 if fault == "errno_read" else NUM_BLOCKS + 3
    with pytest.raises(DeviceIOError) as caught:
        run_io(settings(tmp_path, rw=rw, engine=engine, faults=[(fault, nth, errno.EIO)]))
    assert caught.value.errno == errno.EIO
    assert str(tmp_path) in caught.value.path
    assert caught.value.offset >= 1 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        run_io(settings(tmp_path / "none"))


@pytest.fixture
def small_filesystem(mount_tmpfs: MountTmpfs) -> Path:
    return mount_tmpfs(8 << 20)


def test_a_disk_is_never_filled(small_filesystem: Path) -> None:
    with pytest.raises(SwapSpaceError, match="stay free"):
        run_io(settings(small_filesystem, size=7 << 20, direct=False))
    assert list(small_filesystem.iterdir()) == []
    result = run_io(settings(small_filesystem, size=5 << 20, direct=False))
    assert result.verification is not None
    assert result.verification.num_bad_blocks == 0
    assert any("lies in memory" in warning for warning in result.warnings)


def test_a_read_only_directory(small_filesystem: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_filesystem)], check=True)
    with pytest.raises(ConfigError, match="is not writable"):
        run_io(settings(small_filesystem))


def test_a_file_that_vanishes_is_said(tmp_path: Path) -> None:
    class Remove(Silent):
        def phase(self, name: str, total: float) -> None:
            if name == "ramp":
                [path] = tmp_path.iterdir()
                path.unlink()

    with pytest.raises(DeviceIOError, match="removed meanwhile"):
        run_io(settings(tmp_path, rw="write"), Remove())


def test_buffered_runs_are_warned_about(tmp_path: Path) -> None:
    result = measure(tmp_path, rw="read", direct=False, bs=512, size=1 << 20)
    assert not result.direct
    assert any("page cache" in warning for warning in result.warnings)
    assert result.verification is not None
    assert result.verification.num_bad_blocks == 0


@pytest.mark.parametrize(("times_ram", "is_warned"), [(0.5, True), (1.5, True), (2.5, False)])
def test_files_that_memory_could_hold_are_warned_about(
    times_ram: float, is_warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = settings(tmp_path, direct=False)
    monkeypatch.setattr(run, "ram_bytes", lambda: int(wanted.layout_bytes / times_ram))
    with open_targets(wanted) as targets:
        assert any("measures the page cache" in each for each in run.cache_warnings(wanted, targets)) == is_warned


def test_one_directory_without_direct_io_makes_it_no_direct_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.setattr(run, "check_swap_dir", lambda path: replace(check_swap_dir(path), direct=path.name == "one"))
    assert not run_io(settings(*directories, rw="read")).direct


def test_without_direct_io_nothing_is_measured_or_verified_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    advise = os.posix_fadvise

    def seen(fd: int, offset: int, length: int, advice: int) -> None:
        dropped.append(advice)
        advise(fd, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", seen)
    wanted = settings(tmp_path, rw="read", direct=False)
    with open_targets(wanted) as targets, open_bench(wanted, targets) as bench:
        bench.lay_out(Silent())
        bench.measure(Silent())
        assert dropped == [os.POSIX_FADV_DONTNEED]
        bench.verify(Silent())
        assert dropped == [os.POSIX_FADV_DONTNEED] * 2


def test_a_loop_device_that_caches_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "cached_loops_below", lambda path: ["loop3"] if path == tmp_path else [])
    (warning,) = (each for each in measure(tmp_path, numjobs=2).warnings if "loop device" in each)
    assert warning.startswith(f"{tmp_path}: lies on the loop device loop3")
    assert warning.endswith("losetup --direct-io=on /dev/loop3")


def test_no_byte_is_written_beyond_the_write_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_bytes = SIZE + (512 << 20)
    written: list[int] = []

    class Watching(run.Bench):
        def _sample(self) -> Sample:
            written.append(sum(job.engine.counters().write_bytes for job in self.jobs))
            return super()._sample()

        def verify(self, observer: run.Observer) -> Verification:
            self._sample()  # behind the last write
            return super().verify(observer)

    monkeypatch.setattr(run, "Bench", Watching)
    result = measure(tmp_path, rw="write", runtime_s=60, ramp_time_s=0, numjobs=2, write_limit_bytes=limit_bytes)
    assert any("--write-limit" in warning for warning in result.warnings)
    assert limit_bytes / 2 < written[-1] <= limit_bytes
    assert result.measured_s < 60


def test_a_limit_that_the_ramp_reaches_is_said(tmp_path: Path) -> None:
    """Whatever ended in the moments until that was seen is no measurement."""
    with pytest.raises(NothingMeasured, match=r"write_limit.*before anything was measured: .*--yes"):
        run_io(settings(tmp_path, rw="write", ramp_time_s=60, write_limit_bytes=SIZE + BS))
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_without_any_io_is_said(tmp_path: Path) -> None:
    """Every read takes longer than the measured time."""
    slow = [("delay", nth, 400_000) for nth in range(NUM_BLOCKS, NUM_BLOCKS + 200)]
    with pytest.raises(NothingMeasured, match=r"runtime = 0\.01: no I/O ended"):
        run_io(settings(tmp_path, rw="read", runtime_s=0.01, ramp_time_s=0, verify=False, faults=slow))
    assert list(tmp_path.iterdir()) == []


def test_laying_out_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="write_limit"):
        run_io(settings(tmp_path, write_limit_bytes=SIZE - 1))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_cleans_up(tmp_path: Path) -> None:
    class Interrupt(Silent):
        def progress(self, done: float) -> None:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_io(settings(tmp_path, rw="rw", runtime_s=60), Interrupt())
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bs": 5120}, "no multiple of 4096"),
        ({"bs": 5000, "direct": False}, "multiple of 512"),
        ({"runtime_s": 0.005}, "greater than or equal to 0.01"),
        ({"seed": 1 << 60}, "less than"),
        ({"iodepth": NUM_BLOCKS}, "raise size"),
        ({"rwmixread": 101}, "less than or equal to 100"),
        ({"rw": "trim"}, "'read'"),
        ({"memory": "gpu"}, "--engine kvikio"),
        ({"iodepth": 65, "size": 64 << 20}, "raise --numjobs"),
        ({"direct": False, "bs": 4608}, "below 4096 nor a multiple"),
        ({"directories": ()}, "at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        settings(tmp_path, **changes)


def test_buffers_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_bytes", lambda: 4 * 2 * 4 * BS - 1)
    wanted = settings(tmp_path, numjobs=4, verify=False)
    with pytest.raises(ConfigError, match="for each of 4 jobs"), open_targets(wanted) as targets:
        open_bench(wanted, targets).__enter__()
    monkeypatch.setattr(run, "available_bytes", lambda: 4 * 2 * 4 * BS)
    with open_targets(wanted) as targets, open_bench(wanted, targets) as bench:
        assert len(bench.jobs) == 4


def test_the_rest_of_a_torn_write_is_found_at_any_depth(tmp_path: Path) -> None:
    """Blocks are written twice, and what the first write left behind the first page comes back."""
    wanted = settings(tmp_path, rw="write", iodepth=1)
    with open_targets(wanted) as targets, open_bench(wanted, targets) as bench:
        bench.lay_out(Silent())
        path = targets[0].path
        before = path.read_bytes()
        bench.lay_out(Silent())
        with path.open("r+b") as file:
            for block in range(0, NUM_BLOCKS, 2):
                begin, end = (DATA_OFFSET + block * BS + within for within in (4096, BS))
                file.seek(begin)
                file.write(before[begin:end])
        verification = bench.verify(Silent())
    assert verification.num_bad_blocks == NUM_BLOCKS // 2
    assert "it holds write 1 of this block, the last was 2" in verification.bad[0]


def test_a_write_that_takes_long_is_not_overtaken(tmp_path: Path) -> None:
    """A file of few blocks goes round many times within one slow write; its verification must not be fooled."""
    faults = [("delay", nth, 150_000) for nth in range(40, 400, 60)]
    result = measure(tmp_path, rw="write", size=16 * BS, iodepth=4, runtime_s=0.8, faults=faults)
    assert result.verification is not None
    assert result.verification.num_bad_blocks == 0
    assert result.write is not None
    assert result.write.num_ios > 16

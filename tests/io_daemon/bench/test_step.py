"""``bench step`` end to end: a real daemon, real leases, and nothing left behind however it ends."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from io_daemon.__main__ import main
from io_daemon.bench.result import Report, StepResult
from io_daemon.bench.steps import step
from io_daemon.bench.steps.replay import Replay, StepFigures
from io_daemon.bench.steps.step import advise_step, run_step, writes_expected
from io_daemon.bench.steps.step_settings import StepSettings
from io_daemon.errors import ConfigError
from io_daemon.machine.tuning import Chosen
from io_daemon.policy.step_trace import load, save
from io_daemon.rank.client import Client
from tests.support.daemon import DEADLINE_S, eventually
from tests.support.signals import heed_signals
from tests.support.small_step import FRAME_BYTES, STATE, small_step

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.json.gz"
    save(small_step(), path)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "swap"
    path.mkdir()
    return path


def step_settings(directory: Path, trace: Path | str, **changes: object) -> StepSettings:
    values = {
        "directories": (directory,),
        "trace": str(trace),
        "engine": "posix",
        "bs": 65536,
        "iodepth": 4,
        "steps": 3,
    }
    return StepSettings.model_validate({**values, **changes})


def replay(directory: Path, trace: Path | str, **changes: object) -> StepResult:
    return run_step(step_settings(directory, trace, **changes))


def test_a_step_is_replayed_and_nothing_is_left(directory: Path, trace: Path) -> None:
    result = replay(directory, trace, tbw=100.0, steps=7)
    assert (result.scale, result.num_steps, len(result.steps_s)) == (1.0, 7, 7)
    assert (result.engine, result.bs, result.iodepth) == ("posix", 65536, 4)
    total_s = result.compute_s + result.update_s + result.stall_s
    assert total_s == pytest.approx(result.step_s, rel=1e-6)
    assert result.step_s == pytest.approx(statistics.median(result.steps_s))
    assert 0 <= result.update_stall_s <= result.stall_s + 1e-9
    # 6 chunks of 8 frames through 24: at least what cannot be kept moves, at most everything
    full = small_step()
    dirty_bytes = 6 * (1 + 1 + 6) * FRAME_BYTES
    # what was dirty in the arena when the first measured step began may be written with that step's own
    assert 0 < result.write_bytes <= dirty_bytes + full.num_frames * FRAME_BYTES / 7
    assert 0 < result.read_bytes <= 6 * (2 + 1 + 6) * FRAME_BYTES
    assert result.arena_bytes == full.num_frames * FRAME_BYTES
    assert result.bytes_per_day_written == pytest.approx(result.write_bytes / result.step_s * 86400, rel=1e-3)
    assert result.drive_life_days is not None
    assert "step" in advise_step(result)
    assert list(directory.iterdir()) == []


def test_bytes_that_a_step_puts_off_to_the_next_are_shared_out(
    directory: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(40, 24), (40, 62), (40, 62), (38, 40), (42, 42)]
    taken = iter(StepFigures(1.0, 0.1, 0.25, 0.5, 0.0, read << 20, written << 20) for read, written in rows)
    monkeypatch.setattr(step, "_settle", lambda replay, observer: 1)
    monkeypatch.setattr(Replay, "take_step", lambda self: next(taken))
    result = replay(directory, trace, steps=5)
    assert (result.read_bytes, result.write_bytes) == (40 << 20, 46 << 20)


def test_a_scaled_step_s_figures_are_the_full_model_s(directory: Path) -> None:
    full, settings = small_step(), step_settings(directory, "small")
    seconds = {"step_s": 2.0, "between_s": 0.1, "update_s": 0.2, "stall_s": 1.0, "update_stall_s": 0.6}
    figures = [StepFigures(**seconds, read_bytes=30, write_bytes=10)]
    chosen = Chosen("posix", 65536, 4, None)
    result = step._result(settings, full, full, 0.5, chosen, 2, figures * 3, 1.5)
    assert (result.step_s, result.steps_s, result.cpu_offload_step_s) == (4.0, [4.0] * 3, 3.0)
    assert (result.read_bytes, result.write_bytes) == (60, 20)
    assert result.bytes_per_day_written == pytest.approx(20 / 4.0 * 86400)
    assert (result.compute_s, result.update_s) == pytest.approx((4.0 - 0.4 - 2.0, 0.4))
    assert (result.stall_s, result.update_stall_s) == pytest.approx((2.0, 1.2))
    assert result.stall_share == pytest.approx(0.5)


@pytest.mark.parametrize("verify", [True, False])
def test_a_replay_verifies_as_it_is_told(verify: bool, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(step, "DaemonProcess", lambda **words: given.update(words))
    step._daemon_for(step_settings(directory, "small", verify=verify), Chosen("require:posix", 65536, 4, None))
    assert ("--no-verify-checksums" in given["options"]) != verify


def test_directories_on_one_drive_wear_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(write_shares=lambda: [(SimpleNamespace(name="nvme0n1", health=None), 1.0)])
    facts = SimpleNamespace(directories=[SimpleNamespace(device=device)] * 2)
    monkeypatch.setattr(step, "describe_machine", lambda _directories: facts)
    (wear,) = step._wears([Path("/a"), Path("/b")])
    assert wear.write_share == 1.0


def test_a_large_arena_moves_nothing_once_settled(directory: Path, trace: Path) -> None:
    result = replay(directory, trace, host_budget_bytes=1 << 30)
    assert result.read_bytes == 0
    assert result.drive_life_days is None or result.write_bytes > 0


def test_a_budget_beyond_the_memory_is_warned_about(
    directory: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for there_bytes, num_warnings in ((1 << 30, 0), ((1 << 30) - 1, 1)):
        monkeypatch.setattr(step, "available_bytes", lambda there_bytes=there_bytes: there_bytes)
        result = replay(directory, trace, host_budget_bytes=1 << 30)
        assert sum("--host-budget-bytes" in warning for warning in result.warnings) == num_warnings


def test_a_node_s_ranks_move_so_many_times_as_much(directory: Path, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.json.gz"
    save(small_step().model_copy(update={"num_nodes": 2, "ranks_per_node": 3}), path)
    # when a plan comes in time is chance, and in three steps it decides too much
    alone, node = replay(directory, trace, steps=8), replay(directory, path, steps=8)
    assert (node.num_nodes, node.ranks_per_node) == (2, 3)
    assert (node.tokens_per_step, node.node_tokens_per_step) == (64, 32)
    assert node.read_bytes == pytest.approx(3 * alone.read_bytes, rel=0.4)
    assert node.write_bytes == pytest.approx(3 * alone.write_bytes, rel=0.4)
    warned = [
        any("communication" in line for line in (*result.warnings, advise_step(result))) for result in (alone, node)
    ]
    assert warned == [False, True]


def test_every_rank_of_a_node_has_its_round_trips(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "node.json.gz"
    save(small_step().model_copy(update={"ranks_per_node": 3}), path)
    asked: Counter[int] = Counter()
    acquire = Client.acquire

    def counted(self: Client, chunk: int, *, read: int = 0, write: int = 0) -> int:
        asked[self._rank] += bool(read)  # initial contents are only written
        return acquire(self, chunk, read=read, write=write)

    monkeypatch.setattr(Client, "acquire", counted)
    result = replay(directory, path)
    num_reading = sum(map(bool, small_step().leases.read))
    num_leases = len(small_step().leases.chunk)
    num_steps = result.num_steps + result.num_warm_up_steps
    assert asked == {0: num_steps * num_reading, 1: num_steps * num_leases, 2: num_steps * num_leases}


def test_pinned_kinds_never_reach_the_disk(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "pinned.json.gz"
    save(small_step(pinned_mask=STATE, num_frames=60), path)
    result = replay(directory, path)
    assert result.write_bytes <= 6 * 2 * FRAME_BYTES


def test_a_model_larger_than_the_space_is_scaled(directory: Path) -> None:
    result = replay(directory, "gpt-168m", size=32 << 20, bs=1 << 20)
    assert 0.005 < result.scale < 0.02
    assert result.warnings
    # by bytes, the full model's step
    assert 1e9 < result.read_bytes < 4e9
    assert list(directory.iterdir()) == []


def test_an_accelerator_is_waited_for(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "flops.json.gz"
    full = small_step(measured=False, gap=1e9)
    save(full, path)
    num_flops = sum(full.events.gap) + full.tail
    result = replay(directory, path, compute_tflops=num_flops / 0.1e12)
    assert result.cpu_offload_step_s > 0.09
    assert result.step_s > 0.09


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"compute_tflops": 100.0}, "compute_tflops"),
        ({"write_limit_bytes": 1 << 20}, "write_limit"),
        ({"trace": "no-such-trace"}, "trace"),
        ({"host_budget_bytes": 8 << 10}, "host_budget_bytes"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, object], key: str, directory: Path, trace: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        replay(directory, **{"trace": trace, **settings})  # type: ignore[arg-type]
    assert caught.value.key == key
    assert list(directory.iterdir()) == []


def test_compute_that_would_take_for_ever_is_refused(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "flops.json.gz"
    save(small_step(measured=False, gap=1e14), path)
    with pytest.raises(ConfigError, match="--compute-tflops"):
        replay(directory, path)
    assert list(directory.iterdir()) == []


def test_no_more_is_written_than_was_announced(directory: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all: what one step dirties may be written in the next, so that one of them can write more than its share."""
    written: list[float] = []
    take_step = Replay.take_step

    def counted(self: Replay) -> StepFigures:
        figures = take_step(self)
        written.append(figures.write_bytes)
        return figures

    monkeypatch.setattr(Replay, "take_step", counted)
    result = replay(directory, trace)
    assert len(written) == result.num_steps + result.num_warm_up_steps
    assert 0 < sum(written) <= writes_expected(load(str(trace)), 3)


def test_json_is_the_documented_report(directory: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "step", str(directory), "--trace", str(trace), "--steps", "3", "--engine", "posix", "--json"]
    assert main(words) == 0
    report = Report.model_validate_json(capsys.readouterr().out)
    assert report.kind == "step"
    assert isinstance(report.result, StepResult)


def start_long_replay(directory: Path, trace: Path) -> subprocess.Popen[bytes]:
    """In the middle of its steps when this returns."""
    words = ["bench", "step", str(directory), "--trace", str(trace), "--steps", "1000", "--yes", "--engine", "posix"]
    process = subprocess.Popen(
        [sys.executable, "-m", "io_daemon", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    eventually(lambda: process.poll() is not None or any(directory.glob("*.swap")), "a swap file appears")
    return process


@pytest.fixture
def slow_trace(tmp_path: Path) -> Path:
    path = tmp_path / "slow.json.gz"
    save(small_step(gap=2e-3), path)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals, directory: Path, slow_trace: Path) -> None:
    process = start_long_replay(directory, slow_trace)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert list(directory.iterdir()) == []


def test_after_a_kill_gc_leaves_nothing(directory: Path, slow_trace: Path) -> None:
    process = start_long_replay(directory, slow_trace)
    daemons = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    for pid in daemons:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "its daemon ends")  # type: ignore[misc]
    assert main(["gc", "--swap-dir", str(directory)]) == 0
    assert list(directory.iterdir()) == []

"""The demo's parts: its text, its budget, its verdict, its footprint. The run itself is marked slow."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.commands.demo import footprint as footprint_module
from infinity.commands.demo import run
from infinity.commands.demo.footprint import (
    DeviceBytes,
    Footprint,
    FootprintSampler,
    Sample,
    process_tree,
    pss_bytes,
    pss_of,
    swap_descriptors,
)
from infinity.commands.demo.plot import save_plot
from infinity.commands.demo.summary import LOSS_RATIO_MAX, Summary, summarise
from infinity.commands.demo.text import standard_library_text, unigram_entropy_nats, windows
from infinity.commands.demo.training import (
    BUDGET_SHARE,
    Settings,
    StepRecord,
    count_parameters,
    host_budget_bytes,
    state_bytes,
)
from io_daemon.rank.client import Client
from tests.support.daemon import DEADLINE_S, eventually
from tests.support.signals import heed_signals

PAGE_BYTES = 4096


def record(index: int, loss: float) -> StepRecord:
    return StepRecord(
        index=index,
        loss=loss,
        seconds=2.0,
        tokens_per_s=256.0,
        resident_bytes=1,
        nvme_bytes=1,
        read_bytes=100,
        written_bytes=50,
        hit_rate=0.5,
        stall_s=0.5,
    )


def summary_of(losses: list[float], tmp_path: Path, *, entropy: float = 3.0) -> Summary:
    settings = Settings(swap_dir=tmp_path, dtype=torch.bfloat16, num_steps=len(losses))
    records = [record(index, loss) for index, loss in enumerate(losses)]
    return summarise(settings, 1000, records, unigram_entropy=entropy, footprint=Footprint(peak_pss=7))


def test_text_is_the_standard_library_and_its_entropy_that_of_its_bytes() -> None:
    text = standard_library_text()
    assert b"class OrderedDict" in bytes(text.numpy())
    counts = Counter(bytes(text.numpy()))
    expected = -sum(n / len(text) * math.log(n / len(text)) for n in counts.values())
    assert unigram_entropy_nats(text) == pytest.approx(expected)


def test_windows_are_pieces_of_the_text_and_the_same_for_a_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first, again = (next(windows(text, batch=3, sequence=8, seed=5)) for _ in range(2))
    assert first.shape == (3, 9)
    assert torch.equal(first, again)
    assert torch.equal(first.diff(), torch.ones(3, 8, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_has_a_hundred_million_parameters_and_its_budget_is_a_third_of_its_state(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    numel = count_parameters(Settings(swap_dir=tmp_path, dtype=dtype, num_steps=1))
    assert numel >= 100_000_000
    assert BUDGET_SHARE * host_budget_bytes(numel, dtype) <= state_bytes(numel, dtype)


def test_learning_means_below_the_entropy_and_well_below_the_start(tmp_path: Path) -> None:
    assert summary_of([5.0] * 10 + [2.9] * 10, tmp_path).learned
    assert not summary_of([5.0] * 10 + [3.1] * 10, tmp_path).learned, "above the unigram entropy"
    assert not summary_of([4.0] * 10 + [2.9] * 10, tmp_path).learned, f"above {LOSS_RATIO_MAX} x the start"


def test_picture_is_saved(tmp_path: Path) -> None:
    timeline = [Sample(float(i), 10**9, DeviceBytes(i * 10**9, i * 10**8)) for i in range(12)]
    losses = [5.0, 4.0, 3.0]
    path = tmp_path / "demo.png"
    records = [record(index, loss) for index, loss in enumerate(losses)]
    save_plot(path, records, timeline, summary_of(losses, tmp_path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_pss_counts_a_shared_page_once_over_the_process_tree(tmp_path: Path) -> None:
    """A child that maps the same pages adds less to the sum than those pages are."""
    num_bytes = 64 << 20
    path = tmp_path / "shared"
    path.write_bytes(b"x" * num_bytes)
    program = "import mmap, sys; m = mmap.mmap(open(sys.argv[1], 'r+b').fileno(), 0); sum(m[::4096]); "
    program += "print('ready', flush=True); sys.stdin.read()"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        sum(shared[::PAGE_BYTES])
        alone = pss_bytes(os.getpid())
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            if child.stdout is None or child.stdin is None:
                raise RuntimeError("no pipes")
            child.stdout.readline()
            assert child.pid in process_tree(os.getpid())
            together = sum(pss_bytes(pid) for pid in (os.getpid(), child.pid))
            child.stdin.close()
    assert alone > num_bytes
    assert together - alone < num_bytes / 2


def test_an_arena_that_changes_hands_while_they_are_looked_at_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, daemon, arena = 1, 2, 500
    mapped_by = {rank}

    def look(pid: int) -> int:
        share = arena // len(mapped_by) if pid in mapped_by else 0
        mapped_by.add(daemon)  # between the first look and the second
        return 100 + share

    monkeypatch.setattr(footprint_module, "pss_bytes", look)
    assert sum(pss_of([rank, daemon]).values()) == 200 + arena
    mapped_by.remove(daemon)
    assert sum(pss_of([rank, daemon], above=10 * arena).values()) > 200 + arena, "no peak: one look is enough"


def test_open_swap_files_tell_whether_they_are_direct(tmp_path: Path) -> None:
    buffered, direct = tmp_path / "buffered", tmp_path / "direct"
    descriptors = [os.open(buffered, os.O_RDWR | os.O_CREAT)]
    try:
        try:
            descriptors.append(os.open(direct, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        except OSError:
            pytest.skip("this filesystem has no direct I/O")
        assert swap_descriptors(os.getpid(), tmp_path) == {str(buffered): False, str(direct): True}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def test_sampler_sees_the_peak_of_a_child(tmp_path: Path) -> None:
    num_bytes = 80 << 20
    program = f"import sys; block = b'x' * {num_bytes}; print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        if child.stdout is None or child.stdin is None:
            raise RuntimeError("no pipes")
        sampler = FootprintSampler(child.pid, tmp_path).start()
        child.stdout.readline()
        timeline = sampler.footprint.timeline
        seen = len(timeline)
        eventually(lambda: len(timeline) >= seen + 2, "two more samples, at the sampler's own pace")
        footprint = sampler.stop()
        child.stdin.close()
    assert footprint.peak_pss >= num_bytes
    assert footprint.timeline[-1].seconds > 0


@pytest.mark.slow
def test_demo_runs_from_the_command_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Two steps teach nothing, so the exit code is 1; everything else is as in the full run."""
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    command = [sys.executable, "-m", "infinity", "demo", "--steps", "2", "--json"]
    command += ["--swap-dir", str(swap_dir), "--out", str(tmp_path / "demo.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 1, done.stderr
    figures = json.loads(done.stdout)
    assert len(figures["losses"]) == 2
    assert not figures["learned"]
    assert figures["read_bytes_per_step"] > 0
    assert list(swap_dir.iterdir()) == []
    assert (tmp_path / "demo.png").is_file()


def test_the_demo_has_a_daemon_of_its_own_whoever_runs_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that serves the node's jobs serves its own directories, and the demo's was made just now: it was refused."""

    class EndedHereError(Exception):
        pass

    def train(settings: Settings, text: torch.Tensor, config: dict[str, Any], on_step: object) -> None:
        with contextlib.closing(Client.connect(config["io_daemon"]["socket"], job="job", rank=0)) as client:
            assert client.swap_dirs == (str(settings.swap_dir.resolve()),)
        raise EndedHereError

    monkeypatch.setenv("INFINITY_IO_SOCKET", str(tmp_path / "of-the-node"))
    monkeypatch.setattr(run, "train", train)
    with pytest.raises(EndedHereError):
        run.main(["--swap-dir", str(tmp_path), "--out", str(tmp_path / "demo.png")])


@pytest.mark.parametrize(("command", "number"), [("demo", signal.SIGTERM), ("plan", signal.SIGHUP)])
def test_a_command_that_is_ended_takes_its_directory_with_it(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 1, "zero_optimization": {"stage": 3}}))
    words = {
        "demo": ["--out", str(tmp_path / "demo.png")],
        "plan": ["--config", str(config), "--model-params", "1e8", "--host-budget-bytes", "256M"],
    }[command]
    line = [sys.executable, "-m", "infinity", command, "--swap-dir", str(swap_dir), *words]
    null, pipe, environment = subprocess.DEVNULL, subprocess.PIPE, {**os.environ, "TMPDIR": str(swap_dir)}
    with subprocess.Popen(line, stdout=null, stderr=pipe, preexec_fn=heed_signals, env=environment) as process:
        try:
            eventually(lambda: list(swap_dir.glob(f"infinity-{command}-*")) != [], "its directory is there")
            process.send_signal(number)
            _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert list(swap_dir.iterdir()) == []

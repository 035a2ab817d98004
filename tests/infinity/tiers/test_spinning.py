"""OpenMP's threads leave the daemon their cores while a rank goes at its pace, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity.tiers import spinning as module
from infinity.tiers.spinning import Spinning

NUM_CORES = len(os.sched_getaffinity(0))

SPINNING = """
import os, time
import torch
from infinity.tiers.spinning import spinning
torch.set_num_threads(len(os.sched_getaffinity(0)))
values = torch.zeros(1 << 18)

def cpu_seconds():
    begun = time.process_time()
    for _ in range(40):
        values.add_(1)
        time.sleep(0.005)
    return time.process_time() - begun

def look(change):
    change()
    print(cpu_seconds(), len(os.listdir("/proc/self/task")))

cpu_seconds()
for change in (int, spinning.cut_short, spinning.cut_short, spinning.restore, spinning.restore):
    look(change)
"""


@pytest.mark.skipif(NUM_CORES == 1, reason="one core: no thread of OpenMP waits for another")
def test_threads_between_loops_take_no_core_while_spinning_is_cut_short() -> None:
    if Spinning()._libraries is None:
        pytest.skip("OpenMP is not GNU's")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    ran = subprocess.run([sys.executable, "-c", SPINNING], env=environment, capture_output=True, text=True, check=True)
    seconds, threads = zip(*(map(float, line.split()) for line in ran.stdout.splitlines()), strict=True)
    before, *cut, after, still = seconds
    assert max(cut) < min(before, after, still) / 2
    assert threads[0] < threads[1] == threads[2]
    assert threads[0] == threads[3] == threads[4]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("waits", "is_cut"),
    [
        ([(0.01, 0.004)], False),  # too little to say anything
        ([(0.01, 0.004), (0.01, 0.002)], True),
        ([(1.0, 0.02), (1.0, 0.02)], False),  # a rank that computes
        ([(1.0, 0.02), (1.0, 0.2)], True),
        ([(0.01, 0.004), (0.01, None), (0.01, 0.004)], False),  # a new phase begins between
    ],
)
def test_waits_are_added_up_and_are_a_share_of_the_time(
    waits: list[tuple[float, float | None]], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, cuts = Clock(), []
    monkeypatch.setattr(module, "time", clock)
    spinning = Spinning()
    monkeypatch.setattr(spinning, "cut_short", lambda: cuts.append(True))
    for later_s, waited_s in waits:
        clock.now_s += later_s
        if waited_s is None:
            spinning.restore()
        else:
            spinning.note_wait(waited_s)
    assert bool(cuts) == is_cut


@pytest.mark.parametrize("reason", ["a core is left", "another OpenMP"])
def test_nothing_is_done_where_it_would_change_nothing(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spinning = Spinning()
    monkeypatch.setattr(torch, "get_num_threads", lambda: NUM_CORES - (reason == "a core is left"))
    if reason == "another OpenMP":
        monkeypatch.setattr(spinning, "_libraries", None)
    spinning.cut_short()
    assert not spinning.is_short
    spinning.restore()


def test_a_process_that_may_have_no_more_threads_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    spinning, tries = Spinning(), []

    def refuse(_thread: threading.Thread) -> None:
        tries.append(True)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(torch, "get_num_threads", lambda: NUM_CORES)
    monkeypatch.setattr(spinning, "_libraries", spinning._libraries or object())
    monkeypatch.setattr(threading.Thread, "start", refuse)
    spinning.cut_short()
    spinning.cut_short()
    assert not spinning.is_short
    assert len(tries) == 1


def losses(directory: Path, *, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
    offload = {"device": device} | ({"nvme_path": str(directory)} if device == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "io_daemon": {"host_budget_bytes": 32 << 20} if device == "nvme" else {},
    }
    found = []
    with infinity.initialize(model=model, config=config)[0] as engine:
        for step in range(3):
            loss = engine(torch.randn(2, 96, generator=torch.Generator().manual_seed(step))).square().mean()
            engine.backward(loss)
            engine.step()
            found.append(loss.detach())
    return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the process's own object, which does it as well. Every lease counts as one waited for."""
    asked: list[str] = []
    monkeypatch.setattr(module, "WAITED_S", -1.0)
    monkeypatch.setattr(module, "WAITED_SHARE", -1.0)

    def note(name: str) -> None:
        real = getattr(Spinning, name)

        def noting(spinning: Spinning) -> None:
            asked.append(name)
            real(spinning)

        monkeypatch.setattr(Spinning, name, noting)

    note("cut_short")
    note("restore")
    return asked


def test_an_engine_that_waits_cuts_it_short_for_the_phase_and_gives_it_back(tmp_path: Path, seen: list[str]) -> None:
    with_daemon = losses(tmp_path, device="nvme")
    assert "cut_short" in seen
    assert seen.count("restore") >= 9  # each phase of three steps begins without
    assert seen[-1] == "restore"
    assert not module.spinning.is_short
    seen.clear()
    assert torch.equal(torch.stack(losses(tmp_path, device="none")), torch.stack(with_daemon))
    assert "cut_short" not in seen


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_has_said_of_spinning_stays(
    name: str, tmp_path: Path, seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1000")
    losses(tmp_path, device="nvme")
    assert "cut_short" not in seen

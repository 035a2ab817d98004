"""``infinity plan``: its traffic is that of training, a budget that cannot work says why, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.commands.cli import main
from infinity.commands.plan_command import _beside_arena
from infinity.config import parse_config
from infinity.weights.sharded_model import Layout
from tests.infinity.commands.test_trace_command import MODEL, config, tiny_gpt
from tests.support.daemon import eventually
from tests.support.ranks import REPOSITORY

TOO_SMALL = 64 << 10
BUDGET = 4 << 20


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(tmp_path)))
    before = torch.get_num_threads()
    try:
        options = ["--config", str(path), "--swap-dir", str(tmp_path), "--steps", "3", "--no-init", "--json", *words]
        assert main(["plan", *MODEL, *options]) == code
    finally:
        torch.set_num_threads(before)
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def trained_bytes(tmp_path: Path) -> tuple[int, ...]:
    """Read and written in a settled step of training at ``BUDGET``, on the average of six: in one of them a prefetch
    of the next may or may not have come. On a busy machine the daemon's plan comes many steps late."""
    model, batch = tiny_gpt()
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path, io_daemon={"host_budget_bytes": BUDGET}))
    moved = []
    try:
        for step in range(30):
            engine.backward(engine(batch))
            engine.step()
            if step >= 24:
                moved.append(engine.io_report().as_dict()["nvme"])
    finally:
        engine.destroy()
    return tuple(sum(sum(io[name].values()) for io in moved) // len(moved) for name in ("bytes_read", "bytes_written"))


def test_the_traffic_is_that_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.svg"
    small, enough = planned(
        tmp_path, capsys, "--host-budget-bytes", str(BUDGET), str(TOO_SMALL), "--plot", str(picture)
    )
    assert small["cost"] is None
    assert "smallest" in small["refused"] or "least" in small["refused"]
    cost, (read, written) = enough["cost"], trained_bytes(tmp_path)
    assert cost["read_bytes"] == pytest.approx(read, rel=0.15)
    assert cost["write_bytes"] == pytest.approx(written, rel=0.15)
    assert 0 <= cost["stall_s"] <= cost["step_s"]
    assert cost["memory_bytes"] > BUDGET
    assert picture.read_text().startswith("<?xml")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "plan.svg"}


def test_weights_in_use_are_counted_in_the_dtypes_that_they_have() -> None:
    """Those of a frozen base in bf16 beside an adapter in fp32; and nobody waits for gradients of the base."""

    def beside_arena(dtype: torch.dtype) -> int:
        base = nn.ParameterList([nn.Parameter(torch.zeros(1000, 1000, dtype=dtype), requires_grad=False)])
        parsed = parse_config(
            {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW"},
                "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1_000_000},
            },
            world_size=1,
        )
        layout = Layout.of(nn.ModuleList([base, nn.Linear(1000, 10, bias=False)]), parsed, 1)
        step: Any = SimpleNamespace(config=parsed, layout=layout)
        return _beside_arena(step)

    adapter = 10_000
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert beside_arena(dtype) == 2 * dtype.itemsize * 1_000_000 + 4 * adapter + 4 * adapter


def test_no_budget_that_works_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = planned(tmp_path, capsys, "--host-budget-bytes", str(TOO_SMALL), code=1)
    assert only["cost"] is None


def test_what_cannot_work_is_refused_before_the_model_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--config", "none.json", "--model", "none:none", "--host-budget-bytes", "1G"]
    assert main([*words, "--swap-dir", str(tmp_path / "absent")]) == 2
    assert "swap-dir" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--swap-dir", str(tmp_path), "--steps", "2"])
    assert "at least 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--plot", "plan.xyz"], "plot = 'plan.xyz': is no name of a picture"),
        (["--plot", "plan"], "plot = 'plan': is no name of a picture"),
        (["--compute-tflops", "100"], "compute-tflops = 100.0: .*--meta"),
    ],
)
def test_a_picture_or_a_rate_that_cannot_be_is_refused_before_anything_is_measured(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["plan", "--config", "none.json", "--model", "none:none", "--host-budget-bytes", "1G"]
    assert main([*model, "--swap-dir", str(tmp_path), *words]) == 2
    assert re.search(told, capsys.readouterr().err)


def test_the_replay_ends_with_the_plan_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config(tmp_path)))
    (tmp_path / "swap").mkdir()
    words = ["--config", str(tmp_path / "config.json"), "--host-budget-bytes", str(BUDGET), "--steps", "1000"]
    words += ["--threads", "2"]
    plan = subprocess.Popen(
        [sys.executable, "-m", "infinity", "plan", *MODEL, *words, "--swap-dir", str(tmp_path / "swap")],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )

    def replays() -> list[int]:
        found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path / "swap") in _text(path)]
        return [int(path.parent.name) for path in found if int(path.parent.name) != plan.pid]

    try:
        eventually(lambda: any((tmp_path / "swap").iterdir()), "the replay writes", within_s=120)  # behind all imports
        assert replays()
    finally:
        plan.kill()
        plan.wait()
    eventually(lambda: not replays(), "nobody replays for it any more")
    assert list((tmp_path / "swap").iterdir()) == []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""

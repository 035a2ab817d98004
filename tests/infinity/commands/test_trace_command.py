"""``infinity trace``: what it writes down is what the engine asks of a real daemon, run or not run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from benchmarks.gpt import GPT, GPTShape, token_batch
from infinity.commands.cli import main
from infinity.commands.standard_model import standard_model, standard_shape
from io_daemon.machine.cpu_load import CpuLoad
from io_daemon.policy.step_trace import CpuRates, StepTrace, load
from io_daemon.rank.client import Client
from io_daemon.shared.protocol import PAGE_BYTES, Access

SHAPE = GPTShape(d_model=128, num_layers=3, num_heads=4, vocabulary=512, sequence=16)
NUM_FLOPS = 6 * SHAPE.sequence * (3 * 12 * 128 * 128 + 512 * 128)
"""Two a multiplication, three products a weight; attention's own are few at this length."""


def tiny_gpt() -> tuple[nn.Module, torch.Tensor]:
    """The factory named on the command line."""
    torch.manual_seed(0)
    return GPT(SHAPE), token_batch(SHAPE, step=0)


def no_loss() -> tuple[nn.Module, torch.Tensor]:
    return nn.Linear(4, 4), torch.zeros(1, 4, dtype=torch.bfloat16)


def no_pair() -> int:
    return 1


def config(swap_dir: Path, **changes: Any) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": str(swap_dir)}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 220_000,
            "stage3_max_live_parameters": 600_000,
            "stage3_max_reuse_distance": 400_000,
            "stage3_param_persistence_threshold": 1_000,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": 4 << 20},
        **changes,
    }


def traced(tmp_path: Path, *words: str, **changes: Any) -> StepTrace:
    config_path, out = tmp_path / "config.json", tmp_path / "trace.json.gz"
    config_path.write_text(json.dumps(config(tmp_path, **changes)))
    before = torch.get_num_threads()
    try:
        assert main(["trace", "--config", str(config_path), "--out", str(out), *words]) == 0
    finally:
        torch.set_num_threads(before)
    return load(str(out))


def requests(trace: StepTrace) -> tuple[object, ...]:
    """All but work and machine."""
    return (
        trace.events.ops,
        trace.events.lease,
        trace.leases,
        trace.accesses,
        trace.chunks,
        trace.frame_bytes,
        trace.num_frames,
    )


@pytest.fixture
def rates_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """To measure what the CPU does in a second takes five seconds a trace, and no request depends on it."""
    rates = CpuRates(num_threads=1, flops=1e10, copied_bytes=1e9, updated_bytes=1e9)
    monkeypatch.setattr(CpuLoad, "calibrate", lambda _: rates)


SPLIT: dict[str, Any] = {"io_daemon": {"host_budget_bytes": 4 << 20, "master_weights": "split"}}
MODEL = ("--model", "tests.infinity.commands.test_trace_command:tiny_gpt")


@pytest.mark.usefixtures("rates_as_given")
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient_accumulation_steps": 3}, {"gradient_clipping": 1.0}, {"optimizer": {"type": "Muon"}}, SPLIT],
    ids=["plain", "accumulation", "clipping", "Muon", "split"],
)
def test_the_derived_requests_are_the_recorded_ones(tmp_path: Path, changes: dict[str, Any]) -> None:
    recorded, derived = traced(tmp_path, *MODEL, **changes), traced(tmp_path, *MODEL, "--meta", **changes)
    assert requests(recorded) == requests(derived)
    assert (recorded.gap_unit, derived.gap_unit) == ("seconds", "flops")
    assert recorded.num_params == derived.num_params == SHAPE.numel
    num_steps = changes.get("gradient_accumulation_steps", 1)
    total = sum(derived.events.gap) + derived.tail
    assert NUM_FLOPS * num_steps <= total <= 1.1 * NUM_FLOPS * num_steps


@pytest.mark.parametrize("changes", [{}, SPLIT], ids=["plain", "split"])
def test_the_recorded_order_is_what_a_daemon_is_told_in_training(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[Access]] = []
    upload = Client.upload_trace

    def listen(client: Client, trace_id: int, accesses: Sequence[Access]) -> None:
        told.append(list(accesses))
        upload(client, trace_id, accesses)

    monkeypatch.setattr(Client, "upload_trace", listen)
    swap_dir = tmp_path / "swap"
    swap_dir.mkdir()
    model, batch = tiny_gpt()
    told_config = config(swap_dir, **changes)
    engine, *_ = infinity.initialize(model=model, model_parameters=model.parameters(), config=told_config)
    with engine:
        for _ in range(3):  # the first begins with no update due, the second does not know what stays live
            engine.backward(engine(batch))
            engine.step()
        stats = engine.io_report()
    trace = traced(tmp_path, *MODEL, "--meta", "--no-init", **changes)
    assert told[-1] == [Access(*row) for row in trace.accesses]
    assert trace.num_frames * trace.frame_bytes == stats.arena_bytes


def test_a_staging_area_is_left_out_of_the_budget(tmp_path: Path) -> None:
    with_init, without = traced(tmp_path, *MODEL, "--meta"), traced(tmp_path, *MODEL, "--meta", "--no-init")
    assert with_init.num_frames * with_init.frame_bytes <= (4 << 20) * 7 // 8
    assert with_init.num_frames * with_init.frame_bytes < without.num_frames * without.frame_bytes


def test_a_budget_that_staging_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config(tmp_path)))
    words = ["--config", str(config_path), *MODEL, "--meta", "--nproc-per-node", "256"]
    assert main(["trace", *words]) == 1
    assert "models under construction" in capsys.readouterr().err


def test_another_budget_than_the_configurations(tmp_path: Path) -> None:
    trace = traced(tmp_path, *MODEL, "--meta", "--no-init", "--host-budget-bytes", "8M")
    assert trace.host_budget_bytes == 8 << 20
    assert 4 << 20 < trace.num_frames * trace.frame_bytes <= 8 << 20


NODES = ("--nnodes", "2", "--nproc-per-node", "3")


@pytest.mark.usefixtures("rates_as_given")
@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0}])
def test_a_rank_of_a_larger_job(tmp_path: Path, changes: dict[str, Any]) -> None:
    alone = traced(tmp_path, *MODEL, "--meta", **changes)
    recorded = traced(tmp_path, *MODEL, *NODES, **changes)
    derived = traced(tmp_path, *MODEL, *NODES, "--meta", **changes)
    assert requests(recorded) == requests(derived)
    assert (derived.num_nodes, derived.ranks_per_node) == (2, 3)
    assert alone.tokens_per_step is not None
    assert derived.tokens_per_step == 6 * alone.tokens_per_step
    # each rank computes on a batch of its own, with a sixth of the state in a third of the node's budget
    assert sum(derived.events.gap) + derived.tail == sum(alone.events.gap) + alone.tail
    assert alone.swap_bytes <= 6 * derived.swap_bytes <= 1.1 * alone.swap_bytes
    arena_bytes = 3 * (derived.num_frames * derived.frame_bytes + PAGE_BYTES)
    assert derived.staging_bytes < arena_bytes + derived.staging_bytes <= derived.host_budget_bytes == 4 << 20


def test_what_is_said_of_a_larger_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config(tmp_path)))
    assert main(["trace", "--config", "config.json", *MODEL, *NODES, "--meta"]) == 0
    said = capsys.readouterr().out
    assert "6 ranks, 3 on each of 2 nodes" in said
    (written,) = tmp_path.glob("gpt-*-2x3.json.gz")
    assert written.name in said


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config(tmp_path, train_batch_size=4)))
    assert main(["trace", "--config", str(config_path), *MODEL, *NODES]) == 2
    assert "train_batch_size" in capsys.readouterr().err


def test_a_standard_model_by_its_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = {"io_daemon": {"host_budget_bytes": 1 << 30}}
    trace = traced(tmp_path, "--model-params", "1e9", "--sequence", "128", "--json", **big)
    said = json.loads(capsys.readouterr().out)
    assert said["parameters"] == trace.num_params
    assert trace.num_params == pytest.approx(1e9, rel=0.05)
    assert trace.tokens_per_step == 128
    # six FLOPs a parameter and token, without the embedding's
    assert said["flops"] == pytest.approx(6 * trace.num_params * 128, rel=0.2)


@pytest.mark.parametrize("num_params", [1.6e8, 1e9, 8e9, 7e10, 4.05e11])
def test_standard_shapes_have_the_parameters_asked_for(num_params: float) -> None:
    shape = standard_shape(int(num_params))
    assert shape.numel == pytest.approx(num_params, rel=0.05)
    with torch.device("meta"):
        assert sum(param.numel() for param in standard_model(shape).parameters()) == shape.numel


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "no_such_module:make"), "cannot be imported"),
        (("--model", "tests.infinity.commands.test_trace_command:no_such"), "cannot be imported"),
        (("--model", "tests.infinity.commands.test_trace_command:no_pair"), "not a pair"),
        (("--model-params", "1e13"), "no shape is known"),
        (
            ("--model", "tests.infinity.commands.test_trace_command:no_loss"),
            "shape [1, 4]: return the loss",
        ),
        (("--model-params", "1e9", "--out", "/no/such/directory/trace"), "cannot be written"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    words: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config(tmp_path)))
    assert main(["trace", "--config", str(config_path), *words]) == 2
    assert says in capsys.readouterr().err


def test_without_offloading_there_is_nothing_to_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_path = tmp_path / "config.json"
    config_path.write_text(json.dumps(config(tmp_path, zero_optimization={"stage": 3})))
    assert main(["trace", "--config", str(config_path), *MODEL]) == 2
    assert "offload" in capsys.readouterr().err

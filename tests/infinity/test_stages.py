"""Stages 0 to 3 train alike: they differ in what stays whole on each rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import WeightsError
from infinity.plan.sharding import ALIGNMENT
from infinity.update import sub_group
from io_daemon.shared.protocol import align_up

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))


def _run(config: dict[str, Any], num_steps: int = 4) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, *_ = infinity.initialize(model=_model(), config=config)
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for micro_batch in range(num_steps * engine.gradient_accumulation_steps()):
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(micro_batch % 3)).to(dtype)
        loss = (engine(batch).float() - 1).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    weights = engine.full_state_dict()
    engine.destroy()
    return losses, weights


def _with(stage: int, **zero: Any) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    config["zero_optimization"].update(stage=stage, **zero)
    return config


def _same(
    ours: tuple[list[float], dict[str, torch.Tensor]], theirs: tuple[list[float], dict[str, torch.Tensor]]
) -> bool:
    return ours[0] == theirs[0] and all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
def test_every_stage_gives_the_bits_of_stage_3(offload: str, bf16: bool, tmp_path: Path) -> None:
    precision = {"bf16": {"enabled": bf16}}
    reference = _run({**_with(3), **precision})
    device = {"device": offload, **({"nvme_path": str(tmp_path)} if offload == "nvme" else {})}
    for stage, bucket in ((0, 500_000_000), (1, 4300), (2, 1100)):
        config = {**_with(stage, offload_optimizer=device, reduce_bucket_size=bucket), **precision}
        assert _same(_run(config), reference)


@pytest.mark.parametrize("stage", [0, 2])
def test_small_weights_are_stepped_as_one_run_with_the_bits_of_each_by_itself(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a parameter has no gradient, which leaves it and its history as they were."""
    runs, gathered = [], []
    put_back = sub_group.SubGroup._put_back

    def counted(self: sub_group.SubGroup, *arguments: Any) -> None:
        gathered.append(sub_group.GATHERED_NUMEL_MAX)
        put_back(self, *arguments)

    monkeypatch.setattr(sub_group.SubGroup, "_put_back", counted)
    for numel_max in (0, 1 << 14):
        monkeypatch.setattr(sub_group, "GATHERED_NUMEL_MAX", numel_max)
        model = _model()
        model.register_parameter("unused", nn.Parameter(torch.ones(70)))
        config = _with(stage, stage3_param_persistence_threshold=100_000)
        engine, *_ = infinity.initialize(model=model, config={**config, "gradient_clipping": 0.5})
        for _ in range(4):
            engine.backward(engine(torch.ones(4, 16)).square().mean())
            engine.step()
        runs.append(([0.0], engine.full_state_dict()))
        engine.destroy()
    assert _same(*runs)
    assert torch.equal(runs[0][1]["unused"], torch.ones(70))
    assert set(gathered) == {1 << 14}


def test_parameters_that_are_stepped_whole_are_whole_at_every_stage() -> None:
    matrices = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}, "bf16": {"enabled": True}}
    reference = _run({**_with(3), **matrices})
    assert _same(_run({**_with(2), **matrices}), reference)
    assert _same(_run({**_with(0), **matrices}), reference)


def test_state_dicts_of_whole_weights_are_read_and_saved(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=_model(), config=_with(1))
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.backward(engine(torch.ones(4, 16)).square().mean())
    held = engine.module.state_dict()
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.step()
    torch.save(engine.module.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt")
    full = engine.full_state_dict()
    assert loaded.keys() == full.keys() == held.keys()
    assert all(torch.equal(loaded[name], full[name]) and torch.equal(held[name], full[name]) for name in full)
    assert not all(torch.equal(loaded[name], before[name]) for name in full)
    engine.destroy()
    with pytest.raises(WeightsError, match="sharded"):
        torch.save(engine.module.state_dict(), tmp_path / "weights.pt")


def test_whole_weights_that_have_masters_are_kept_once() -> None:
    numel = sum(align_up(param.numel(), ALIGNMENT) for param in _model().parameters())
    for stage, weight_bytes in ((0, 0), (1, 0), (2, 0), (3, 2)):
        engine: Any = infinity.initialize(model=_model(), config={**_with(stage), "bf16": {"enabled": True}})[0]
        engine.backward(engine(torch.ones(4, 16, dtype=torch.bfloat16)).square().mean())
        engine.set_gradient_accumulation_boundary(is_boundary=True)
        engine.step()
        engine._runtime.changes.settle()
        stored = engine._runtime.store.stats()["resident_bytes"]
        assert stored == (weight_bytes + 4 + 8) * numel, "weights, masters, moments"
        with infinity.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            nn.init.constant_(engine.module[0].weight, 1.001)
        assert set(engine.full_state_dict()["0.weight"].flatten().tolist()) == {1.0}, "as bf16 has it"
        assert set(engine.full_master_state_dict()["0.weight"].flatten().tolist()) == {1.0}
        engine.destroy()


@pytest.mark.parametrize("bf16", [False, True])
def test_whole_weights_that_have_no_masters_are_kept_once(*, bf16: bool) -> None:
    """fp32 weights, and frozen ones of any dtype: in the parameters alone, whatever is done with them."""
    size, dtype = (2, torch.bfloat16) if bf16 else (4, torch.float32)
    trained, frozen = (
        sum(align_up(p.numel(), ALIGNMENT) for name, p in _model().named_parameters() if name.startswith("2.") is part)
        for part in (False, True)
    )
    persistent = {"stage3_param_persistence_threshold": 100_000}
    expected: list[tuple[int, dict[str, int], int, int]] = [
        *((stage, {}, 8, 0) for stage in (0, 1, 2)),
        (3, persistent, 8 + size, size),
        (3, {}, 8 + size, size),
    ]
    runs = []
    for stage, zero, trained_bytes, frozen_bytes in expected:
        model = _model()
        model[2].requires_grad_(requires_grad=False)
        engine: Any = infinity.initialize(model=model, config={**_with(stage, **zero), "bf16": {"enabled": bf16}})[0]
        held = (trained_bytes + 4 * bf16) * trained + frozen_bytes * frozen

        def step(engine: Any = engine) -> float:
            for _ in range(2):
                loss = engine(torch.ones(4, 16, dtype=dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
            engine._runtime.changes.settle()
            last: float = loss.item()
            return last

        losses = [step(), step()]
        assert engine._runtime.store.stats()["resident_bytes"] == held
        engine.offload_states()
        engine.reload_states()
        with infinity.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            nn.init.constant_(engine.module[0].weight, 0.25)
            nn.init.constant_(engine.module[2].weight, 0.5)
        losses.append(step())
        assert engine._runtime.store.stats()["resident_bytes"] == held
        weights = engine.full_state_dict()
        assert set(weights["2.weight"].flatten().tolist()) == {0.5}
        runs.append((losses, weights))
        engine.destroy()
    assert all(_same(run, runs[-1]) for run in runs)


def test_weights_stay_whole_below_stage_3() -> None:
    for stage, whole in ((2, True), (3, False)):
        engine: Any = infinity.initialize(model=_model(), config=_with(stage))[0]
        engine(torch.zeros(1, 16))
        names = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_persist")
        for param in engine.module.parameters():
            assert [hasattr(param, name) for name in names] == [not whole] * len(names), "how scripts ask for stage 3"
        assert (engine.io_report().live_numel_peak == 0) is whole
        engine.destroy()


OLD_FILES: dict[str, dict[str, Any]] = {
    "deprecated cpu_offload at stage 2": {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": True}},
        "zero_optimization": {"stage": 2, "cpu_offload": True, "overlap_comm": True, "reduce_scatter": True},
    },
    "boolean zero_optimization": {
        "train_batch_size": 4,
        "allgather_size": 500000000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": True,
        "bfloat16": {"enabled": True},
    },
    "stage 2 in fp16 as a trainer fills it": {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "initial_scale_power": 16,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 40, "warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 2},
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
    },
    "stage 3 in fp16, everything offloaded, nothing kept": {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "initial_scale_power": 32, "hysteresis": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": False, "max_in_cpu": 1.4e10},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e14,
        },
    },
    "stage 2 as a trainer fills it": {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 40, "warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 2},
        },
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
    },
}


@pytest.mark.parametrize("config", OLD_FILES.values(), ids=list(OLD_FILES))
def test_files_in_the_wild_run_as_they_are(config: dict[str, Any]) -> None:
    """Twenty updates halve the loss. Steps that a loss scale skips are no updates and come on top: a scale that begins
    at 2 to the power of 32 skips as many as it takes to halve it until nothing overflows."""
    engine, *_ = infinity.initialize(model=_model(), config=config)
    dtype = next(engine.module.parameters()).dtype
    losses: list[float] = []
    while engine.global_steps - engine.skipped_steps < 20:
        batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(len(losses) % 3)).to(dtype)
        loss = (engine(batch).float() - 1).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < losses[0] / 2
    if engine.skipped_steps:
        assert 2.0 ** config["fp16"]["initial_scale_power"] / engine.cur_scale == 2.0**engine.skipped_steps
        assert config["fp16"]["initial_scale_power"] == 32
    engine.destroy()

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
from tests.support.ranks import run_ranks

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


def test_weights_stay_whole_below_stage_3() -> None:
    for stage, whole in ((2, True), (3, False)):
        engine: Any = infinity.initialize(model=_model(), config=_with(stage))[0]
        engine(torch.zeros(1, 16))
        names = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "ds_persist")
        for param in engine.module.parameters():
            assert [hasattr(param, name) for name in names] == [not whole] * len(names), "how scripts ask for stage 3"
        assert (engine.io_report().live_numel_peak == 0) is whole
        engine.destroy()


RANKS = """
import json, os
import torch
import torch.distributed as dist
from torch import nn
import infinity

rank = int(os.environ["RANK"])

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))

def batch(step):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))

def zero(stage, **zero):
    engine, *_ = infinity.initialize(model=build(), config={
        "train_micro_batch_size_per_gpu": 4, "steps_per_print": 0,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    })
    for step in range(3 * accumulation):
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    weights = [value.tolist() for value in engine.full_state_dict().values()]
    engine.destroy()
    return weights

def ddp():
    # each micro-batch is averaged: what is reduced every time is summed
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(3 * accumulation):
        (wrapped(batch(step)).square().mean() / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]

def put_off(stage, bf16):
    # two backwards of three are not reduced
    model = build()
    engine, *_ = infinity.initialize(model=model, config={
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage},
    })
    for step in range(2):
        with engine.no_sync():
            for micro in range(2):
                engine.backward(engine(batch(3 * step + micro).to(engine.module[0].weight.dtype)).square().mean())
            try:
                engine.step()
            except RuntimeError as error:
                assert "no_sync" in str(error)
            else:
                raise AssertionError("step() inside no_sync() passed")
        engine.backward(engine(batch(3 * step + 2).to(engine.module[0].weight.dtype)).square().mean())
        engine.step()
    weights = [value.tolist() for value in engine.full_state_dict().values()]
    engine.destroy()
    return weights

def ddp_put_off():
    model = build()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    for step in range(2):
        with wrapped.no_sync():
            for micro in range(2):
                wrapped(batch(3 * step + micro)).square().mean().backward()
        wrapped(batch(3 * step + 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]

equal = {}
for accumulation in (1, 2):
    reference = zero(3)
    equal[f"0 {accumulation}"] = zero(0) == reference
    equal[f"1 {accumulation}"] = zero(1, offload_optimizer={"device": "cpu"}) == reference
    equal[f"2 {accumulation}"] = zero(2, reduce_bucket_size=1100) == reference
    if accumulation == 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        equal["ddp"] = ddp() == reference
        reference = ddp_put_off()
        equal["no_sync at 0"] = put_off(0, False) == reference
        equal["no_sync at 1"] = put_off(1, False) == reference
        equal["no_sync in bf16"] = put_off(0, True) == put_off(1, True)
print(json.dumps(equal))
"""


def test_two_ranks_train_alike_at_every_stage_and_as_ddp(tmp_path: Path) -> None:
    for rank in run_ranks(RANKS, tmp_path, num_ranks=2):
        assert rank.answer == dict.fromkeys(rank.answer, True)
        assert len(rank.answer) == 10


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
    """For 20 updates; steps that a loss scale skips come on top."""
    losses, _ = _run(config, num_steps=40 if "fp16" in config else 20)
    assert losses[-1] < losses[0] / 2

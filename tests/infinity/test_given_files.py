"""Configurations as they are found beside scripts: 20 steps, and the loss falls. A trainer fills the "auto"s."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.forkserver import REPOSITORY

STEPS_MAX = 60
"""A loss scale of 2 ** 32 begins with some twenty steps that are skipped."""
STAGE_2 = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
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
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
STAGE_3 = {
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 32,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": False, "max_in_cpu": 1.4e10},
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 4,
}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "train_batch_size": 4}
FILES: dict[str, dict[str, Any]] = {
    "stage 2": STAGE_2,
    "stage 3": STAGE_3,
    "cpu_offload": {**ADAM, "zero_optimization": {"stage": 2, "cpu_offload": True}},
    "boolean": {**ADAM, "zero_optimization": True},
}


class Config:
    hidden_size = 24


class Model(nn.Sequential):
    config = Config()
    """Where a trainer finds how wide the model is."""


def trained(name: str, directory: Path) -> list[float]:
    """The losses of 20 steps that were applied, and of those that were skipped."""
    transformers = importlib.import_module("transformers")
    dialect = importlib.import_module("transformers.integrations.deepspeed")
    torch.manual_seed(0)
    model = Model(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.01,
    )
    arguments.fp16 = "fp16" in FILES[name]  # it wants a GPU for that
    config = json.loads(json.dumps(FILES[name]))
    if name.startswith("stage"):  # Transformers itself reads no boolean section
        filled = dialect.HfTrainerDeepSpeedConfig(config)
        filled.trainer_config_process(arguments)
        filled.trainer_config_finalize(arguments, model, 40)
        config = filled.config
    engine = infinity.initialize(model=model, config=config)[0]
    rows = torch.randn(4, 24, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    losses: list[float] = []
    while engine.global_steps - engine.skipped_steps < 20 and len(losses) < STEPS_MAX:
        loss = (engine(rows) - rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if name == "stage 3":
        assert engine.save_16bit_model(str(directory))
        assert engine.skipped_steps > 0, "of 2 ** 32"
    engine.destroy()
    return losses


def test_files_as_given_train(tmp_path: Path) -> None:
    """In a process of its own: Transformers asks for a package deepspeed when it is imported, and for its version."""
    pytest.importorskip("transformers")
    code = """
    import json, pathlib, sys
    from tests.infinity.test_given_files import FILES, trained
    print(json.dumps({name: trained(name, pathlib.Path(sys.argv[1])) for name in FILES}))
    """
    directory = Path(infinity.__file__).parent / "as_deepspeed"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{directory}:{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, losses in found.items():
        assert 20 <= len(losses) < STEPS_MAX, name
        assert losses[-1] < 0.8 * losses[0], (name, losses)

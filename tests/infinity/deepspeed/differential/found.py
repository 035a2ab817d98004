"""Whole configuration files as they are found in public repositories, their "auto"s filled as a trainer fills them."""

# mypy: ignore-errors
from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

from tests.infinity.deepspeed.differential.case import cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, stack, start

AUTO, NVME = "auto", "a directory of the case's own"
FILES: Final[dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("found.json").read_text())
ADAM = {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
FILLED = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "train_batch_size": 8,
    "gradient_clipping": 1.0, "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1,
    "warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 6, "reduce_bucket_size": 144,
    "stage3_prefetch_bucket_size": 129, "stage3_param_persistence_threshold": 120,
}  # fmt: skip
LEFT = {"sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"}
"""No trainer fills these: "auto" reaches the engine."""


def filled(section: Any, directory: Path, precision: str) -> Any:
    """As Transformers and Accelerate fill a file for a model 12 wide; ``precision`` is the trainer's own."""
    if not isinstance(section, dict):
        return str(directory) if section == NVME else section
    made = {}
    for name, value in section.items():
        if name in ("fp16", "bf16") and isinstance(value, dict) and value.get("enabled") == AUTO:
            made[name] = {**value, "enabled": name == precision}
        elif value == AUTO and name not in LEFT:
            made[name] = FILLED[name]
        else:
            made[name] = filled(value, directory, precision)
    return made


def trained(given: dict[str, Any]) -> Any:
    """Losses, rates and skips of some updates.

    In 16 bits the model comes in them: of one in fp32 the real one's masters are the rounded weights, ours are not."""
    torch.manual_seed(7)
    on = _half(given)
    engine = start(stack() if on is None else stack().to(on), given)
    losses, told = [], []
    for x, y in batches(8, dtype=torch.float32 if on is None or given.get("fp16", {}).get("auto_cast") else on):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.was_step_applied():
            told.append((engine.get_lr(), engine.global_steps, engine.skipped_steps))
    return losses, told


def _half(given: dict[str, Any]) -> torch.dtype | None:
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    return next((kind for name, kind in kinds.items() if given.get(name, {}).get("enabled")), None)


def _cases(*, half: bool) -> dict[str, tuple[dict[str, Any], str]]:
    made = {}
    for name, file in FILES.items():
        open_ = [each for each in ("fp16", "bf16") if file.get(each, {}).get("enabled") == AUTO]
        for precision in ("fp32", *open_) if open_ else ("",):
            if (_half(filled(file, Path(), precision)) is not None) is half:
                made[f"{name}-{precision}" if precision else name] = (file, precision)
    return made


@cases_over(_cases(half=False))
def in_fp32(directory: Path, given: tuple[dict[str, Any], str]) -> Any:
    file, precision = given
    return trained(filled(file, directory, precision))


@cases_over(_cases(half=True))
def in_16_bits(directory: Path, given: tuple[dict[str, Any], str]) -> Any:
    file, precision = given
    return trained(filled(file, directory, precision))


IDLE: dict[str, dict[str, Any]] = {
    "0-cpu": {"stage": 0, "offload_param": {"device": "cpu", "pin_memory": True}},
    "1-nvme": {"stage": 1, "offload_param": {"device": "nvme", "nvme_path": NVME, "buffer_count": 5}},
    "2-cpu": {"stage": 2, "offload_param": {"device": "cpu"}},
    "2-as-of-old": {"stage": 2, "cpu_offload_param": True},
    "2-none": {"stage": 2, "offload_param": {"device": "none"}},
}
"""Weights to be offloaded where they are whole."""


@cases_over(IDLE)
def offloaded_below_stage_3(directory: Path, given: dict[str, Any]) -> Any:
    place = directory / "swap"
    zero = filled(given, place, "")
    losses = trained({"train_batch_size": 4, "optimizer": ADAM, "zero_optimization": zero})
    return losses, place.exists()


REFUSED: dict[str, dict[str, Any]] = {
    "sizes-in-quotes": {"zero_optimization": {"stage": 3, "reduce_bucket_size": "5e8"}},
    "a-fraction-of-an-element": {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 3686.4}},
    "persitance": {"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5}},
    "aio-inside-zero": {"zero_optimization": {"stage": 3, "aio": {"block_size": 262144}}},
    "a-flag-of-lightnings": {"zero_optimization": {"stage": 3, "offload_parameters": True}},
    "scales-of-bf16": {"bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
    "fp16-inside-fp16": {"fp16": {"fp16": True, "enabled": True}},
    "torch-compile-as-of-old": {"compile": {"disable": False, "backend": "inductor"}},
    "sparse-attention": {"sparse_attention": {"mode": "fixed", "block": 16}},
    "elasticity": {"elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]}},
    "apex": {"amp": {"enabled": True, "opt_level": "O1"}},
    "mics": {"zero_optimization": {"stage": 3, "mics_shard_size": 4}},
    "a-curriculum-at-the-top": {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
    "both-precisions": {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "a-norm-among-the-parameters": {"optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0}}},
    "an-adam-of-that-name": {"optimizer": {"type": "DeepSpeed_Adam", "params": {"lr": 1e-4}}},
}


@cases_over(REFUSED)
def refused_by_both(_directory: Path, given: dict[str, Any]) -> Any:
    base = {"train_batch_size": 8, "optimizer": ADAM, "zero_optimization": {"stage": 2}}
    return raised(lambda: start(stack(), {**base, **given})) != "nothing"

"""What happens where a configuration, or a call, leaves something out."""

# mypy: ignore-errors
from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start, train

CPU = {"offload_optimizer": {"device": "cpu"}}
SECTIONS: dict[str, Any] = {
    "adam": {"type": "Adam"},
    "adam-empty": {"type": "Adam", "params": {}},
    "adam-lr": {"type": "Adam", "params": {"lr": 0.01}},
    "adam-decay": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.3}},
    "adam-l2": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.3, "adam_w_mode": False}},
    "adam-torch": {"type": "Adam", "params": {"torch_adam": True}},
    "adam-torch-l2": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}},
    "adam-torch-decay": {"type": "Adam", "params": {"torch_adam": True, "weight_decay": 0.3}},
    "adam-uncorrected": {"type": "Adam", "params": {"bias_correction": False}},
    "adam-torch-amsgrad": {"type": "Adam", "params": {"torch_adam": True, "amsgrad": True}},
    "adamw": {"type": "AdamW"},
    "adamw-decay": {"type": "AdamW", "params": {"weight_decay": 0.3}},
    "adamw-mode-off": {"type": "AdamW", "params": {"weight_decay": 0.3, "adam_w_mode": False}},
    "adamw-torch": {"type": "AdamW", "params": {"torch_adam": True}},
    "adamw-fp32-states": {"type": "AdamW", "params": {"fp32_optimizer_states": True}},
    "sgd": {"type": "SGD"},
    "sgd-momentum": {"type": "SGD", "params": {"momentum": 0.9}},
    "adagrad": {"type": "Adagrad"},
    "rmsprop": {"type": "RMSprop"},
    "adadelta": {"type": "Adadelta"},
    "adamax": {"type": "Adamax"},
    "nadam": {"type": "NAdam"},
    "radam": {"type": "RAdam"},
    "asgd": {"type": "ASGD"},
    "rprop": {"type": "Rprop"},
    "lower": {"type": "adamw"},
    "upper": {"type": "ADAMW"},
}


def _trained(section: Any, zero: Any = None, stage: int = 1, **others: Any) -> Any:
    given = config(stage, optimizer=section, zero_allow_untested_optimizer=True, zero=zero or {}, **others)
    engine = start(stack(), given)
    losses = train(engine, 4)
    group = engine.optimizer.param_groups[0]
    told = {name: group[name] for name in sorted(group) if name in TOLD}
    return losses, told, engine.optimizer_name(), engine.optimizer_params()


TOLD = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov")


@cases_over(SECTIONS)
def optimizers(_directory: Path, section: Any) -> Any:
    return _trained(section)


@cases_over({name: SECTIONS[name] for name in SECTIONS if name.startswith("adam")})
def optimizers_offloaded(_directory: Path, section: Any) -> Any:
    return _trained(section, CPU)


MUONS: dict[str, Any] = {
    "bare": {"type": "Muon"},
    "rates": {"type": "Muon", "params": {"muon_lr": 0.01, "adam_lr": 0.002}},
    "decay": {"type": "Muon", "params": {"lr": 0.01, "weight_decay": 0.3}},
    "betas": {"type": "Muon", "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "momentum": 0.8}},
}


def _by_muon(stage: int, section: Any, **others: Any) -> list[float]:
    torch.manual_seed(7)
    model = nn.ModuleDict({"wide": nn.Linear(12, 5), "tall": nn.Linear(5, 16), "square": nn.Linear(16, 16)})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            for layer in self.layers.values():
                x = torch.tanh(layer(x))
            return nn.functional.cross_entropy(x, y)

    return train(start(Net(), config(stage, optimizer=section, zero={"reduce_scatter": False}, **others)), 5)


@cases_over({f"{stage}-{name}": (stage, name) for stage in (0, 1, 3) for name in MUONS}, relative=1e-4)
def muon(_directory: Path, given: tuple[int, str]) -> Any:
    return _by_muon(given[0], MUONS[given[1]], gradient_clipping=0.0)


@cases_over({str(stage): stage for stage in range(4)}, relative=1e-4)
def muon_under_the_clipping_that_nobody_wrote(_directory: Path, stage: int) -> Any:
    return _by_muon(stage, MUONS["bare"])


@case()
def an_optimizer_without_a_type(_directory: Path) -> Any:
    return raised(lambda: start(stack(), config(1, optimizer={"params": {"lr": 0.1}})))


SCHEDULES: dict[str, Any] = {
    "warmup-empty": {"type": "WarmupLR", "params": {}},
    "warmup-few": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "decay": {"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}},
    "decay-few": {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}},
    "cosine": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2000}},
    "cosine-few": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2}},
    "cycle": {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}},
    "range-empty": {"type": "LRRangeTest", "params": {}},
    "step": {"type": "StepLR", "params": {"step_size": 1}},
    "cosine-torch": {"type": "CosineAnnealingLR", "params": {"T_max": 4}},
    "linear-torch": {"type": "LinearLR"},
}


@cases_over(SCHEDULES, absolute=1e-9)
def schedules(_directory: Path, section: Any) -> Any:
    engine = start(stack(), config(0, scheduler=section))
    seen = [engine.get_lr(), type(engine.lr_scheduler).__name__]
    for x, y in batches(6):
        engine.backward(engine(x, y))
        engine.step()
        seen.append([engine.get_lr(), engine.get_mom()])
    return seen, engine.scheduler_name(), engine.scheduler_params()


LACKING: dict[str, Any] = {
    "decay": {"type": "WarmupDecayLR"},
    "cosine": {"type": "WarmupCosineLR"},
    "cycle": {"type": "OneCycle"},
    "step-torch": {"type": "StepLR"},
    "plateau-torch": {"type": "ReduceLROnPlateau"},
}


@cases_over(LACKING)
def what_a_schedule_must_be_told(_directory: Path, section: Any) -> Any:
    return raised(lambda: train(start(stack(), config(0, scheduler=section)), 1)) != "nothing"


ACCESSORS = [
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer_name",
    "optimizer_params", "optimizer_legacy_fusion", "scheduler_name", "scheduler_params", "zero_optimization",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_reduce_scatter", "zero_overlap_comm",
    "zero_offload_optimizer", "zero_offload_param", "zero_use_cpu_optimizer", "zero_cpu_offload",
    "zero_partial_offload", "super_offload", "zero_sub_group_size", "zero_optimization_stage",
    "zero_reduce_bucket_size", "zero_multi_rank_bucket_allreduce", "zero_allgather_bucket_size",
    "zero_compute_grad_norm", "zero_optimization_partition_gradients", "zero_optimization_partition_weights",
    "zero_contiguous_gradients", "zero_load_from_fp32_weights", "zero_elastic_checkpoint",
    "zero_nvme_offload_optimizer", "zero_max_live_parameters", "zero_max_reuse_distance",
    "zero_prefetch_bucket_size", "zero_module_granularity_threshold", "zero_param_persistence_threshold",
    "zero_model_persistence_threshold", "zero_gather_16bit_weights_on_model_save", "zero_legacy_stage1",
    "zero_ignore_unused_parameters", "fp16_enabled", "bfloat16_enabled", "fp16_master_weights_and_gradients",
    "bf16_master_weights_and_gradients", "bf16_optimizer_states", "torch_autocast_enabled",
    "fp16_auto_cast", "loss_scale", "managed_gradient_accumulation",
    "use_node_local_storage", "load_universal_checkpoint", "postscale_gradients",
    "gradient_predivide_factor", "steps_per_print", "zero_allgather_partitions", "zero_round_robin_gradients",
    "zero_parameter_alignment", "zero_hpz_partition_size", "zero_quantized_weights",
    "zero_quantized_nontrainable_weights", "zero_quantized_gradients", "zero_log_trace_cache_warnings",
    "zero_allgather_sequential", "is_sanity_checks_enabled", "dump_state", "gradient_clipping", "dynamic_loss_scale",
    "initial_dynamic_scale", "dynamic_loss_scale_args", "aio_config", "get_data_types", "dataloader_drop_last",
    "wall_clock_breakdown", "flops_profiler_enabled", "flops_profiler_recompute_fwd_factor",
    "flops_profiler_profile_step", "flops_profiler_module_depth", "flops_profiler_top_modules",
    "flops_profiler_detailed", "flops_profiler_output_file", "memory_breakdown", "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail", "get_global_grad_norm", "was_step_applied", "get_lr", "get_type", "get_mom",
    "is_gradient_accumulation_boundary", "autotuning_enabled", "curriculum_learning_enabled",
    "data_efficiency_enabled", "random_ltd_enabled", "is_deepcompile_enabled",
]  # fmt: skip


def _answer(engine: Any, name: str) -> Any:
    try:
        value = getattr(engine, name)()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    if hasattr(value, "model_dump"):
        return "a section"
    return value


ENGINES: dict[str, Any] = {
    "0": config(0),
    "1": config(1),
    "2": config(2),
    "3": config(3),
    "2-bf16": config(2, bf16={"enabled": True}),
    "2-fp16": config(2, fp16={"enabled": True}),
    "3-offload": config(3, zero={"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    "1-autocast": config(1, torch_autocast={"enabled": True}),
}


@cases_over(ENGINES)
def answers_of_an_engine(_directory: Path, given: Any) -> Any:
    engine = start(stack(), given)
    return {name: _answer(engine, name) for name in ACCESSORS}


@case()
def inference_without_a_dtype(_directory: Path) -> Any:
    engine = deepspeed.init_inference(stack())
    return str(next(engine.module.parameters()).dtype)

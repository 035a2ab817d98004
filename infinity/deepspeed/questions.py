"""The small questions that DeepSpeed's engine answers beside infinity's own, and where each answer stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from infinity.config import Config
from infinity.deepspeed.config_classes import View
from infinity.deepspeed.zero_config_classes import DeepSpeedZeroConfig
from infinity.plan.precision import DTYPES

OfZero = Callable[[DeepSpeedZeroConfig], Any]
OfConfig = Callable[[Config], Any]


def _field(name: str) -> Callable[[Any], Any]:
    def answer(section: Any) -> Any:
        for part in name.split("."):
            section = getattr(section, part)
        return section

    return answer


def _device(section: Any) -> str:
    return "none" if section is None else str(section.device)


OF_ZERO: Final[Mapping[str, OfZero]] = {
    "zero_reduce_scatter": _field("reduce_scatter"),
    "zero_overlap_comm": _field("overlap_comm"),
    "zero_offload_optimizer": _field("offload_optimizer"),
    "zero_offload_param": _field("offload_param"),
    "zero_use_cpu_optimizer": lambda zero: _device(zero.offload_optimizer) in ("cpu", "nvme"),
    "zero_cpu_offload": lambda zero: _device(zero.offload_optimizer) == "cpu",
    "zero_nvme_offload_optimizer": lambda zero: _device(zero.offload_optimizer) == "nvme",
    "zero_partial_offload": lambda zero: 1.0 if zero.offload_optimizer is None else zero.offload_optimizer.ratio,
    "zero_sub_group_size": _field("sub_group_size"),
    "zero_reduce_bucket_size": _field("reduce_bucket_size"),
    "zero_multi_rank_bucket_allreduce": _field("use_multi_rank_bucket_allreduce"),
    "zero_allgather_bucket_size": _field("allgather_bucket_size"),
    "zero_allgather_partitions": _field("allgather_partitions"),
    "zero_optimization_partition_gradients": lambda zero: zero.stage >= 2,
    "zero_optimization_partition_weights": lambda zero: zero.stage >= 3,
    "zero_contiguous_gradients": _field("contiguous_gradients"),
    "zero_load_from_fp32_weights": _field("load_from_fp32_weights"),
    "zero_elastic_checkpoint": _field("elastic_checkpoint"),
    "zero_max_live_parameters": _field("max_live_parameters"),
    "zero_max_reuse_distance": _field("max_reuse_distance"),
    "zero_prefetch_bucket_size": _field("prefetch_bucket_size"),
    "zero_module_granularity_threshold": _field("module_granularity_threshold"),
    "zero_param_persistence_threshold": _field("param_persistence_threshold"),
    "zero_model_persistence_threshold": _field("model_persistence_threshold"),
    "zero_legacy_stage1": _field("legacy_stage1"),
    "zero_ignore_unused_parameters": _field("ignore_unused_parameters"),
    "zero_round_robin_gradients": _field("round_robin_gradients"),
    "zero_hpz_partition_size": _field("zero_hpz_partition_size"),
    "zero_quantized_weights": _field("zero_quantized_weights"),
    "zero_quantized_nontrainable_weights": _field("zero_quantized_nontrainable_weights"),
    "zero_quantized_gradients": _field("zero_quantized_gradients"),
    "zero_log_trace_cache_warnings": _field("log_trace_cache_warnings"),
    "zero_compute_grad_norm": _field("compute_grad_norm"),
    "zero_parameter_alignment": _field("parameter_alignment"),
    "is_sanity_checks_enabled": _field("enable_sanity_checks"),
    "super_offload": lambda zero: False,
    "is_first_weights_partition_group": lambda zero: zero.stage >= 3,
    "zero_allgather_sequential": _field("allgather_sequential"),
}
"""Calls without arguments, answered by the section ``zero_optimization``."""

OF_CONFIG: Final[Mapping[str, OfConfig]] = {
    "managed_gradient_accumulation": _field("managed_gradient_accumulation"),
    "memory_breakdown": _field("memory_breakdown"),
    "dump_state": _field("dump_state"),
    "dataloader_drop_last": _field("dataloader_drop_last"),
    "gradient_predivide_factor": _field("gradient_predivide_factor"),
    "postscale_gradients": lambda config: not config.prescale_gradients,
    "fp16_auto_cast": _field("fp16.auto_cast"),
    "fp16_master_weights_and_gradients": lambda config: False,
    "bf16_master_weights_and_gradients": _field("bf16.bf16_master_weights_and_grads"),
    "bf16_optimizer_states": _field("bf16.bf16_optimizer_states"),
    "torch_autocast_enabled": _field("torch_autocast.enabled"),
    "torch_autocast_dtype": lambda config: DTYPES[config.torch_autocast.dtype],
    "initial_dynamic_scale": lambda config: 2.0**config.fp16.initial_scale_power,
    "flops_profiler_enabled": _field("flops_profiler.enabled"),
    "flops_profiler_profile_step": _field("flops_profiler.profile_step"),
    "flops_profiler_module_depth": _field("flops_profiler.module_depth"),
    "flops_profiler_top_modules": _field("flops_profiler.top_modules"),
    "flops_profiler_detailed": _field("flops_profiler.detailed"),
    "flops_profiler_output_file": _field("flops_profiler.output_file"),
    "flops_profiler_recompute_fwd_factor": _field("flops_profiler.recompute_fwd_factor"),
    "autotuning_enabled": lambda config: False,
    "curriculum_learning_enabled": lambda config: False,
    "data_efficiency_enabled": lambda config: False,
    "random_ltd_enabled": lambda config: False,
    "load_universal_checkpoint": lambda config: False,
    "amp_enabled": lambda config: False,
    "amp_params": lambda config: {},
    "pld_enabled": lambda config: False,
    "elasticity_enabled": lambda config: False,
    "eigenvalue_enabled": lambda config: False,
    "curriculum_enabled_legacy": lambda config: False,
    "sparse_gradients_enabled": lambda config: False,
    "prescale_gradients": _field("prescale_gradients"),
    "dynamic_loss_scale_args": lambda config: {
        "init_scale": int(2**config.fp16.initial_scale_power),
        "scale_window": config.fp16.loss_scale_window,
        "delayed_shift": config.fp16.hysteresis,
        "consecutive_hysteresis": config.fp16.consecutive_hysteresis,
        "min_scale": config.fp16.min_loss_scale,
    },
    "optimizer_legacy_fusion": lambda config: False,
    "zero_force_ds_cpu_optimizer": lambda config: True,
    "autotp_size": lambda config: 0,
    "tensor_parallel_config": lambda config: View({"autotp_size": 0}),
    "tensorboard_enabled": _field("tensorboard.enabled"),
    "use_node_local_storage": lambda config: False,
    "is_deepcompile_enabled": lambda config: False,
}
"""Calls without arguments, answered by the whole configuration; what is always False is refused in it."""

ABSENT: Final[Mapping[str, str]] = {
    "buffered_allreduce_fallback": "gradients are reduced while engine.backward() goes on: leave the call out",
    "load_module_state_dict": "use infinity.load_pretrained(engine, file), or load_checkpoint",
    "load_moe_state_dict": "there is no expert parallelism: load_checkpoint loads whole models",
    "get_sequence_parallel_group": "there is no sequence parallelism",
    "get_tensor_parallel_rank": "there is no tensor parallelism",
    "random_ltd_initialize": "data and layers are the caller's",
    "set_custom_curriculum_learning_schedule": "data is the caller's: use a sampler of torch's",
    "set_data_post_process_func": "data is the caller's: use collate_fn",
    "register_compile_pass": "DeepCompile is not built: use engine.compile()",
    **dict.fromkeys(
        ("timers", "engine_timers", "get_wall_clock_timers"),
        "engine.io_report() holds the times of a step, and timers.throughput logs samples a second",
    ),
    "flops_profiler": "write the section flops_profiler into the configuration: torch's counter counts",
    **dict.fromkeys(
        ("allreduce_bucket", "allreduce_and_copy", "allreduce_no_retain", "all_gather_scalar"),
        "gradients are reduced while engine.backward() goes on: leave the call out",
    ),
    **dict.fromkeys(
        ("seq_data_parallel_group", "seq_parallel_group", "seq_dp_world_size"), "there is no sequence parallelism"
    ),
    **dict.fromkeys(
        ("checkpoint_engine", "save_zero_checkpoint", "save_non_zero_checkpoint"),
        "checkpoints have one format, of infinity's own: call engine.save_checkpoint()",
    ),
    **dict.fromkeys(
        ("client_optimizer", "client_lr_scheduler"), "engine.optimizer and engine.lr_scheduler are what is stepped"
    ),
    "param_names": "engine.named_parameters() has them",
    "clip_fp32_gradients": "write gradient_clipping into the configuration, or call clip_grad_norm_ on the parameters",
    "losses": "add up what the engine returned",
    "quantizer": "quantisation is not built: train in bf16, fp16 or fp32",
    **dict.fromkeys(
        ("train_batch", "eval_batch", "set_dataloader", "set_batch_fn", "is_first_stage", "is_last_stage"),
        "they are of a pipeline's engine, and there is no pipeline parallelism: call engine(), engine.backward() and "
        "engine.step() for each micro-batch",
    ),
}
"""What an engine of DeepSpeed's has and this one has not, with what to do instead."""


def data_types(config: Config) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of the weights in forward, and that in which gradients are added up."""
    weight = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32
    kept = config.data_types.grad_accum_dtype
    return weight, DTYPES[kept] if kept else weight

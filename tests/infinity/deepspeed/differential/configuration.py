"""The classes of the configuration: fields, defaults, old names, and what they refuse."""

# mypy: ignore-errors
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found]
from deepspeed.runtime.config import DeepSpeedConfig  # type: ignore[import-not-found]
from deepspeed.runtime.zero.config import (  # type: ignore[import-not-found]
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    ZeroStageEnum,
)

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import config, stack, start

ZERO_FIELDS = [
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "offload_param",
    "offload_optimizer",
    "sub_group_size",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "cpu_offload",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "legacy_stage1",
    "round_robin_gradients",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
    "log_trace_cache_warnings",
    "compute_grad_norm",
    "parameter_alignment",
    "enable_sanity_checks",
]
ABSENT = "no such field"


def _fields(section: Any, names: Any) -> Any:
    return {name: getattr(section, name, ABSENT) for name in names}


@case()
def zero_defaults(_directory: Path) -> Any:
    return _fields(DeepSpeedZeroConfig(), ZERO_FIELDS)


@cases_over({str(stage): stage for stage in range(4)})
def zero_of_stage(_directory: Path, stage: int) -> Any:
    return _fields(DeepSpeedZeroConfig(stage=stage), ("stage", "overlap_comm"))


@case()
def zero_aliases(_directory: Path) -> Any:
    names = [
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
    ]
    by_alias = DeepSpeedZeroConfig(stage=3, **{f"stage3_{name}": 12345 for name in names})
    by_name = DeepSpeedZeroConfig(stage=3, **dict.fromkeys(names, 54321))
    flags = DeepSpeedZeroConfig(stage=3, stage3_gather_16bit_weights_on_model_save=True)
    old = DeepSpeedZeroConfig(stage=3, stage3_gather_fp16_weights_on_model_save=True)
    return _fields(by_alias, names), _fields(by_name, names), [
        flags.gather_16bit_weights_on_model_save, old.gather_16bit_weights_on_model_save
    ]  # fmt: skip


@cases_over({
    "cpu_offload": {"cpu_offload": True},
    "cpu_offload-false": {"cpu_offload": False},
    "cpu_offload_param": {"cpu_offload_param": True, "stage": 3},
    "cpu_offload_param-false": {"cpu_offload_param": False, "stage": 3},
    "cpu_offload_use_pin_memory": {"cpu_offload_use_pin_memory": True},
    "both": {"cpu_offload": True, "cpu_offload_param": True, "stage": 3},
    "with-pins": {"cpu_offload": True, "cpu_offload_use_pin_memory": True},
})  # fmt: skip
def zero_old_names(_directory: Path, given: dict[str, Any]) -> Any:
    made = DeepSpeedZeroConfig(**given)
    return [None if part is None else part.device for part in (made.offload_param, made.offload_optimizer)]


PARAM = ["device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"]
OPTIMIZER = [
    "device", "nvme_path", "buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "pipeline", "fast_init",
    "ratio",
]  # fmt: skip


@cases_over({
    "param": {"offload_param": {"device": "cpu", "pin_memory": False, "buffer_count": 7}},
    "optimizer": {"offload_optimizer": {"device": "cpu", "ratio": 0.4, "pipeline_read": True}},
    "nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": "/local", "buffer_count": 3, "fast_init": True}},
    "param-nvme": {"offload_param": {"device": "nvme", "nvme_path": "/local", "max_in_cpu": 12}},
    "none": {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}},
    "empty": {"offload_param": {}, "offload_optimizer": {}},
    "null": {"offload_param": None, "offload_optimizer": None},
})  # fmt: skip
def zero_offload_sections(_directory: Path, given: dict[str, Any]) -> Any:
    made = DeepSpeedZeroConfig(stage=3, **given)
    return [
        None if section is None else _fields(section, names)
        for section, names in ((made.offload_param, PARAM), (made.offload_optimizer, OPTIMIZER))
    ]


@case()
def offload_defaults(_directory: Path) -> Any:
    param, optimizer = DeepSpeedZeroOffloadParamConfig(), DeepSpeedZeroOffloadOptimizerConfig()
    return (
        _fields(param, PARAM),
        _fields(
            optimizer,
            [*OPTIMIZER, "super_offload", "cpuadam_cores_perc"],
        ),
        [param.device == OffloadDeviceEnum.none, param.device == "none", optimizer.pipeline],
    )


@cases_over({
    "stage-4": {"stage": 4},
    "stage-text": {"stage": "three"},
    "bucket-0": {"reduce_bucket_size": 0},
    "bucket-negative": {"allgather_bucket_size": -1},
    "unknown": {"not_a_field": 1},
    "boolean": {"reduce_scatter": "perhaps"},
    "offload-device": {"offload_param": {"device": "moon"}},
    "offload-unknown": {"offload_optimizer": {"device": "cpu", "colour": 1}},
    "offload-count": {"offload_optimizer": {"device": "cpu", "buffer_count": -1}},
    "ratio-over": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 1.5}},
    "ratio-stage-2": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
    "threshold": {"stage3_param_persistence_threshold": -1},
    "grad-norm": {"stage": 3, "compute_grad_norm": False},
})  # fmt: skip
def zero_refusals(_directory: Path, given: dict[str, Any]) -> Any:
    import pydantic

    try:
        DeepSpeedZeroConfig(**given)
    except pydantic.ValidationError:
        return "ValidationError"
    return "nothing"


@cases_over({
    "float": {"reduce_bucket_size": 5e8, "stage": 3},
    "text": {"reduce_bucket_size": "1000"},
    "auto": {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
    "stage-enum": {"stage": ZeroStageEnum.gradients},
    "stage-text": {"stage": "2"},
    "boolean-word": {"reduce_scatter": "true", "contiguous_gradients": 0},
})  # fmt: skip
def zero_conversions(_directory: Path, given: dict[str, Any]) -> Any:
    return _fields(
        DeepSpeedZeroConfig(**given), ("stage", "reduce_bucket_size", "reduce_scatter", "contiguous_gradients")
    )


@case()
def zero_assignment(_directory: Path) -> Any:
    made = DeepSpeedZeroConfig(stage=1)
    made.stage = 3
    made.reduce_bucket_size = 77
    return made.stage, made.reduce_bucket_size, made.stage == ZeroStageEnum.weights


@case()
def zero_dumps(_directory: Path) -> Any:
    made = DeepSpeedZeroConfig(stage=2, offload_optimizer={"device": "cpu"})
    dumped = made.model_dump()
    return dumped["stage"], dumped["offload_optimizer"]["device"], isinstance(made.model_dump_json(), str)


@case()
def enums(_directory: Path) -> Any:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum  # type: ignore[import-not-found]

    return [
        {each.name: each.value for each in kind} for kind in (ZeroStageEnum, OffloadDeviceEnum, OffloadStateTypeEnum)
    ]


@cases_over({
    "all": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "micro-and-steps": {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "batch-and-steps": {"train_batch_size": 8, "gradient_accumulation_steps": 2},
    "batch-and-micro": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
    "batch": {"train_batch_size": 8},
    "micro": {"train_micro_batch_size_per_gpu": 3},
    "none": {},
    "steps": {"gradient_accumulation_steps": 2},
    "contradiction": {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "zero": {"train_batch_size": 0},
    "negative": {"train_batch_size": -8},
    "negative-micro": {"train_micro_batch_size_per_gpu": -4},
})  # fmt: skip
def batches_of_one_rank(_directory: Path, given: dict[str, Any]) -> Any:
    def triple() -> list[int]:
        made = DeepSpeedConfig(given)
        return [made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps]

    error = raised(triple)
    return triple() if error == "nothing" else error


@cases_over({
    "all": {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "batch": {"train_batch_size": 8},
    "micro": {"train_micro_batch_size_per_gpu": 3},
    "odd": {"train_batch_size": 9},
    "contradiction": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
}, ranks=2)  # fmt: skip
def batches_of_two_ranks(directory: Path, given: dict[str, Any]) -> Any:
    return batches_of_one_rank(directory, given)


@case()
def whole(_directory: Path) -> Any:
    made = DeepSpeedConfig({
        "train_batch_size": 4, "steps_per_print": 7, "gradient_clipping": 0.5, "prescale_gradients": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
        "zero_optimization": {"stage": 2}, "wall_clock_breakdown": True, "dump_state": False,
        "gradient_predivide_factor": 2.0, "memory_breakdown": False,
    })  # fmt: skip
    names = [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "steps_per_print",
        "gradient_clipping",
        "prescale_gradients",
        "optimizer_name",
        "optimizer_params",
        "scheduler_name",
        "scheduler_params",
        "zero_enabled",
        "zero_optimization_stage",
        "zero_allow_untested_optimizer",
        "wall_clock_breakdown",
        "dump_state",
        "gradient_predivide_factor",
        "world_size",
        "global_rank",
        "disable_allgather",
        "communication_data_type",
        "sparse_gradients_enabled",
        "memory_breakdown",
        "dataloader_drop_last",
        "graph_harvesting",
        "use_node_local_storage",
        "load_universal_checkpoint",
        "zero_force_ds_cpu_optimizer",
    ]
    fp16 = ["enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"]
    return _fields(made, names), made.zero_config.stage, _fields(made.float16_config, fp16)


@case()
def of_files(directory: Path) -> Any:
    path = directory / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 6}))
    twice = directory / "twice.json"
    twice.write_text('{"train_batch_size": 6, "train_batch_size": 7}')
    return [
        DeepSpeedConfig(str(path)).train_batch_size,
        DeepSpeedConfig(path.as_posix()).train_micro_batch_size_per_gpu,
        raised(lambda: DeepSpeedConfig(str(twice))),
        raised(lambda: DeepSpeedConfig(str(directory / "absent.json"))),
        raised(lambda: DeepSpeedConfig(7)),
    ]


@cases_over({
    "dict": "config",
    "path": "config-path",
    "params": "config_params",
    "args": "args",
    "args-and-config": "both",
    "none": "none",
})  # fmt: skip
def ways_into_initialize(directory: Path, way: str) -> Any:
    import argparse

    given = config(1)
    path = directory / "ds.json"
    path.write_text(json.dumps(given))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=0)
    keywords: dict[str, dict[str, Any]] = {
        "config": {"config": given}, "config-path": {"config": str(path)}, "config_params": {"config_params": given},
        "args": {"args": args}, "both": {"args": args, "config": given}, "none": {},
    }  # fmt: skip
    model = stack()

    def stage() -> int:
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), **keywords[way])[0]
        return engine.zero_optimization_stage()

    error = raised(stage)
    return error if error != "nothing" else "started"


@cases_over({
    "fp16-and-amp": {"fp16": {"enabled": True}, "amp": {"enabled": True}},
    "unknown-optimizer": {"optimizer": {"type": "NoSuchOptimizer", "params": {"lr": 0.1}}},
    "unknown-zero-key": {"zero_optimization": {"stage": 1, "no_such_key": 1}},
    "no-batch": {"train_micro_batch_size_per_gpu": None},
    "stage-5": {"zero_optimization": {"stage": 5}},
})  # fmt: skip
def initialize_refuses(_directory: Path, given: dict[str, Any]) -> Any:
    merged = {key: value for key, value in {**config(1), **given}.items() if value is not None}
    return raised(lambda: start(stack(), merged)) != "nothing"


@case()
def without_a_model(_directory: Path) -> Any:
    return raised(lambda: deepspeed.initialize(model=None, config=config(0)))


@case()
def without_a_configuration(_directory: Path) -> Any:
    return raised(lambda: deepspeed.initialize(model=stack()))


@case()
def command_line(_directory: Path) -> Any:
    import argparse

    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    none, given = parser.parse_args([]), parser.parse_args(["--deepspeed", "--deepspeed_config", "foo.json"])
    return vars(none), vars(given)


@case()
def precision_sections(_directory: Path) -> Any:
    made = DeepSpeedConfig({"train_batch_size": 1, "bf16": {"enabled": True, "immediate_grad_update": True}})
    old = DeepSpeedConfig({"train_batch_size": 1, "bfloat16": {"enabled": True}})
    return [
        made.bfloat16_config.enabled, made.bfloat16_config.immediate_grad_update, made.float16_config.enabled,
        old.bfloat16_config.enabled, made.float16_config.loss_scale_window, made.float16_config.hysteresis,
        made.float16_config.consecutive_hysteresis, made.float16_config.auto_cast,
        made.float16_config.initial_scale_power, made.float16_config.min_loss_scale,
    ]  # fmt: skip


@case()
def other_sections(_directory: Path) -> Any:
    made = DeepSpeedConfig({"train_batch_size": 1, "zero_optimization": True, "comms_logger": {"enabled": True}})
    return [
        made.zero_config.stage, made.zero_enabled, made.comms_config.comms_logger_enabled,
        made.flops_profiler_config.enabled, made.flops_profiler_config.profile_step,
        made.activation_checkpointing_config.partition_activations, made.monitor_config.tensorboard.enabled,
        made.aio_config["block_size"] if isinstance(made.aio_config, dict) else made.aio_config.block_size,
    ]  # fmt: skip


@cases_over({
    "nothing": {}, "bf16": {"bf16": {"enabled": True}},
    "unchecked": {"bf16": {"enabled": True, "check_grad_overflow": False}},
    "types": {"data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "fp32", "keep_in_fp32_modules": ["norm"]}},
})  # fmt: skip
def dtypes_of_a_configuration(_directory: Path, given: dict[str, Any]) -> Any:
    made = DeepSpeedConfig(config(2, **given))
    names = ("param_dtype", "buffer_dtype", "grad_accum_dtype", "keep_in_fp32_modules")
    return [getattr(made, name) for name in names], made.bfloat16_config.check_grad_overflow


@cases_over({
    "unwritten": {}, "named": {"lower_precision_safe_modules": ["torch.nn.modules.linear.Linear"]},
    "none": {"lower_precision_safe_modules": []},
})  # fmt: skip
def engines_answers_on_autocast(_directory: Path, given: dict[str, Any]) -> Any:
    asked = config(0, torch_autocast={"enabled": True, "dtype": "bfloat16", **given}, log_level="ERROR")
    engine = start(stack(), asked)
    return engine.torch_autocast_lower_precision_safe_modules(), str(engine.torch_autocast_dtype()), engine.log_level()

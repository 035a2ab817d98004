"""DeepSpeed's configuration classes with their field names: views of a configuration that ``parse_config`` has checked.

For scripts that read their own JSON through them. Unknown and refused keys are refused here as by ``initialize``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

from infinity.config import Config, parse_config
from infinity.config.complaints import Complaints
from infinity.config.load import load
from infinity.config.old_names import modernise
from infinity.errors import ConfigError

PREFIX: Final = "stage3_"
"""Fields lack it: ``stage3_max_live_parameters`` is ``max_live_parameters``."""
ZERO_DEFAULTS: Final[Mapping[str, Any]] = {
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "round_robin_gradients": False,
    "legacy_stage1": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
    "log_trace_cache_warnings": False,
    "enable_sanity_checks": False,
    "save_muon_momentum_buffer_in_memory": False,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "stage3_model_persistence_threshold": sys.maxsize,
}
"""What DeepSpeed takes where a key is not written, of keys that the engine reads no setting from."""
OFFLOAD_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "offload_param": {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000},
    "offload_optimizer": {
        "buffer_count": 4,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    },
}
TOP_DEFAULTS: Final[Mapping[str, Any]] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "disable_allgather": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
}
NAMED_OTHERWISE: Final = {
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "comms_logger": "comms_config",
    "activation_checkpointing": "activation_checkpointing_config",
}
MONITORS: Final = ("tensorboard", "wandb", "csv_monitor")


class View:
    """Values under the dialect's names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(name for name in vars(self) if not name.startswith("_")))
        raise AttributeError(f"infinity's {type(self).__name__} has no {name}; it has {known}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class DeepSpeedZeroOffloadParamConfig(View):
    """The section ``offload_param``."""

    def __init__(self, **section: Any) -> None:
        super().__init__(_offload("offload_param", section))


class DeepSpeedZeroOffloadOptimizerConfig(View):
    """The section ``offload_optimizer``."""

    def __init__(self, **section: Any) -> None:
        super().__init__(_offload("offload_optimizer", section))

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap the update."""
        return bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroConfig(View):
    """The section ``zero_optimization``: its keys without ``stage3_``, old names under today's."""

    def __init__(self, strict: bool = False, **section: Any) -> None:
        """``strict``: taken for the dialect's sake: "auto" passes, everything else is always checked."""
        raw, config = _parsed(section)
        own = config.zero_optimization.model_dump()
        values = {**own, **ZERO_DEFAULTS, "overlap_comm": own["stage"] == 3}
        for name, value in raw.items():
            if value is not None and value != "auto":
                values[name] = own.get(name, value)
        values["offload_param"] = values["offload_optimizer"] = None
        if isinstance(raw.get("offload_param"), Mapping):
            values["offload_param"] = DeepSpeedZeroOffloadParamConfig(**raw["offload_param"])
        if isinstance(raw.get("offload_optimizer"), Mapping):
            values["offload_optimizer"] = DeepSpeedZeroOffloadOptimizerConfig(**raw["offload_optimizer"])
        super().__init__({name.removeprefix(PREFIX): value for name, value in values.items()})


class DeepSpeedConfig(View):
    """A whole configuration.

    Args:
        config: the JSON as a dict, or the path of a file.
        mpu: whose ``get_data_parallel_world_size()`` is the number of ranks that share the model; without one it is
            torch.distributed's.
        mesh_device: must be None.

    Raises:
        ConfigError: as ``initialize`` raises it.
    """

    def __init__(
        self, config: Mapping[str, Any] | str | os.PathLike[str], mpu: Any = None, mesh_device: Any = None
    ) -> None:
        if mesh_device is not None:
            raise ConfigError(
                "mesh_device", type(mesh_device).__name__, "there is no sequence parallelism: leave it out"
            )
        is_distributed = dist.is_available() and dist.is_initialized()
        world_size = dist.get_world_size() if is_distributed else 1
        if mpu is not None:
            world_size = int(mpu.get_data_parallel_world_size())
        parsed = parse_config(config, world_size=world_size, check_paths=False)
        raw = modernise(load(config, Complaints()), Complaints()).raw
        sections = {field: getattr(parsed, field) for field in type(parsed).model_fields}
        values = {field: value for field, value in sections.items() if field not in ("subsumed", "old_names")}
        for name in [
            *NAMED_OTHERWISE,
            *MONITORS,
            "aio",
            "flops_profiler",
            "zero_optimization",
            "optimizer",
            "scheduler",
        ]:
            del values[name]
        values |= {name: raw.get(name, default) for name, default in TOP_DEFAULTS.items() if name not in values}
        values |= {ours: sections[name] for name, ours in NAMED_OTHERWISE.items()}
        values |= {f"{name}_config": sections[name] for name in ("aio", "flops_profiler")}
        values["monitor_config"] = View({name: sections[name] for name in MONITORS})
        zero = DeepSpeedZeroConfig(**(raw.get("zero_optimization") or {}))
        values |= {"zero_config": zero, "zero_optimization_stage": zero.stage, "zero_enabled": zero.stage > 0}
        for section in ("optimizer", "scheduler"):
            written = raw.get(section) or {}
            values |= {f"{section}_name": written.get("type"), f"{section}_params": written.get("params")}
        if parsed.optimizer is not None and parsed.optimizer.type != "SGD":
            values["optimizer_name"] = values["optimizer_name"].lower()
        values |= {"fp16_enabled": parsed.fp16.enabled, "bfloat16_enabled": parsed.bf16.enabled}
        autocast = values.pop("torch_autocast")
        values |= {"torch_autocast_enabled": autocast.enabled, "torch_autocast_dtype": autocast.dtype}
        values |= {"grad_accum_dtype": parsed.data_types.grad_accum_dtype, "world_size": world_size}
        values |= {"global_rank": dist.get_rank() if is_distributed else 0, "_param_dict": config}
        super().__init__(values)


def _parsed(section: Mapping[str, Any]) -> tuple[dict[str, Any], Config]:
    """``zero_optimization`` in today's keys, and the configuration that it makes alone."""
    config = {"zero_optimization": dict(section)}
    raw = modernise(config, Complaints()).raw["zero_optimization"]
    return raw, parse_config(config, check_paths=False, before_trainer=True)


def _offload(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    # where it is checked alone, nvme_path may be missing, and weights must be the ones that are sharded
    path = {"nvme_path": section.get("nvme_path") or "."} if section.get("device") == "nvme" else {}
    _, config = _parsed({"stage": 3, name: {**section, **path}})
    own = getattr(config.zero_optimization, name).model_dump() | {"nvme_path": section.get("nvme_path")}
    given = {key: value for key, value in section.items() if value is not None and value != "auto"}
    return {**own, **OFFLOAD_DEFAULTS[name], **{key: own.get(key, value) for key, value in given.items()}}

"""``DeepSpeedConfig`` with its field names: a view of a configuration that ``parse_config`` has checked.

For scripts that read their own JSON through it. Unknown and refused keys are refused here as by ``initialize``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

from infinity.config import parse_config
from infinity.config.batch import BATCH_KEYS, resolve_batch
from infinity.config.complaints import Complaints
from infinity.config.load import load
from infinity.config.old_names import modernise
from infinity.deepspeed.asserted import asserted
from infinity.deepspeed.raw_config import section_of, without_idle_offload
from infinity.deepspeed.zero_config_classes import DeepSpeedZeroConfig
from infinity.errors import ConfigError

CLIPPING: Final = 1.0
"""What DeepSpeed clips the norm of gradients to where ``gradient_clipping`` is not written; infinity does not clip."""
TOP_DEFAULTS: Final[Mapping[str, Any]] = {
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "disable_allgather": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "use_node_local_storage": False,
    "load_universal_checkpoint": False,
}
AIO_DEFAULTS: Final[Mapping[str, Any]] = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}
CHECKPOINTING_DEFAULTS: Final = {"partition_activations": False}
"""Every rank has activations of its own: what would be partitioned is not there twice, true is taken as false."""
OWN_OPTIMIZERS: Final = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
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

    @asserted
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
        complaints = Complaints()
        given = load(config, complaints)
        complaints.raise_all()
        parsed = parse_config(
            {"gradient_clipping": CLIPPING, **_without_norm(without_idle_offload(given))},
            world_size=world_size,
            check_paths=False,
        )
        raw = modernise(given, Complaints()).raw
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
        values["flops_profiler_config"] = sections["flops_profiler"]
        values["aio_config"] = aio_of(raw)
        checkpointing = {**CHECKPOINTING_DEFAULTS, **dict(sections["activation_checkpointing"])}
        values["activation_checkpointing_config"] = View(checkpointing)
        checked = section_of(raw, "bf16").get("check_grad_overflow", True)
        immediately = {"immediate_grad_update": immediate(raw), "check_grad_overflow": checked}
        values["bfloat16_config"] = View({**dict(parsed.bf16), **immediately})
        log = {f"comms_logger_{name}" if name == "enabled" else name: value for name, value in sections["comms_logger"]}
        values["comms_config"] = View(log | {"enabled": sections["comms_logger"].enabled})
        monitors = {name: sections[name] for name in MONITORS}
        values["monitor_config"] = View({**monitors, "enabled": any(each.enabled for each in monitors.values())})
        zero = DeepSpeedZeroConfig(**(raw.get("zero_optimization") or {}))
        values |= {"zero_config": zero, "zero_optimization_stage": zero.stage, "zero_enabled": zero.stage > 0}
        for section in ("optimizer", "scheduler"):
            written = raw.get(section) or {}
            values |= {f"{section}_name": written.get("type"), f"{section}_params": written.get("params")}
        values["optimizer_name"] = optimizer_name(raw)
        values |= {"fp16_enabled": parsed.fp16.enabled, "bfloat16_enabled": parsed.bf16.enabled}
        autocast = values.pop("torch_autocast")
        values |= {"torch_autocast_enabled": autocast.enabled, "torch_autocast_dtype": autocast.dtype}
        values |= {**dict(parsed.data_types), "world_size": world_size}
        values["keep_in_fp32_modules"] = section_of(raw, "data_types").get("keep_in_fp32_modules", "auto")
        values |= {"global_rank": dist.get_rank() if is_distributed else 0, "_param_dict": config}
        super().__init__(values)

    @asserted
    def _configure_train_batch_size(self) -> None:
        """Fill in those of the three batch settings that were set to None. Raises ConfigError where they contradict
        each other, or are not positive."""
        given = {key: getattr(self, key) for key in BATCH_KEYS}
        for key, value in given.items():
            if value is not None and value <= 0:
                raise ConfigError(key, value, "must be greater than 0")
        train, micro, accumulation = given.values()
        sizes = resolve_batch(train=train, micro=micro, accumulation=accumulation, world_size=self.world_size)
        vars(self).update(zip(BATCH_KEYS, sizes, strict=True))


def optimizer_name(raw: Mapping[str, Any]) -> str | None:
    """The type that a raw configuration names, None if it names none: one of DeepSpeed's own in lower case, one of
    torch's as it is."""
    name: str | None = section_of(raw, "optimizer").get("type")
    return name.lower() if name is not None and name.lower() in OWN_OPTIMIZERS else name


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """What the norm of gradients is clipped to by a raw configuration; 0: to nothing."""
    return float(param_dict.get("gradient_clipping", CLIPPING))


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """The level that a raw configuration names, None if it names none."""
    level: str | None = param_dict.get("log_level")
    return level


def aio_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``aio`` with DeepSpeed's defaults."""
    return {**AIO_DEFAULTS, **section_of(raw, "aio")}


def immediate(raw: Mapping[str, Any]) -> bool:
    """``bf16.immediate_grad_update``, by default true: gradients are added up in the backward that makes them."""
    section = raw.get("bf16")
    return bool(section.get("immediate_grad_update", True)) if isinstance(section, Mapping) else True


def _without_norm(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``initialize`` alone refuses among the optimizer's parameters is left out."""
    section = section_of(given, "optimizer")
    params = section_of(section, "params")
    if "max_grad_norm" not in params:
        return dict(given)
    others = {name: value for name, value in params.items() if name != "max_grad_norm"}
    return {**given, "optimizer": {**section, "params": others}}

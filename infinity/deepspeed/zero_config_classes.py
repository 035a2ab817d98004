"""DeepSpeed's classes of the section ``zero_optimization``: its fields and defaults, and what ``initialize`` refuses.

They are for scripts that read or make their sections through them. The engine itself reads ``infinity.config``; what is
not a field of its own is only shown here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from infinity.config import parse_config
from infinity.config.complaints import Complaints
from infinity.config.old_names import modernise
from infinity.config.section import Count, Fraction, Positive
from infinity.config.sections import ZeroOptimization
from infinity.deepspeed.config_model import DeepSpeedConfigModel
from infinity.deepspeed.raw_config import without_idle_offload

PREFIX: Final = "stage3_"
"""Fields lack it: ``stage3_max_live_parameters`` is ``max_live_parameters``, and either can be written."""
DEFAULT_LEAF_MODULE_CLASSES: Final[list[str]] = [
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
]
DEFAULT_LEAF_MODULE_NAMES: Final[list[str]] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: Final[list[str]] = []
Device = Literal["none", "cpu", "nvme"]


def _same(name: str) -> Any:
    """A field whose default is that of the engine's own section; under ``name``, too, where that has the prefix."""
    default = ZeroOptimization.model_fields[name].default
    return Field(default=default, alias=name) if name.startswith(PREFIX) else Field(default=default)


def _words(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return list(dict.fromkeys(str(each) for each in value))
    return [value] if isinstance(value, str) else value


Words = Annotated[list[str], BeforeValidator(_words)]


class ZeroSection(DeepSpeedConfigModel):
    """What the classes of this section have in common: what ``initialize`` refuses they refuse."""

    place: ClassVar[str] = ""
    """Where the section stands below ``zero_optimization``."""

    @model_validator(mode="before")
    @classmethod
    def _check(cls, given: Any) -> Any:
        """``given`` in today's names. Raises ConfigError, which pydantic tells of, for what ``initialize`` refuses."""
        if not isinstance(given, Mapping):
            raise TypeError(f"must be an object, not {type(given).__name__}")
        own = {name: _raw(value) for name, value in given.items() if not cls._is_default(name, value)}
        # alone it says what it says: whether weights are sharded at its stage is asked by ``initialize``
        section: dict[str, Any] = own if "stage" in own else {**own, "stage": 3}
        if cls.place:
            # where it is checked alone, weights must be the ones that are sharded, and the path may be missing
            path = {"nvme_path": own.get("nvme_path") or "."} if own.get("device") == "nvme" else {}
            section = {"stage": 3, cls.place: {**own, **path}}
        parse_config(without_idle_offload({"zero_optimization": section}), check_paths=False, before_trainer=True)
        modern: dict[str, Any] = modernise({"zero_optimization": section}, Complaints()).raw["zero_optimization"]
        if given.keys() == cls.model_fields.keys():  # an assignment, of which pydantic reads the new value alone
            return given
        if "stage" not in own:
            modern.pop("stage")
        return own if cls.place else modern

    @classmethod
    def _is_default(cls, name: str, value: Any) -> bool:
        """Whether the field need not be looked at: it says what it says anyhow."""
        field = cls.model_fields.get(name)
        return value is None or (field is not None and type(value) is type(field.default) and value == field.default)


class DeepSpeedZeroOffloadParamConfig(ZeroSection):
    """The section ``offload_param``."""

    place = "offload_param"
    device: Device = "none"
    nvme_path: Path | None = None
    buffer_count: Count = 5
    buffer_size: Count = 100_000_000
    max_in_cpu: Count = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(ZeroSection):
    """The section ``offload_optimizer``."""

    place = "offload_optimizer"
    device: Device = "none"
    nvme_path: Path | None = None
    buffer_count: Count = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Fraction = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Fraction = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether reads or writes overlap the update."""
        return self.pipeline_read or self.pipeline_write


class DeepSpeedZeroLeafModuleConfig(ZeroSection):
    """The section ``leaf_module``: classes, names and ends of names, each word once."""

    place = "leaf_module"
    classes: Words = Field(default_factory=DEFAULT_LEAF_MODULE_CLASSES.copy)
    names: Words = Field(default_factory=DEFAULT_LEAF_MODULE_NAMES.copy)
    name_suffixes: Words = Field(default_factory=DEFAULT_LEAF_MODULE_NAME_SUFFIXES.copy)


class DeepSpeedZeroConfig(ZeroSection):
    """The section ``zero_optimization``: its keys without ``stage3_``, old names under today's."""

    stage: Annotated[int, Field(ge=0, le=3), BeforeValidator(lambda value: int(value))] = _same("stage")
    contiguous_gradients: bool = True
    reduce_scatter: bool = _same("reduce_scatter")
    reduce_bucket_size: Positive = _same("reduce_bucket_size")
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = _same("allgather_partitions")
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: bool | None = None
    """The default is true at stage 3 alone."""
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    sub_group_size: Count = _same("sub_group_size")
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    prefetch_bucket_size: Count = _same("stage3_prefetch_bucket_size")
    param_persistence_threshold: Count = _same("stage3_param_persistence_threshold")
    model_persistence_threshold: Count = Field(default=sys.maxsize, alias="stage3_model_persistence_threshold")
    max_live_parameters: Count = _same("stage3_max_live_parameters")
    max_reuse_distance: Count = _same("stage3_max_reuse_distance")
    stage3_gather_fp16_weights_on_model_save: bool = False
    gather_16bit_weights_on_model_save: bool = _same("stage3_gather_16bit_weights_on_model_save")
    module_granularity_threshold: Count = Field(default=0, alias="stage3_module_granularity_threshold")
    use_all_reduce_for_fetch_params: bool = _same("stage3_use_all_reduce_for_fetch_params")
    allgather_sequential: bool = Field(default=False, alias="stage3_allgather_sequential")
    ignore_unused_parameters: bool = _same("ignore_unused_parameters")
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    zeropp_loco_param: dict[str, Any] | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeedZeroConfig:
        if self.overlap_comm is None:
            self.__dict__["overlap_comm"] = self.stage == 3
        if self.offload_optimizer is not None and self.offload_optimizer.ratio < 1.0 and self.stage != 3:
            raise ValueError(f"offload_optimizer.ratio = {self.offload_optimizer.ratio} needs stage 3")
        if not self.compute_grad_norm and self.stage not in (1, 2):
            raise ValueError("compute_grad_norm = False needs stage 1 or 2")
        return self


def _raw(value: Any) -> Any:
    """The value as the JSON would have it."""
    if isinstance(value, ZeroSection):
        return {name: _raw(getattr(value, name)) for name in value.model_fields_set}
    if isinstance(value, Path):
        return str(value)
    return value

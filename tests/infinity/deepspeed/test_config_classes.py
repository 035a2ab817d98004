"""DeepSpeed's configuration classes have its field names, and the values that the engine would run with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from torch import nn

import infinity.deepspeed as deepspeed
from infinity.deepspeed import config_classes, zero_config_classes
from infinity.errors import CombinedConfigError, ConfigError

DeepSpeedConfig = config_classes.DeepSpeedConfig
DeepSpeedZeroConfig: Any = zero_config_classes.DeepSpeedZeroConfig
DeepSpeedZeroOffloadParamConfig: Any = zero_config_classes.DeepSpeedZeroOffloadParamConfig
DeepSpeedZeroOffloadOptimizerConfig: Any = zero_config_classes.DeepSpeedZeroOffloadOptimizerConfig
FILE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 5,
    "managed_gradient_accumulation": False,
    "fp16": {"enabled": True, "initial_scale_power": 8},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "activation_checkpointing": {"number_checkpoints": 4},
    "torch_autocast": {"enabled": False, "dtype": "float16"},
    "tensorboard": {"enabled": True, "job_name": "one"},
    "zero_optimization": {"stage": 3, "param_persistence_threshold": 100, "sub_group_size": 10, "cpu_offload": True},
}


def test_a_section_by_itself_is_not_asked_for_its_stage() -> None:
    found = DeepSpeedZeroConfig(cpu_offload_param=True, cpu_offload=True)
    assert found.stage == 0
    assert isinstance(found.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(found.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)


def test_a_whole_configuration(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILE))
    for config in (DeepSpeedConfig(FILE), DeepSpeedConfig(str(path))):
        assert config.train_batch_size == 8
        assert config.train_micro_batch_size_per_gpu == 4
        assert config.gradient_accumulation_steps == 2
        assert config.managed_gradient_accumulation is False
        assert (config.gradient_clipping, config.steps_per_print) == (1.0, 5)
        assert config.fp16_enabled
        assert config.float16_config.initial_scale_power == 8
        assert not config.bfloat16_config.enabled
        assert config.optimizer_name == "adamw"
        assert config.optimizer_params == {"lr": 1e-4, "betas": [0.9, 0.95]}
        assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 10})
        assert config.monitor_config.tensorboard.job_name == "one"
        assert config.activation_checkpointing_config.number_checkpoints == 4
        assert (config.torch_autocast_enabled, config.torch_autocast_dtype) == (False, "fp16")
        assert config.zero_enabled
        assert config.zero_optimization_stage == config.zero_config.stage == 3
        assert config.zero_config.param_persistence_threshold == 100
        assert config.zero_config.sub_group_size == 10
        assert config.zero_config.offload_optimizer.device == "cpu"
        assert (config.prescale_gradients, config.world_size, config.global_rank) == (False, 1, 0)


def test_more_ranks_share_the_batch() -> None:
    class TwoRanks:
        def get_data_parallel_world_size(self) -> int:
            return 2

    assert DeepSpeedConfig(FILE, mpu=TwoRanks()).train_micro_batch_size_per_gpu == 2


def test_what_is_wrong_is_refused_as_by_initialize(tmp_path: Path) -> None:
    with pytest.raises(CombinedConfigError, match="3 settings") as refusal:
        DeepSpeedConfig({"train_batch_size": 0, "zero_optimisation": {}, "pipeline": {"stages": 2}})
    assert {each.key for each in refusal.value.complaints} == {"train_batch_size", "zero_optimisation", "pipeline"}
    twice = tmp_path / "twice.json"
    twice.write_text('{"train_batch_size": 4, "train_batch_size": 2}')
    with pytest.raises(ConfigError, match="stands twice"):
        DeepSpeedConfig(str(twice))
    with pytest.raises(ConfigError, match="no sequence parallelism"):
        DeepSpeedConfig(FILE, mesh_device=object())
    with pytest.raises(AttributeError, match="DeepSpeedConfig has no curriculum_enabled"):
        _ = DeepSpeedConfig(FILE).curriculum_enabled


@pytest.mark.parametrize(
    "name",
    ["prefetch_bucket_size", "param_persistence_threshold", "max_reuse_distance", "max_live_parameters"],
)
def test_thresholds_are_written_with_their_prefix_or_without(name: str) -> None:
    for written in (name, f"stage3_{name}"):
        section: dict[str, Any] = {written: 12345}
        assert getattr(DeepSpeedZeroConfig(**section), name) == 12345


def test_old_names_of_zero() -> None:
    assert isinstance(
        DeepSpeedZeroConfig(stage=3, cpu_offload_param=True).offload_param, DeepSpeedZeroOffloadParamConfig
    )
    moved = DeepSpeedZeroConfig(cpu_offload=True).offload_optimizer
    assert isinstance(moved, DeepSpeedZeroOffloadOptimizerConfig)
    assert DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True).gather_16bit_weights_on_model_save


def test_defaults_of_zero_are_deepspeeds() -> None:
    config = DeepSpeedZeroConfig()
    assert (config.stage, config.overlap_comm, config.contiguous_gradients) == (0, False, True)
    assert config.reduce_bucket_size == config.allgather_bucket_size == 5e8
    assert (config.prefetch_bucket_size, config.param_persistence_threshold) == (5e7, 1e5)
    assert config.model_persistence_threshold == sys.maxsize
    assert (config.offload_param, config.offload_optimizer) == (None, None)
    assert DeepSpeedZeroConfig(stage=3).overlap_comm is True
    assert DeepSpeedZeroConfig(stage=3, overlap_comm=False).overlap_comm is False
    assert DeepSpeedZeroConfig(stage3_prefetch_bucket_size="auto").prefetch_bucket_size == 5e7


def test_offload_sections_alone() -> None:
    section = DeepSpeedZeroConfig(stage=3, offload_param={}, offload_optimizer=None)
    assert section.offload_param.device == "none"
    assert section.offload_optimizer is None
    weights = DeepSpeedZeroOffloadParamConfig(device="nvme", nvme_path="/nvme", max_in_cpu=7)
    assert (weights.device, weights.nvme_path, weights.max_in_cpu, weights.buffer_count) == (
        "nvme",
        Path("/nvme"),
        7,
        5,
    )
    for read, write in ((True, False), (False, True), (False, False)):
        states = DeepSpeedZeroOffloadOptimizerConfig(pipeline_read=read, pipeline_write=write)
        assert states.pipeline is (read or write)
    with pytest.raises(ValidationError, match=r"did you mean zero_optimization\.offload_optimizer\.nvme_path"):
        DeepSpeedZeroOffloadOptimizerConfig(nvmepath="/nvme")


def test_clipping_is_read_of_a_raw_configuration_with_its_default() -> None:
    read = config_classes.get_gradient_clipping
    assert (read({}), read({"gradient_clipping": 0}), read({"gradient_clipping": 0.5})) == (1.0, 0.0, 0.5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_to_be_offloaded_below_stage_3_are_told_as_they_were_given(stage: int) -> None:
    """The real one takes the section, and asks for it at stage 3 alone."""
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}},
    }
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=raw)[0]
    told = (engine.zero_offload_param(), DeepSpeedConfig(raw).zero_config.offload_param)
    assert [section.device for section in told] == ["cpu", "cpu"]
    assert engine.config == raw
    engine.destroy()

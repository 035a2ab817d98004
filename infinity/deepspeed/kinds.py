"""DeepSpeed's small types and readers of a raw configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from typing import Any, Final

from infinity.deepspeed.raw_config import zero_of
from infinity.deepspeed.zero_config_classes import DeepSpeedZeroConfig

ZERO_OPTIMIZATION: Final = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """What is sharded; each stage also what the ones before it shard."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(StrEnum):
    """Where what is offloaded goes."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class ZeroParamType(Enum):
    """What a parameter is to ZeRO."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


@dataclass
class fragment_address:  # noqa: N801
    """Where a parameter's part lies in its group's flat one. DeepSpeed pickles it into its checkpoints."""

    numel: int
    start: int


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section ``zero_optimization`` of a raw configuration; a boolean is its old form."""
    return DeepSpeedZeroConfig(**zero_of(param_dict))


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """The value under a name, or the default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param

"""DeepSpeed's public constants."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from infinity.config.environment import deepspeeds_timeout_min

TORCH_DISTRIBUTED_DEFAULT_PORT: Final = 29500
default_pg_timeout: Final = timedelta(minutes=deepspeeds_timeout_min())
DEEPSPEED_ENVIRONMENT_NAME: Final = ".deepspeed_env"
"""The file whose NAME=VALUE lines the launcher hands on to the ranks."""
DLTS_HOSTFILE: Final = "/job/hostfile"
LOG_LEVEL: Final = "log_level"
LOG_LEVEL_DEFAULT: Final = None
ROUTE_TRAIN: Final = "train"
ROUTE_EVAL: Final = "eval"
ROUTE_PREDICT: Final = "predict"
ROUTE_ENCODE: Final = "encode"
MEMORY_OPT_ALLREDUCE_SIZE: Final = 500_000_000
OPTIMIZER_STATE_DICT: Final = "optimizer_state_dict"
FP32_GROUPS: Final = "fp32_groups"
ZERO_STAGE: Final = "zero_stage"
LOSS_SCALER: Final = "loss_scaler"
MIN_SWAPPABLE_BYTES: Final = 1 << 20
"""Smaller tensors DeepSpeed leaves in memory; here a chunk holds many."""
partitioned_param_data_shape: Final = [0]
"""The shape of what DeepSpeed leaves of a sharded weight; here a sharded weight keeps its own shape, without memory."""
FP32_FLAT_GROUPS: Final = "fp32_flat_groups"
BASE_OPTIMIZER_STATE: Final = "base_optimizer_state"
GROUP_PADDINGS: Final = "group_paddings"
PARTITION_COUNT: Final = "partition_count"
PARAM_SHAPES: Final = "param_shapes"
UNIVERSAL_CHECKPOINT_INFO: Final = "universal_checkpoint_info"
CHECKPOINT_PARALLEL_DIMS: Final = "checkpoint_parallel_dimensions"
CHECKPOINT_PP_DEGREE: Final = "pp_degree"
CHECKPOINT_TP_DEGREE: Final = "tp_degree"
AUTOEP_LAYERS_KEY: Final = "ds_autoep_layers"
"""Keys of DeepSpeed's own checkpoint files, which `infinity import-deepspeed` reads."""
ADAGRAD_OPTIMIZER: Final = "adagrad"
ADAM_OPTIMIZER: Final = "adam"
ADAMW_OPTIMIZER: Final = "adamw"
LAMB_OPTIMIZER: Final = "lamb"
LION_OPTIMIZER: Final = "lion"
MUON_OPTIMIZER: Final = "muon"
TORCH_ADAM_PARAM: Final = "torch_adam"
ADAM_W_MODE: Final = "adam_w_mode"
ADAM_W_MODE_DEFAULT: Final = True
"""Names that ``optimizer.type`` and its parameters have; which of them work is said in docs/config-keys.md."""

"""Which name stands in which of DeepSpeed's modules, and what it is here. The one list of names.

A place is a module below the root, dotted; a home is ``module:attribute``. Several modules of DeepSpeed show the same
names, so tables are built of named parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Names = Mapping[str, str]


def _of(home: str, names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names.split()}


def _renamed(home: str, **names: str) -> dict[str, str]:
    return {name: f"{home}:{theirs}" for name, theirs in names.items()}


_OURS: Final = "infinity.deepspeed"
_STARTING = _of(f"{_OURS}.starting", "initialize init_inference add_config_arguments")
_DISTRIBUTED = _of(f"{_OURS}.distributed", "init_distributed")
_ENGINE = _of(f"{_OURS}.training_engine", "DeepSpeedEngine")
_OPTIMIZER = _of(f"{_OURS}.optimizer_kinds", "DeepSpeedOptimizer")
_CALLABLES = _of(f"{_OURS}.starting", "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable")
_LOADERS = _renamed("infinity.loader", DeepSpeedDataLoader="PlacedLoader") | _of(f"{_OURS}.loaders", "RepeatingLoader")
_CONFIG = _of("infinity.deepspeed.config_classes", "DeepSpeedConfig") | _renamed(
    "infinity.errors", DeepSpeedConfigError="ConfigError"
)
_ZERO_CONFIG = _of("infinity.deepspeed.zero_config_classes", "DeepSpeedZeroConfig")
_OFFLOAD_CONFIG = _of(
    "infinity.deepspeed.zero_config_classes", "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig"
) | _of(f"{_OURS}.kinds", "OffloadDeviceEnum")
_STATES = _of("infinity.zero", "OffloadStateTypeEnum")
_ACCELERATOR = _of(f"{_OURS}.accelerators", "get_accelerator")
_LOGS = _of(f"{_OURS}.logs", "logger log_dist log_dist_once set_log_level_from_string LoggerFactory")
_ON_DEVICE = _of(f"{_OURS}.building", "OnDevice")
_GROUPS = _of(
    f"{_OURS}.distributed",
    "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_world_size "
    "get_model_parallel_rank get_tensor_model_parallel_world_size get_tensor_model_parallel_rank",
)
_OWN_GROUPS = _renamed(
    f"{_OURS}.distributed",
    _get_data_parallel_group="get_data_parallel_group",
    _get_data_parallel_rank="get_data_parallel_rank",
    _get_data_parallel_world_size="get_data_parallel_world_size",
    _get_model_parallel_world_size="get_model_parallel_world_size",
    _get_sequence_parallel_world_size="get_model_parallel_world_size",
    _get_sequence_parallel_rank="get_model_parallel_rank",
    _get_sequence_data_parallel_group="get_data_parallel_group",
    _get_sequence_data_parallel_rank="get_data_parallel_rank",
    _get_sequence_data_parallel_world_size="get_data_parallel_world_size",
)
_PARAMETERS = (
    _of("infinity.zero", "GatheredParameters ZeroParamStatus register_external_parameter")
    | _of(f"{_OURS}.kinds", "ZeroParamType")
    | _of(f"{_OURS}.building", "Init")
)
_UNREGISTER = _of("infinity.zero", "unregister_external_parameter")
_TILING = _of("infinity.zero", "TiledLinear TiledLinearReturnBias")
_GENERATION = _of(f"{_OURS}.generation", "unwrap_model_for_generation")
_CONSTRUCTORS = _of(
    f"{_OURS}.constructors",
    "zero_wrapper_for_fp_tensor_constructor get_new_tensor_fn_for_dtype _orig_torch_tensor _orig_torch_empty "
    "_orig_torch_zeros _orig_torch_ones _orig_torch_full _orig_torch_arange _orig_torch_eye _orig_torch_randn",
)
_ZERO_3_NEEDS = _of(
    "infinity.zero", "estimate_zero3_model_states_mem_needs_all_live estimate_zero3_model_states_mem_needs_all_cold"
)
_ZERO_2_NEEDS = _of(
    "infinity.zero", "estimate_zero2_model_states_mem_needs_all_live estimate_zero2_model_states_mem_needs_all_cold"
)
_SCHEDULES = _of("infinity.update.schedules", "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest")
_SCHEDULE_NAMES = _of(
    f"{_OURS}.schedule_names",
    "VALID_LR_SCHEDULES LR_SCHEDULE LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR "
    "LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE "
    "CYCLE_FIRST_STEP_SIZE CYCLE_SECOND_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE "
    "CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE WARMUP_MIN_LR WARMUP_MAX_LR "
    "WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS "
    "EDGE_VALUE MID_VALUE",
)
_STATE_ACCESS = _of(
    "infinity.utils",
    "safe_get_full_grad safe_get_full_optimizer_state safe_get_local_grad safe_get_local_optimizer_state "
    "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state safe_set_local_fp32_param "
    "safe_set_local_grad safe_set_local_optimizer_state safe_update_full_grad_vectorized",
) | _of(f"{_OURS}.state_access", "safe_get_full_fp32_param safe_get_local_fp32_param")
_FRAGMENT = _of(f"{_OURS}.kinds", "fragment_address")
_LEAVES = _of(
    "infinity.utils",
    "get_z3_leaf_modules set_z3_leaf_module z3_leaf_parameter set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
)
_FP32_WEIGHTS = _of(
    f"{_OURS}.fp32_weights",
    "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict to_torch_tensor "
    "OUTPUT_DTYPE_NAMES",
) | _of(f"{_OURS}.checkpoint_files", "get_checkpoint_files get_optim_files get_model_state_files get_model_state_file")
_CHECKPOINTING = _of(
    "infinity.checkpointing",
    "checkpoint configure is_configured reset set_num_layers partition_activations_in_checkpoint",
) | _renamed("infinity.checkpointing", non_reentrant_checkpoint="checkpoint")
_ADAM = _of(f"{_OURS}.optimizers", "FusedAdam DeepSpeedCPUAdam")
_ADAGRAD = _of(f"{_OURS}.optimizers", "DeepSpeedCPUAdagrad")
_LION = _of(f"{_OURS}.optimizers", "FusedLion DeepSpeedCPULion")
_ZERO_SUPPORTED = _of(f"{_OURS}.optimizers", "is_zero_supported_optimizer")
_BUILDERS = _of(
    f"{_OURS}.op_builders",
    "CPUAdamBuilder CPUAdagradBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder AsyncIOBuilder UtilsBuilder "
    "FusedLambBuilder",
)
_OPS = _of(f"{_OURS}.op_builders", "compatible_ops installed_ops")
_MODULES = _of(f"{_OURS}.building", "recursive_getattr recursive_setattr")
_COLLECTIVES = _of(
    "torch.distributed",
    "ReduceOp ProcessGroup P2POp new_group destroy_process_group all_gather_object all_to_all batch_isend_irecv "
    "broadcast_object_list get_rank get_world_size is_available get_global_rank",
) | _of(
    f"{_OURS}.collectives",
    "all_gather all_gather_into_tensor all_reduce all_to_all_single barrier broadcast gather irecv isend "
    "monitored_barrier recv reduce reduce_scatter reduce_scatter_tensor scatter send",
)
_CHECKPOINT_KEYS = _of(
    f"{_OURS}.constants",
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE GROUP_PADDINGS PARTITION_COUNT "
    "PARAM_SHAPES ZERO_STAGE LOSS_SCALER UNIVERSAL_CHECKPOINT_INFO CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE "
    "CHECKPOINT_TP_DEGREE AUTOEP_LAYERS_KEY",
)
_INDEXED_DATASETS = _of(
    f"{_OURS}.indexed_dataset", "MMapIndexedDataset MMapIndexedDatasetBuilder index_file_path data_file_path dtypes"
)
_EXPERT_GROUPS = _of(
    f"{_OURS}.expert_groups",
    "_ensure_divisibility _get_expert_parallel_ranks _create_expert_and_data_parallel _get_expert_parallel_group "
    "_get_expert_parallel_group_ranks _get_expert_data_parallel_group _get_expert_data_parallel_group_ranks "
    "_get_max_expert_size _get_max_expert_parallel_group",
)
_REFUSED: Final = f"{_OURS}.refused_classes"
"""May be asked for, and not be made."""
_LAMB = _of(_REFUSED, "FusedLamb")
_ONEBIT = _of(_REFUSED, "OnebitAdam OnebitLamb ZeroOneAdam")
_PIPELINE = _of(_REFUSED, "PipelineModule LayerSpec TiedLayerSpec")
_COMM = (
    _DISTRIBUTED
    | _COLLECTIVES
    | _of(
        f"{_OURS}.distributed",
        "is_initialized get_local_rank get_world_group get_all_ranks_from_group allgather_fn reduce_scatter_fn "
        "inference_all_reduce has_all_gather_into_tensor has_reduce_scatter_tensor",
    )
    | _of(f"{_OURS}.constants", "default_pg_timeout")
    | _of(f"{_OURS}.starting", "log_summary")
)

TREE: Final[Mapping[str, Names]] = {
    "": _STARTING
    | _DISTRIBUTED
    | _ENGINE
    | _CALLABLES
    | _OPTIMIZER
    | _renamed("infinity.loader", DeepSpeedDataLoader="PlacedLoader")
    | _CONFIG
    | _ACCELERATOR
    | _of(f"{_OURS}.logs", "logger log_dist")
    | _ON_DEVICE
    | _of(_REFUSED, "PipelineModule PipelineEngine")
    | _of(f"{_OURS}.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT")
    | _of(f"{_OURS}.delivery", "install")
    | _of(
        f"{_OURS}.version",
        "version git_hash git_branch __git_hash__ __git_branch__ __version__ __version_major__ __version_minor__ "
        "__version_patch__",
    ),
    "accelerator": _ACCELERATOR | _of(f"{_OURS}.accelerators", "DeepSpeedAccelerator is_current_accelerator_supported"),
    "accelerator.cuda_accelerator": _of(f"{_OURS}.accelerators", "CUDA_Accelerator"),
    "accelerator.real_accelerator": _ACCELERATOR,
    "checkpoint": _of(f"{_OURS}.reshaping", "model_3d_desc get_model_3d_descriptor merge_state reshape_meg_2d_parallel")
    | _of(f"{_OURS}.checkpoint_files", "get_model_ckpt_name_for_rank")
    | _of(_REFUSED, "DeepSpeedCheckpoint ZeROCheckpoint")
    | _CHECKPOINT_KEYS,
    "checkpoint.constants": _CHECKPOINT_KEYS,
    "checkpoint.reshape_3d_utils": _of(f"{_OURS}.reshaping", "model_3d_desc get_model_3d_descriptor"),
    "checkpoint.reshape_meg_2d": _of(f"{_OURS}.reshaping", "meg_2d_parallel_map reshape_meg_2d_parallel"),
    "checkpoint.reshape_utils": _of(f"{_OURS}.reshaping", "merge_state partition_data"),
    "checkpoint.utils": _of(f"{_OURS}.tensors", "clone_tensors_for_torch_save")
    | _of(f"{_OURS}.checkpoint_files", "get_model_ckpt_name_for_rank"),
    "comm": _COMM,
    "comm.comm": _COMM,
    "constants": _of(f"{_OURS}.constants", "TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout"),
    "env_report": {},
    "git_version_info": _of(f"{_OURS}.version", "version git_hash git_branch torch_info") | _OPS,
    "inference": {},
    "inference.v2": {},
    "inference.v2.inference_utils": _of(f"{_OURS}.numbers", "ceil_div"),
    "launcher": {},
    "launcher.launch": {},
    "launcher.runner": _of(f"{_OURS}.constants", "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE"),
    "moe": {},
    "moe.layer": _of(_REFUSED, "MoE"),
    "moe.utils": _of(
        f"{_OURS}.experts", "has_moe_layers is_moe_param split_params_into_different_moe_groups_for_optimizer"
    ),
    "monitor": {},
    "monitor.monitor": _of(f"{_OURS}.monitors", "MonitorMaster"),
    "ops": _renamed(f"{_OURS}.op_builders", __compatible_ops__="compatible_ops", __installed_ops__="installed_ops"),
    "ops.adagrad": _ADAGRAD,
    "ops.adagrad.cpu_adagrad": _ADAGRAD,
    "ops.adam": _ADAM,
    "ops.adam.cpu_adam": _of(f"{_OURS}.optimizers", "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _of(f"{_OURS}.optimizers", "FusedAdam"),
    "ops.aio": _of(f"{_OURS}.op_builders", "AsyncIOBuilder"),
    "ops.lamb": _LAMB,
    "ops.lamb.fused_lamb": _LAMB,
    "ops.lion": _LION,
    "ops.lion.cpu_lion": _of(f"{_OURS}.optimizers", "DeepSpeedCPULion"),
    "ops.lion.fused_lion": _of(f"{_OURS}.optimizers", "FusedLion"),
    "ops.op_builder": _BUILDERS | _of(f"{_OURS}.op_builders", "OpBuilder"),
    "ops.op_builder.all_ops": _of(f"{_OURS}.op_builders", "ALL_OPS"),
    "pipe": _PIPELINE,
    "runtime": {},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": _OPTIMIZER | _of(f"{_OURS}.optimizer_kinds", "ZeROOptimizer"),
    "runtime.bf16_optimizer": _of(f"{_OURS}.optimizer_kinds", "BF16_Optimizer"),
    "runtime.config": _CONFIG
    | _ZERO_CONFIG
    | _of(f"{_OURS}.config_classes", "get_gradient_clipping get_log_level")
    | _of(
        f"{_OURS}.constants",
        "ADAGRAD_OPTIMIZER ADAM_OPTIMIZER ADAMW_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER "
        "TORCH_ADAM_PARAM ADAM_W_MODE ADAM_W_MODE_DEFAULT",
    ),
    "runtime.config_utils": _of(f"{_OURS}.kinds", "get_scalar_param get_list_param get_dict_param")
    | _of(f"{_OURS}.config_model", "DeepSpeedConfigModel get_config_default"),
    "runtime.constants": _of(
        f"{_OURS}.constants", "LOG_LEVEL LOG_LEVEL_DEFAULT ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE"
    )
    | _renamed(f"{_OURS}.config_classes", GRADIENT_CLIPPING_DEFAULT="CLIPPING"),
    "runtime.dataloader": _LOADERS,
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.data_sampling": {},
    "runtime.data_pipeline.data_sampling.indexed_dataset": _INDEXED_DATASETS,
    "runtime.engine": _ENGINE | _CALLABLES | _LOADERS | _of(f"{_OURS}.constants", "MEMORY_OPT_ALLREDUCE_SIZE"),
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": _of(f"{_OURS}.optimizer_kinds", "FP16_Optimizer"),
    "runtime.fp16.onebit": _ONEBIT,
    "runtime.fp16.onebit.adam": _of(_REFUSED, "OnebitAdam"),
    "runtime.fp16.onebit.lamb": _of(_REFUSED, "OnebitLamb"),
    "runtime.fp16.onebit.zoadam": _of(_REFUSED, "ZeroOneAdam"),
    "runtime.fp16.unfused_optimizer": _of(f"{_OURS}.optimizer_kinds", "FP16_UnfusedOptimizer"),
    "runtime.fp16.loss_scaler": _of(
        f"{_OURS}.loss_scalers",
        "LossScaler DynamicLossScaler LossScalerBase CreateLossScaler LossScaleConfig LossScaleProfile "
        "INITIAL_LOSS_SCALE SCALE_WINDOW DELAYED_SHIFT CONSECUTIVE_HYSTERESIS MIN_LOSS_SCALE",
    ),
    "runtime.pipe": _PIPELINE,
    "runtime.pipe.engine": _of(_REFUSED, "PipelineEngine"),
    "runtime.pipe.module": _PIPELINE,
    "runtime.lr_schedules": _SCHEDULES
    | _SCHEDULE_NAMES
    | _of(
        f"{_OURS}.schedule_names",
        "add_tuning_arguments get_config_from_args get_lr_from_config override_params override_lr_range_test_params "
        "override_1cycle_params override_warmupLR_params override_warmupCosineLR_params",
    ),
    "runtime.precision_config": _of(
        f"{_OURS}.precision_config_classes",
        "DeepSpeedFP16Config DeepSpeedBF16Config get_float16_config get_bfloat16_config FP16 BFLOAT16 BFLOAT16_OLD "
        "INITIAL_LOSS_SCALE SCALE_WINDOW DELAYED_SHIFT CONSECUTIVE_HYSTERESIS MIN_LOSS_SCALE",
    ),
    "runtime.superoffload": {},
    "runtime.superoffload.superoffload_stage3": _of(_REFUSED, "SuperOffloadOptimizer_Stage3"),
    "runtime.swap_tensor": _of(f"{_OURS}.constants", "MIN_SWAPPABLE_BYTES"),
    "runtime.utils": _of(
        f"{_OURS}.tensors",
        "clip_grad_norm_ get_global_norm_of_tensors move_to_device copy_to_device "
        "see_memory_usage get_inactive_params set_random_seed empty_cache ensure_directory_exists call_to_str",
    )
    | _of(
        f"{_OURS}.numbers",
        "prefix_sum_inc partition_uniform partition_balanced get_only_unique_item get_global_norm get_weight_norm "
        "is_invalid_grad_norm combine_grad_norm_groups "
        "get_flattened_grad_norm clip_tensors_by_global_norm align_dense_tensors is_model_parallel_parameter "
        "noop_decorator noop_context CheckOverflow count_used_parameters_in_backward mask_nan_or_inf_with_val_inplace",
    )
    | _of(f"{_OURS}.partitioned_tensor", "PartitionedTensor"),
    "runtime.zero": _PARAMETERS | _TILING | _GENERATION,
    "runtime.zero.config": _ZERO_CONFIG
    | _OFFLOAD_CONFIG
    | _of(f"{_OURS}.kinds", "ZeroStageEnum get_zero_config ZERO_OPTIMIZATION"),
    "runtime.zero.leaf_module_config": _of(
        "infinity.deepspeed.zero_config_classes",
        "DeepSpeedZeroLeafModuleConfig DEFAULT_LEAF_MODULE_CLASSES DEFAULT_LEAF_MODULE_NAMES "
        "DEFAULT_LEAF_MODULE_NAME_SUFFIXES",
    ),
    "runtime.zero.linear": _of(
        f"{_OURS}.linear_layers", "LinearModuleForZeroStage3 LinearFunctionForZeroStage3 zero3_linear_wrap"
    ),
    "runtime.zero.offload_config": _OFFLOAD_CONFIG | _STATES,
    "runtime.zero.offload_states": _STATES | _of(f"{_OURS}.state_access", "get_state_devices"),
    "runtime.zero.partition_parameters": _PARAMETERS
    | _UNREGISTER
    | _CONSTRUCTORS
    | _ACCELERATOR
    | _of(f"{_OURS}.handles", "MultipleAllGatherHandles")
    | _of(f"{_OURS}.constants", "partitioned_param_data_shape")
    | _of(f"{_OURS}.building", "is_zero_param"),
    "runtime.zero.stage3": _ZERO_3_NEEDS
    | _GENERATION
    | _of(f"{_OURS}.optimizer_kinds", "DeepSpeedZeroOptimizer_Stage3"),
    "runtime.zero.stage_1_and_2": _ZERO_2_NEEDS
    | _of(f"{_OURS}.tensors", "split_half_float_double")
    | _of(f"{_OURS}.optimizer_kinds", "DeepSpeedZeroOptimizer"),
    "runtime.zero.tiling": _TILING | _of(f"{_OURS}.building", "split_tensor_along_last_dim"),
    "runtime.zero.utils": _ZERO_SUPPORTED
    | _of(f"{_OURS}.building", "is_zero_param")
    | _of(f"{_OURS}.asserted", "ZeRORuntimeException"),
    "utils": _LOGS
    | _ON_DEVICE
    | _STATE_ACCESS
    | _FRAGMENT
    | _LEAVES
    | _MODULES
    | _GROUPS
    | _of(f"{_OURS}.loaders", "RepeatingLoader")
    | _of(f"{_OURS}.ranges", "instrument_w_nvtx"),
    "utils.bwc": _of(
        f"{_OURS}.model_parallel",
        "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size bwc_tensor_model_parallel_group "
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group",
    ),
    "utils.debug": _of(f"{_OURS}.debugging", "printflock"),
    "utils.groups": _GROUPS | _OWN_GROUPS | _EXPERT_GROUPS,
    "utils.init_on_device": _ON_DEVICE,
    "utils.logging": _LOGS | _of(f"{_OURS}.logs", "get_dist_msg print_dist"),
    "utils.nvtx": _of(f"{_OURS}.ranges", "instrument_w_nvtx"),
    "utils.pin_memory": _of(f"{_OURS}.page_locked", "NativePinnedMemory"),
    "utils.static_cache": _of(f"{_OURS}.static_cache", "DeepSpeedStaticCache DeepSpeedStaticLayer"),
    "utils.tensor_fragment": _STATE_ACCESS | _FRAGMENT,
    "utils.timer": _of(f"{_OURS}.throughput", "ThroughputTimer")
    | _of(
        f"{_OURS}.timers",
        "SynchronizedWallClockTimer NoopTimer FORWARD_MICRO_TIMER FORWARD_GLOBAL_TIMER BACKWARD_MICRO_TIMER "
        "BACKWARD_GLOBAL_TIMER STEP_MICRO_TIMER STEP_GLOBAL_TIMER",
    ),
    "utils.torch": _of(f"{_OURS}.building", "required_torch_version"),
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _FP32_WEIGHTS,
    "utils.zero_to_torch": _of(f"{_OURS}.conversion", "main"),
}
SETTABLE: Final[Mapping[str, Names]] = {
    "accelerator.cuda_accelerator": _of(f"{_OURS}.accelerators", "nvtx"),
    "utils.debug": _of(f"{_OURS}.debugging", "fcntl"),
    "utils.nvtx": _of(f"{_OURS}.ranges", "enable_nvtx is_compiling get_accelerator DEEPSPEED_NVTX_DOMAIN"),
}
"""Names that scripts assign to: what is set is what their module of ours reads."""
RUNNABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "env_report": ("infinity", "doctor"),
    "launcher.runner": ("infinity", "deepspeed"),
    "utils.zero_to_fp32": (f"{_OURS}.recovery",),
    "utils.zero_to_torch": (f"{_OURS}.conversion",),
}
"""What ``python -m`` runs for a place: a module of ours, and words before the user's."""
ALIASES: Final[Mapping[str, str]] = {
    "dist": "comm",
    "zero": "runtime.zero",
    "checkpointing": "runtime.activation_checkpointing.checkpointing",
}
"""Attributes that are modules of another place."""

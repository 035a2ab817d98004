"""The keys that DeepSpeed 0.19.8 reads, as its sources and documents name them."""

from __future__ import annotations

TOP = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping steps_per_print dump_state wall_clock_breakdown memory_breakdown log_level disable_python_gc
    communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor
    gradient_allreduce_op sparse_gradients disable_allgather vocabulary_size dataloader_drop_last sequence_parallel_size
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer use_data_before_expert_parallelism graph_harvesting
    allgather_size bfloat16.enabled
"""
SECTIONS = {
    "optimizer": "type legacy_fusion",
    "optimizer.params": """
        lr betas eps weight_decay torch_adam adam_w_mode bias_correction amsgrad fp32_optimizer_states max_grad_norm
    """,
    "scheduler": "type",
    "scheduler.params": """
        last_batch_iteration total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type warmup_min_ratio
        cos_min_ratio cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size
        cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom
        decay_mom_rate lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase
    """,
    "fp16": """
        enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
        min_loss_scale fp16_master_weights_and_grads
    """,
    "bf16": """
        enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states
    """,
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "zero_optimization": """
        stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions
        allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint sub_group_size
        cpu_offload cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory ignore_unused_parameters
        legacy_stage1 round_robin_gradients parameter_alignment stage3_prefetch_bucket_size prefetch_bucket_size
        stage3_param_persistence_threshold param_persistence_threshold stage3_model_persistence_threshold
        model_persistence_threshold stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance
        max_reuse_distance stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential
        allgather_sequential zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
        zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
        memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory
    """,
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc
    """,
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.zenflow": """
        topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio full_warm_up_rounds
        pt_reserved_cores_perc steps_per_epoch
    """,
    "aio": "block_size queue_depth intra_op_parallelism thread_count num_threads single_submit overlap_events use_gds",
    "activation_checkpointing": """
        partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary profile
        cpu_checkpointing
    """,
    "checkpoint": "tag_validation load_universal use_node_local_storage checkpoint_serialization writer.type",
    "checkpoint.parallel_write": "pipeline_stage",
    "compile": "deepcompile offload_opt_states offload_parameters offload_activation passes",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "flops_profiler": """
        enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file
    """,
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "timers.throughput": "enabled synchronized",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled project workspace api_key experiment_name",
    "trackio": "enabled project",
}
WHOLE = """
    amp autotuning compression_training curriculum_learning data_efficiency datastates_ckpt eigenvalue elasticity
    expert_parallel hybrid_engine nebula pipeline progressive_layer_drop quantize_training sparse_attention
    tensor_parallel weight_quantization
"""

ALL: tuple[str, ...] = (
    *TOP.split(),
    *(f"{section}.{name}" for section, names in SECTIONS.items() for name in names.split()),
    *WHOLE.split(),
)
